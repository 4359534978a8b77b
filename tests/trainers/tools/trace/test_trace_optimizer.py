"""What a step of copies and of 8-bit moments takes, in one bucket and in several, against traces."""

import pytest
from trace_cases import CASES

from memtrain.memory.estimate import optimizer_scratch
from memtrain.trainers.optim import compressed_moments, master_weights, offload
from memtrain.trainers.tools.trace.trace import trace

NAMES = [
    name
    for name in CASES
    if name.startswith(("split copies", "stochastic rounding", "8-bit moments", "moments and masters"))
]
FAST = ("split copies, accumulating, checkpointed", "8-bit moments, split copies, checkpointed")
MARKED = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
"""Recipes whose peak is, or is near to, that of the step."""


@pytest.mark.parametrize("name", MARKED)
def test_a_step_of_copies_and_of_8_bit_moments_is_the_traces(name):
    assert error_of(name) == pytest.approx(0, abs=0.002)


@pytest.mark.parametrize("name", MARKED)
def test_a_step_in_several_buckets_is_the_traces(name, monkeypatch):
    for module in (optimizer_scratch, master_weights, compressed_moments):
        monkeypatch.setattr(module, "MASTER_BUCKET", 1 << 20)
    for module in (optimizer_scratch, offload):
        monkeypatch.setattr(module, "OFFLOAD_BUCKET", 1 << 20)
    # Of neighbours that come from the host, the largest that there can be is taken.
    most = 0.025 if "on the host" in name else 0.002
    assert -0.002 < error_of(name) < most


def error_of(name):
    """Share by which the predicted peak is above the traced one."""
    case = CASES[name]
    return case.estimated().peak.num_bytes / trace(case.job).recorder.peak_bytes - 1


def test_every_form_of_copies_is_among_the_recipes():
    assert {CASES[name].settings.copies for name in NAMES} == {"float32", "split", "stochastic"}
    assert any(CASES[name].settings.compressed_moments for name in NAMES)
