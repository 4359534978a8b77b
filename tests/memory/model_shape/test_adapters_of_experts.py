"""Adapters by `all-linear` on models with experts: counted parameters against PEFT's, models built without
data."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.cli.plan.model_shape import shape_for
from memtrain.memory.explain.own_layers import activations_words
from memtrain.recipes.sections.model import Adapter

BASE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
DELTA = {"linear_num_value_heads": 8, "linear_num_key_heads": 4}
DELTA |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 96}
MODELS = {
    "qwen3_next": DELTA,
    "qwen2_moe": {"shared_expert_intermediate_size": 96},
    "deepseek_v3": ROUTED | LATENT | {"v_head_dim": 16, "num_key_value_heads": 4},
    "glm4_moe": ROUTED,
    "qwen3_moe": {"mlp_only_layers": [0]},
    "olmoe": {},
}


@pytest.mark.parametrize("targets", ["all-linear", "o_proj"])
@pytest.mark.parametrize("model_type", MODELS)
def test_adapters_of_models_with_experts_are_those_that_peft_makes(model_type, targets):
    """Shared experts and dense layers of most have maps by the names of experts', which get none by
    `all-linear`; linear attention's maps get them."""
    config = BASE | MODELS[model_type] | {"model_type": model_type}
    named = targets if targets == "all-linear" else [targets]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=named))
    trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    shape = shape_for(config)
    assert shape.num_adapter(Adapter(r=4, target_modules=(targets,))) == trained


def test_layers_with_a_state_of_their_own_are_said_to_keep_more_than_is_counted():
    shape = shape_for(BASE | DELTA | {"model_type": "qwen3_next"})
    assert shape.is_floor
    assert "may be many times as much" in activations_words(shape)
    plain = shape_for(BASE | {"model_type": "olmoe"})
    assert (plain.is_floor, activations_words(plain)) == (False, "")
