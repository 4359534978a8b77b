"""The choice of kernels: fused on CUDA where the family has them, unless Liger's are there."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.rules import ledger as ledger_module
from memtrain.memory.rules.kernels import decide_kernels
from memtrain.memory.rules.ledger import DecisionLog, SourcedRecipe
from memtrain.recipes.recipe import Recipe

CPU = SimpleNamespace(device="cpu")
GPU = Hardware.named("h100")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
SMALL |= {"intermediate_size": 48}
TAUGHT = {"distill": {"distill": {"teacher": "teacher"}}}


@pytest.fixture
def decided(monkeypatch):
    return partial(_decided, monkeypatch)


def _decided(
    monkeypatch, model_type="qwen3", hardware=GPU, presumed=(), here=(), config=None, method="sft", **model
):
    """(settings, reason of `kernels`, refusals). `presumed`: packages there; `here`: of this machine."""
    monkeypatch.setattr(ledger_module, "installed", lambda package: frozenset({package} & set(here)))
    tiny = {"config": {"model_type": "llama"}, "tokenizer": "builtin:tiny"}
    recipe = Recipe.model_validate(
        {"method": method, "model": tiny | model, "data": {"train": ("rows.jsonl",)}} | TAUGHT.get(method, {})
    )
    where = lambda key: "recipe.yaml:1" if key.removeprefix("model.") in model else "default"  # noqa: E731
    ledger = DecisionLog(SourcedRecipe(recipe, where), presumed=frozenset(presumed))
    config = {"model_type": model_type} | SMALL | (config or {})
    found = decide_kernels(ledger, hardware, shape_of(config), config)
    reason = next(one.reason for one in ledger.decisions if one.setting == "kernels")
    return found, reason, [fault.what for fault in ledger.faults]


@pytest.mark.parametrize(
    ("changes", "liger", "kernels", "reason"),
    [
        ({}, False, "fused", "fewer kernel launches"),
        ({"hardware": CPU}, False, "transformers", "fused kernels need CUDA"),
        ({"model_type": "gemma"}, False, "transformers", "gemma has no fused kernels"),
        ({"config": {"hidden_act": "relu2"}}, False, "transformers", "the model by relu2"),
        ({"here": ("liger_kernel",)}, True, "transformers", "Liger's kernels are used"),
        ({"here": ("liger_kernel",), "liger": "off"}, False, "fused", "fewer kernel launches"),
        ({"here": ("liger_kernel",), "kernels": "fused"}, False, "fused", "asked for"),
        ({"presumed": ("liger_kernel",)}, False, "fused", "fewer kernel launches"),
        ({"presumed": ("liger_kernel",), "liger": "on"}, True, "transformers", "Liger's kernels are used"),
        ({"presumed": ("liger_kernel",), "model_type": "gemma"}, True, "transformers", "gemma has no fused"),
        ({"presumed": ("liger_kernel",), "hardware": CPU}, False, "transformers", "fused kernels need CUDA"),
        ({"here": ("liger_kernel",), "model_type": "olmoe"}, False, "transformers", "olmoe has no fused"),
        ({"here": ("liger_kernel",), "config": {"hidden_act": "gelu"}}, False, "transformers", "by gelu"),
        ({"hardware": CPU, "kernels": "fused"}, False, "fused", "asked for"),
        ({"kernels": "transformers"}, False, "transformers", "asked for"),
    ],
)
def test_kernels_follow_device_family_and_liger(decided, changes, liger, kernels, reason):
    found, reported, refusals = decided(**changes)
    assert found == {"liger": liger, "kernels": kernels, "loss_kernel": "torch"}
    assert reason in reported
    assert not refusals


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"here": ("triton",)}, "triton"),
        ({"here": ("triton", "liger_kernel")}, "triton"),
        ({"here": ("triton",), "method": "distill"}, "torch"),
        ({"here": ("triton",), "hardware": CPU}, "torch"),
        ({"here": ("triton",), "kernels": "transformers"}, "torch"),
        ({"here": ("triton",), "config": {"final_logit_softcapping": 30.0}}, "torch"),
        ({"here": ("triton",), "hardware": replace(GPU, compute_capability=(6, 0))}, "torch"),
    ],
)
def test_the_loss_has_tritons_kernels_where_triton_runs(decided, changes, kernel):
    found, _, refusals = decided(**changes)
    assert found["loss_kernel"] == kernel
    assert not refusals


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "olmo2"}, "olmo2 has no fused kernels"),
        ({"presumed": ("liger_kernel",), "liger": "on"}, "has its own kernels for the same parts"),
    ],
)
def test_fused_kernels_that_cannot_be_are_refused(decided, changes, reason):
    _, _, refusals = decided(kernels="fused", **changes)
    assert any(reason in one for one in refusals)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "olmoe"}, "Liger has no kernels for olmoe"),
        ({"config": {"hidden_act": "gelu"}}, "and the model by gelu"),
    ],
)
def test_ligers_kernels_of_a_model_that_they_would_not_compute_are_refused(decided, changes, reason):
    _, _, refusals = decided(here=("liger_kernel",), liger="on", **changes)
    assert any(reason in one for one in refusals)
