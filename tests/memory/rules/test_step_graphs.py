"""CUDA graphs of a step: on where asked for, reported with the reason, refused where asked for in vain."""

from dataclasses import replace
from typing import Any

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.rules.step_graphs import UNTRIED

GPU = Hardware.named("h100")


def decided(found: Any) -> list[tuple[str, str]]:
    return [(one.value, one.reason) for one in found.decisions if one.setting == "step_graphs"]


def test_a_step_is_captured_on_a_gpu(ask: Any, facts_of: Any, profile_of: Any):
    facts = facts_of(GPU, profile_of(100, 200))
    auto, on, off = ask(facts), ask(facts, train__cuda_graphs="on"), ask(facts, train__cuda_graphs="off")
    assert on.settings.step_graphs
    assert decided(on) == [("on", "asked for; one call starts all kernels of a forward or backward pass")]
    assert not auto.settings.step_graphs
    assert decided(auto) == [("off", UNTRIED)]
    assert not off.settings.step_graphs
    assert decided(off) == [("off", "asked for")]


def test_nothing_is_said_on_a_cpu_and_on_is_refused(ask: Any, facts_of: Any, profile_of: Any):
    facts = facts_of(cpu(2**36, 4), profile_of(100, 200))
    assert decided(ask(facts)) == []
    with pytest.raises(RecipeError, match="cannot be captured: CUDA graphs are of a GPU"):
        ask(facts, train__cuda_graphs="on")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"optim__in_backward": "on", "optim__max_grad_norm": None}, "stepped in the backward pass"),
        ({"memory__activation_offloading": "on"}, "leave for the host"),
        ({"memory__weights_offload": "on"}, "weights live on the host"),
        ({"memory__streamed_layers": "on"}, "computed in slices"),
        ({"cluster__processes": 2}, "exchanged with other processes"),
    ],
)
def test_what_cannot_be_captured_is_left_and_said(
    said: dict[str, Any], words: str, ask: Any, facts_of: Any, profile_of: Any
):
    facts = facts_of(GPU, profile_of(100, 200))
    if "cluster__processes" in said:
        facts = replace(facts, hardware=replace(GPU, num_devices=2))
    auto = ask(facts, **said)
    assert not auto.settings.step_graphs
    ((value, reason),) = decided(auto)
    assert value == "off"
    assert words in reason
    with pytest.raises(RecipeError, match=words):
        ask(facts, train__cuda_graphs="on", **said)
