"""Modules that are known by their code, in every family that the planner counts on."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.families import FAMILIES
from memtrain.trainers.model.kernels.apply import apply_kernels

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "num_local_experts": 2}
SMALL |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2}
FUSED = [name for name, family in FAMILIES.items() if family.has_fused]


def model_of(name, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL))


def gradients(model):
    ids = torch.arange(1, 25).reshape(2, 12)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", FUSED)
def test_a_family_has_the_same_loss_and_gradients(name, make_settings):
    model = model_of(name)
    loss, expected = gradients(model)
    model.zero_grad()
    apply_kernels(model, make_settings(kernels="fused"))
    fused, found = gradients(model)
    assert fused == loss
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            assert (one - other).norm() <= 2e-6 * other.norm() + 1e-9


@pytest.mark.parametrize("name", FUSED)
def test_every_norm_mlp_and_attention_of_a_family_is_taken(name, make_settings):
    model = model_of(name, "meta")
    apply_kernels(model, make_settings(kernels="fused"))
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP", "Attention")):
            assert "forward" in vars(module), type(module)


def test_nothing_is_taken_unless_it_is_asked_for(make_settings):
    model = model_of("qwen3", "meta")
    apply_kernels(model, make_settings())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["gemma", "olmo2", "phi3"])
def test_other_code_is_reported(name, make_settings):
    with pytest.raises(LaunchError, match="differs from the code that the fused kernels replace"):
        apply_kernels(model_of(name, "meta"), make_settings(kernels="fused"))
