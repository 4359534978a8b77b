"""Ways out of a run whose memory ran out, where no formula knows its layers."""

from types import SimpleNamespace

import pytest
from trace_cases import BASE, HALF, LLAMA, SMALL

from memtrain.memory.plan.plan import Owned, PhasePeak
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.loop.oom import post_mortem
from memtrain.trainers.tools.trace.fake_model import bare_model

HYBRID = SMALL | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
PEAK = PhasePeak(phase="steady step", num_bytes=7, owners=(Owned(owner="activations", num_bytes=7),))


def ways(config, **changes):
    settings = Settings(**(BASE | HALF | changes))
    plan = SimpleNamespace(prediction=SimpleNamespace(peak=PEAK, budget_bytes=None))
    return post_mortem._ways(plan, settings, bare_model(config, settings), 200)


@pytest.mark.parametrize("every", [0, 1])
def test_layers_with_a_state_are_not_told_by_a_llamas_formulas(every):
    """Peaks of changes were told that are a fifth of what such layers need."""
    predicted, fix = ways(HYBRID, checkpoint_every=every)
    assert predicted is PEAK
    assert "(conv) need then is not known here" in fix
    assert "set a smaller length.max_length" in fix
    assert ("activation_checkpointing" in fix) == (every == 0)
    assert "peak" not in fix


def test_a_llamas_changes_have_their_peaks():
    predicted, fix = ways(LLAMA)
    assert predicted.num_bytes > 2**20
    assert "(peak " in fix
