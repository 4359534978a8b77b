"""Liger's kernels on a model: which of its parts, and the families that it knows."""

import sys
from types import ModuleType

import pytest
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


@pytest.fixture
def asked(monkeypatch):
    """What Liger is asked for; its package stands in as a module that notes it."""
    found = {}

    def patch(rms_norm=True, swiglu=True, rope=True, cross_entropy=False, model=None):
        found.update(rms_norm=rms_norm, swiglu=swiglu, rope=rope, cross_entropy=cross_entropy)

    module = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = dict.fromkeys(("qwen3", "qwen3_moe"), patch)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(liger, "missing", lambda package: "")
    return found


@pytest.mark.parametrize(("family", "more", "swiglu"), [("qwen3", {}, True), ("qwen3_moe", EXPERTS, False)])
def test_experts_stay_as_they_are(asked, family, more, swiglu):
    """Liger's own read stacks that may be packed, and compute gradients of frozen ones."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | more))
    apply_liger(model, Settings.model_construct(liger=True, device="cuda"))
    assert asked == {"rms_norm": True, "swiglu": swiglu, "rope": True, "cross_entropy": False}


@pytest.mark.skipif(not has_liger(), reason="needs Liger (pip install 'memtrain[liger]')")
def test_the_families_are_those_of_the_installed_package():
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    assert set(MODEL_TYPE_TO_APPLY_LIGER_FN) == LIGER_FAMILIES
