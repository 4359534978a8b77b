"""What FSDP2 gathers together."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from memtrain.trainers.distributed.fsdp2 import _begin_groups_anew, _groups

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LAYERS = [["model.layers.0"], ["model.layers.1"]]


@pytest.mark.parametrize(
    ("model_class", "is_tied", "rest"),
    [
        (LlamaForCausalLM, False, [["model.embed_tokens"], ["lm_head"], ["model"]]),
        (LlamaForCausalLM, True, [["model", "lm_head"]]),
        (LlamaForSequenceClassification, False, [["model.embed_tokens"], ["score"], ["model"]]),
    ],
)
def test_embedding_and_head_are_groups_of_their_own(model_class, is_tied: bool, rest: list[list[str]]):
    model = model_class(LlamaConfig(**SHAPE, tie_word_embeddings=is_tied, pad_token_id=0))
    names = {id(module): name for name, module in model.named_modules()}
    found = [[names[id(module)] for module in group] for group in _groups(model)]
    assert found == LAYERS + rest


@pytest.fixture
def alone():
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_pass_gathers_a_group_of_which_a_module_never_ran(alone):
    """A tied head lends its weight alone; until torch 2.12 its group was then not gathered a second time."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard([model[0], model[1]], mesh=alone)
    fully_shard(model, mesh=alone)
    left = model[0]._get_fsdp_state()._modules_to_run_forward
    left.add(model[1])
    _begin_groups_anew(model, ())
    assert not left
