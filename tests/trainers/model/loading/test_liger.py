"""Liger's kernels on a model: which of its parts, and the families that it knows."""

import inspect
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from trace_cases import has_liger
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.liger_families import LIGER_FAMILIES
from memtrain.trainers.model.loading import liger
from memtrain.trainers.model.loading.liger import apply_liger

SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
WHOLE = {"num_key_value_heads": 8, "head_dim": 64}
WITH = Settings.model_construct(liger=True, device="cuda")
needs_liger = pytest.mark.skipif(not has_liger(), reason="needs Liger (pip install 'memtrain[liger]')")


@pytest.fixture
def asked(monkeypatch):
    """What Liger is asked for; its package stands in as a module that notes it, and puts a rotation and a
    norm into the family's module as Liger does."""
    found = {}

    def patch(rms_norm=True, swiglu=True, rope=True, cross_entropy=False, model=None):
        found.update(rms_norm=rms_norm, swiglu=swiglu, rope=rope, cross_entropy=cross_entropy)
        if rope:
            family = sys.modules[type(model).__module__]
            family.apply_rotary_pos_emb = unturned
            family.Qwen3RMSNorm = nn.Identity

    def patch_of_another_rotation(rms_norm=True, rope=False, model=None):
        found.update(rms_norm=rms_norm, rope=rope)

    module = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = dict.fromkeys(("qwen3", "qwen3_moe"), patch)
    module.MODEL_TYPE_TO_APPLY_LIGER_FN["llama"] = patch_of_another_rotation
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(liger, "missing", lambda package: "")
    return found


def unturned(q, k, cos, sin):
    return q, k


def small(family, **more):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | more))


@pytest.mark.parametrize(("family", "more", "swiglu"), [("qwen3", {}, True), ("qwen3_moe", EXPERTS, False)])
def test_experts_stay_as_they_are(asked, family, more, swiglu):
    """Liger's own read stacks that may be packed, and compute gradients of frozen ones."""
    apply_liger(small(family, **more), WITH)
    assert asked == {"rms_norm": True, "swiglu": swiglu, "rope": True, "cross_entropy": False}


def test_a_rotation_that_is_off_by_itself_stays_off(asked):
    """Liger raises for Qwen3.5 where it is asked for, and would turn all of a head of Qwen3-Next."""
    apply_liger(small("llama"), WITH)
    assert asked == {"rms_norm": True, "rope": False}


def test_other_models_of_the_family_keep_their_code(asked):
    """The logits of one that was there before, and of one that is made afterwards, with the same weights."""
    ids = torch.arange(12).reshape(2, 6)
    before, patched = small("qwen3"), small("qwen3")
    patched.load_state_dict(before.state_dict())
    expected = before(ids).logits
    apply_liger(patched, WITH)
    after = small("qwen3")
    after.load_state_dict(before.state_dict())
    assert torch.equal(before(ids).logits, expected)
    assert torch.equal(after(ids).logits, expected)
    assert not torch.equal(patched(ids).logits, expected)


@needs_liger
@pytest.mark.parametrize("family", sorted(LIGER_FAMILIES))
def test_what_liger_puts_into_a_family_is_read_by_the_model_alone(family):
    """No name stays in the family's module, and where its rotation is Liger's every attention has it."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **WHOLE))
        except (KeyError, ValueError):
            pytest.skip(f"transformers has no causal LM of {family}")
    module = sys.modules[type(model).__module__]
    before, layer_norm = dict(vars(module)), nn.LayerNorm
    apply_liger(model, WITH)
    assert vars(module) == before
    assert nn.LayerNorm is layer_norm
    kinds = {type(one) for one in model.modules() if "rotary" in str(type(one).forward.__code__.co_names)}
    kinds &= {type(one) for one in model.modules() if type(one).__name__.endswith("Attention")}
    takes = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[family]).parameters
    turns = "rope" in takes and takes["rope"].default is True
    assert {type(one) for one in model.modules() if _reads_other_names(one)} == (kinds if turns else set())


def _reads_other_names(module):
    made = vars(module).get("forward")
    return made is not None and made.__func__.__code__ is type(module).forward.__code__


@needs_liger
def test_the_families_are_those_of_the_installed_package():
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    assert set(MODEL_TYPE_TO_APPLY_LIGER_FN) == LIGER_FAMILIES
