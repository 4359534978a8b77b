"""The steps that a plan names for a run that is out of memory."""

from typing import Any

import pytest

from memtrain.memory.hardware.devices import Hardware


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("auto", "smaller micro-batches, then checkpointing, then slices of layers, then offloading"),
        ("on", "smaller micro-batches, then shorter slices of layers, then offloading"),
    ],
)
def test_a_run_in_slices_is_told_shorter_ones(
    ask: Any, facts_of: Any, profile_of: Any, asked: str, words: str
):
    found = ask(facts_of(Hardware.named("h100"), profile_of(100, 200)), memory__streamed_layers=asked)
    (reported,) = [one for one in found.decisions if one.setting == "oom_recovery"]
    assert words in reported.reason
