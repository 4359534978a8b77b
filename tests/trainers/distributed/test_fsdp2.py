"""What FSDP2 gathers together, and shards that wait on the host while a GPU computes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from memtrain.trainers.distributed import fsdp2
from memtrain.trainers.distributed.fsdp2 import _begin_groups_anew, _groups, own_shards, shard_engine
from memtrain.trainers.model.attention.run_device import run_device
from memtrain.trainers.model.offload.weights import compute_device
from memtrain.trainers.runtime.weight_layout import full_of, waits_on_host

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


class Summed(nn.Module):
    """Half-precision weights in one group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).float().sum()


def hooks_of(model: nn.Module) -> int:
    return sum(len(one._post_accumulate_grad_hooks or {}) for one in model.parameters())


def test_hooks_are_there_only_while_a_step_has_several_micro_batches(alone: DeviceMesh):
    """torch 2.13 waits for each copy of a gradient to the host where a weight has one."""
    model = Summed()
    fully_shard(model, mesh=alone)
    engine = shard_engine(model, own := own_shards(model))
    x = torch.randn(4, 3, dtype=torch.bfloat16)
    for num_micro_batches in (1, 3, 2, 1):
        engine.begin(model, num_micro_batches)
        assert hooks_of(model) == (num_micro_batches > 1)
        for _ in range(num_micro_batches):
            model(x).backward()
        engine.finish()
        expected = num_micro_batches * x.float().sum(0).expand(2, 3)
        torch.testing.assert_close(own["layer.weight"].grad.float(), expected, rtol=1e-2, atol=1e-2)
        own["layer.weight"].grad = None


def test_a_gradient_on_its_way_to_the_host_is_waited_for(alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch):
    """torch before 2.13 calls a hook while the copy to pinned memory is under way on the current stream."""
    model = Summed()
    fully_shard(model, mesh=alone)
    engine = shard_engine(model, own := own_shards(model))
    engine.begin(model, 2)
    (weight,) = model.parameters()

    def arrive() -> None:
        weight.grad.to_local().fill_(7.0)  # pyright: ignore

    monkeypatch.setattr(fsdp2, "waits_on_host", lambda parameter: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=arrive))
    for _ in range(2):
        model(torch.zeros(4, 3, dtype=torch.bfloat16)).backward()
    engine.finish()
    assert own["layer.weight"].grad.tolist() == [[14.0] * 3] * 2


def test_rows_on_the_host_meet_on_the_device_of_their_mesh(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch
):
    """NCCL sends nothing from the host: saving such a model would end with "No backend type associated with
    device type cpu". `meta` stands for the GPU; what lies there has no numbers."""
    rows = DTensor.from_local(torch.ones(2, 3), alone, [Shard(0)])
    assert not waits_on_host(rows)
    assert full_of(rows).tolist() == [[1.0] * 3] * 2
    monkeypatch.setattr(alone, "_device_type", "meta")
    assert waits_on_host(rows)
    assert full_of(rows).device.type == "meta"


def test_a_model_whose_rows_wait_on_the_host_computes_on_the_gpu(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch
):
    """Completions are read and written there; the first weight's device is the host's."""
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=alone)
    assert run_device(model) == compute_device(model) == torch.device("cpu")
    monkeypatch.setattr(next(model.parameters()).device_mesh, "_device_type", "cuda")  # pyright: ignore
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert run_device(model) == compute_device(model) == torch.device("cuda", 3)
