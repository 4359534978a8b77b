"""What a configuration says of its experts, against a pass of the model that transformers builds from it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.memory.model_shape.config_parts import FLOAT32_ROUTED, experts_of, has_experts_at
from memtrain.trainers.model.experts.forward import is_experts

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64}
SMALL |= {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
SMALL |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1}
SMALL |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
SMALL |= {"v_head_dim": 8, "n_group": 2, "topk_group": 1, "pad_token_id": 0}
ROUTED_IN_HALF = ("gpt_oss", "olmoe", "qwen2_moe", "qwen3_moe")


def _model(model_type):
    config = AutoConfig.for_model(model_type, **SMALL, first_k_dense_replace=1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("model_type", [*sorted(FLOAT32_ROUTED), *ROUTED_IN_HALF])
def test_a_routers_weights_have_the_type_that_plans_count(model_type):
    model, seen = _model(model_type), []
    for module in model.modules():
        if is_experts(module):
            module.register_forward_pre_hook(lambda _, given: seen.append(given[2].dtype))
    model(input_ids=torch.arange(1, 17)[None])
    counted = experts_of(model.config.to_dict() | {"model_type": model_type}).weights_in_float32
    assert set(seen) == {torch.float32 if counted else torch.bfloat16}


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 2}),
        ("qwen3_moe", {"mlp_only_layers": [1]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("mixtral", {}),
    ],
)
def test_layers_of_experts_are_those_of_the_model(model_type, named):
    config = AutoConfig.for_model(model_type, **(SMALL | named))
    layers = AutoModelForCausalLM.from_config(config).model.layers
    made = [any(is_experts(module) for module in layer.modules()) for layer in layers]
    assert made == [has_experts_at(SMALL | named if named else SMALL, at) for at in range(3)]


def test_every_token_of_llama_4_goes_through_every_expert():
    """Seen by a trace: Scout's LoRA was predicted 52 % too low where one expert of sixteen was counted."""
    config = {"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size": 8192}
    dense, sparse = (experts_of(config | {"model_type": kind}) for kind in ("llama4_text", "mixtral"))
    assert dense is not None
    assert sparse is not None
    assert (dense.num_per_token, sparse.num_per_token) == (16, 1)
