"""What FSDP2 gathers together."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from memtrain.trainers.distributed.fsdp2 import _groups

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
