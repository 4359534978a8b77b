"""Positions scaled by the recipe: the section that transformers reads, and the length that a model is for."""

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from memtrain.errors import RecipeError
from memtrain.memory.model_shape.rope_scaling import scaled, suggested
from memtrain.recipes.sections.model import Model, RopeScaling
from memtrain.trainers.model.loading.locate import with_scaled_positions

QWEN = {"model_type": "qwen3", "rope_theta": 1e6, "max_position_embeddings": 40_960}
LLAMA31 = {
    "model_type": "llama",
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def test_positions_without_a_scaling_get_one():
    found = scaled(QWEN, RopeScaling(rope_type="yarn", factor=4.0))
    assert found["max_position_embeddings"] == 163_840
    assert found["rope_parameters"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e6,
        "original_max_position_embeddings": 40_960,
    }


def test_a_scaling_of_the_same_kind_goes_on():
    """Llama 3.1 starts from 8,192 tokens by 8: 16 is twice as long, and its other numbers stay."""
    found = scaled(LLAMA31, RopeScaling(rope_type="llama3", factor=16.0))
    assert found["max_position_embeddings"] == 262_144
    section = found["rope_parameters"]
    assert section["original_max_position_embeddings"] == 8192
    assert (section["low_freq_factor"], section["factor"]) == (1.0, 16.0)
    assert "rope_scaling" not in found


def test_another_kind_takes_the_place_of_the_models_own():
    section = scaled(LLAMA31, RopeScaling(rope_type="yarn", factor=2.0))["rope_parameters"]
    assert section["original_max_position_embeddings"] == 131_072
    assert "low_freq_factor" not in section


def test_dynamic_ntk_counts_from_the_models_own_length():
    assert scaled(QWEN, RopeScaling(rope_type="dynamic", factor=4.0))["max_position_embeddings"] == 40_960


def test_what_is_suggested_is_long_enough():
    assert suggested(QWEN, 100_000) == "{rope_type: yarn, factor: 3}"
    assert suggested(LLAMA31, 262_144) == "{rope_type: llama3, factor: 16}"
    assert suggested({"model_type": "gpt2", "max_position_embeddings": 1024}, 2048) is None


def test_positions_of_several_kinds_are_refused():
    nested = {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {}}}
    with pytest.raises(RecipeError, match="no single kind of rotary positions"):
        scaled(QWEN | nested, RopeScaling(rope_type="yarn", factor=2.0))


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3", "dynamic"])
def test_a_model_is_built_as_from_a_config_json_with_the_same_words(kind: str):
    """The reference: transformers reading `rope_scaling` of a configuration file."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 128, "rope_theta": 10_000.0}
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    section = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 128} | more
    expected = LlamaConfig(**sizes, rope_scaling=section)
    recipe = Model(
        config={"model_type": "llama"},
        tokenizer="builtin:tiny",
        rope_scaling=RopeScaling(rope_type=kind, factor=4.0, **more),
    )
    found = with_scaled_positions(AutoConfig.for_model("llama", **sizes), recipe)
    ids = torch.arange(60)[None]
    outputs = []
    for config in (expected, found):
        torch.manual_seed(0)
        outputs.append(LlamaForCausalLM(config)(input_ids=ids, position_ids=ids * 5).logits)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def test_a_key_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="beta_fast is of rope_type: yarn"):
        RopeScaling(rope_type="linear", factor=2.0, beta_fast=32.0)
