"""Recipes mutated at random: a valid recipe or a RecipeError comes out, soon, and nothing else.

`MEMTRAIN_FUZZ=2000` sets how many (300 otherwise); benchmarks/broken_inputs.py tries 20,000. A seed that
hypothesis finds wrong is kept as an example.
"""

import os
import random
import time
from pathlib import Path

import pytest
from broken_inputs import recipe_outcome
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mutants_of_recipes import mutated, override

from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.recipe import Recipe

COUNT = int(os.environ.get("MEMTRAIN_FUZZ", "300"))
BLOCK = 50


def outcome(overrides: list[str], seed: int) -> RecipeError | None:
    try:
        assert isinstance(load_recipe("my.yaml", overrides).recipe, Recipe)
    except RecipeError as error:
        return error
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    return None


@pytest.mark.parametrize("block", range((COUNT + BLOCK - 1) // BLOCK))
def test_mutated_recipes_are_recipes_or_recipe_errors(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    path = Path("my.yaml")
    for seed in range(block * BLOCK, min((block + 1) * BLOCK, COUNT)):
        random_ = random.Random(seed)
        path.write_bytes(mutated(random_))
        overrides = [override(random_) for _ in range(random_.choice([0, 0, 1, 2]))]
        start = time.process_time()
        error = outcome(overrides, seed)
        assert time.process_time() - start < 2, f"seed {seed} is slow"
        if error is not None:
            assert error.faults
            assert all(fault.what.strip() and fault.where for fault in error.faults), (seed, error.text())
            assert "Input should" not in error.text(), (seed, error.text())
            assert len(error.text()) < 20_000, seed


@given(seed=st.integers(0, 2**32))
@example(seed=0)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_plan_of_a_mutant_is_a_traceback(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`memtrain plan`, without the data, of recipes that differ from shipped ones in a value or a line."""
    monkeypatch.chdir(tmp_path)
    how, fault = recipe_outcome(seed, plans=True)
    assert not fault, (seed, how, fault)
