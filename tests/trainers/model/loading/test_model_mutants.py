"""Model folders broken at random: a step, or one error with its place and its cure, and no code is run.

benchmarks/broken_inputs.py tries 500; the seeds here are those that once found a fault, and the first few.
"""

from pathlib import Path

import pytest
from broken_inputs import ModelMutants

SEEDS = (3, 24, 30, 85, 141, 220, *range(300, 308))
"""3, 30: hostile templates; 24: tuples for outputs; 85: a billion labels; 220: a generation configuration."""


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> ModelMutants:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return ModelMutants(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_broken_model_ends_in_a_step_or_in_one_error(
    mutants: ModelMutants, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    how, fault = mutants.outcome(seed)
    assert not fault, (seed, how, fault)
    assert not Path("/tmp/owned").exists()
