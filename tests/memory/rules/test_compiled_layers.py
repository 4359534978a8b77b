"""Compiled layers: when a recipe may ask for them."""

from dataclasses import replace
from typing import Any

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.hardware.devices import Hardware, cpu


def test_layers_are_compiled_where_the_recipe_asks(ask: Any, facts_of: Any, profile_of: Any):
    facts = facts_of(Hardware.named("h100"), profile_of(100, 200), presumed=frozenset({"triton"}))
    assert not ask(facts).settings.compiled
    found = ask(facts, model__compile="on")
    assert found.settings.compiled
    assert (found.settings.liger, found.settings.kernels) == (False, "transformers")
    (reported,) = [one for one in found.decisions if one.setting == "compile"]
    shards = ask(
        replace(facts, hardware=Hardware.named("h100", 2)), model__compile="on", cluster__engine="fsdp2"
    )
    assert (shards.settings.compiled, shards.settings.engine) == (True, "fsdp2")
    assert "its memory is predicted as that of the uncompiled layer" in reported.reason


@pytest.mark.parametrize(
    ("gpu", "said", "words"),
    [
        ("h100", {}, "triton, which writes the kernels, is not installed"),
        ("cpu", {}, "counted operator by operator"),
        ("h100", {"model__adapter": {"r": 8, "dropout": 0.1}}, "drops numbers at random"),
        ("h100", {"model__adapter": {"r": 8}, "model__quantize": "4bit"}, "weights are quantized"),
        ("h100", {"model__kernels": "fused"}, "model.kernels: fused has its own kernels"),
        (
            "h100",
            {"cluster__engine": "zero2", "cluster__processes": 2},
            "DeepSpeed's hooks work inside of a layer's pass",
        ),
        (
            "h100",
            {"memory__use": "streamed_layers"},
            "streamed_layers cannot be combined with compiled layers",
        ),
    ],
)
def test_compiled_layers_are_refused_with_the_reason(
    ask: Any,
    facts_of: Any,
    profile_of: Any,
    gpu: str,
    said: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
):
    # A CUDA build of torch brings Triton along.
    monkeypatch.setattr("memtrain.memory.rules.ledger.installed", lambda *names: frozenset())
    hardware = cpu(2**36, 4) if gpu == "cpu" else Hardware.named(gpu, 2)
    packages: set[str] = set() if "triton" in words else {"triton", "bitsandbytes"}
    with pytest.raises(RecipeError) as caught:
        ask(
            facts_of(hardware, profile_of(100, 200), presumed=frozenset(packages)),
            model__compile="on",
            **said,
        )
    assert any(words in fault.what and fault.fix for fault in caught.value.faults)
