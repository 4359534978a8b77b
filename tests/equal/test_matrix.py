"""Every exact strategy with every other: each cell is exact, or the plan refuses it with a reason."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from sampled import sampled

PATH = Path(__file__).parents[2] / "benchmarks" / "exactness.py"
SPEC = importlib.util.spec_from_file_location("benchmark_exactness", PATH)
assert SPEC is not None
assert SPEC.loader is not None
exactness: Any = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = exactness
SPEC.loader.exec_module(exactness)
FEW = 24
"""Cells of the fast suite; about a fifth of them are exact, and take a third of a second each."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes cells; plans that are the same are made once."""
    return exactness.Matrix(tmp_path_factory.mktemp("matrix"))


def broken(matrix: Any, cells: Any) -> list[str]:
    found = [matrix.outcome(cell) for cell in cells]
    assert all(one.says for one in found if one.kind == "refused"), "a refusal has a reason"
    return [f"{one.cell.name}: {one.says}" for one in found if one.kind == "broken"]


def test_cells_spread_over_the_matrix_are_exact_or_refused(matrix: Any):
    assert broken(matrix, exactness.spread(FEW)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", exactness.METHODS_SHOWN)
def test_every_cell_is_exact_or_refused(matrix: Any, method: str):
    assert broken(matrix, (cell for cell in exactness.cells() if cell.method == method)) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", exactness.RULED)
def test_models_with_rules_of_their_scores_are_exact_or_refused(tmp_path: Path, rule: str):
    made = exactness.Matrix(tmp_path)
    assert broken(made, (cell for cell in exactness.ruled_cells() if cell.rule == rule)) == []


@pytest.mark.parametrize("method", sampled(["dpo", "ppo"]))
def test_a_plain_run_that_cells_share_is_that_of_each_alone(tmp_path: Path, method: str):
    """Not to rounding: the very differences. Without clipping the plain run is another one."""
    cells = [
        exactness.Cell(method, "torch_cpu", strategies)
        for strategies in (("padding_free",), ("chunked_loss",), ("optimizer_in_backward",))
    ]
    together = exactness.Matrix(tmp_path)
    shared = [together.outcome(cell) for cell in cells]
    assert len(together.made) == 3
    assert len(together.plain_runs.known) == 2
    assert shared[1:] == [exactness.Matrix(tmp_path).outcome(cell) for cell in cells[1:]]
    assert {one.kind for one in shared} == {"exact"}


def test_a_strategy_that_does_not_act_breaks_its_cell(matrix: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "memtrain.trainers.build.components.prepare_model", lambda model, recipe, settings: None
    )
    cell = exactness.Cell("sft", "masked", ("activation_checkpointing",))
    assert "activation_checkpointing did not act" in broken(matrix, [cell])[0]


@pytest.mark.slow  # Ten seconds of compiling, and more where no compiled kernels are kept.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_compiled_layers_are_exact(matrix: Any, method: str):
    """Alone and checkpointed. grpo writes answers before it compiles: its sampler attends otherwise."""
    cells = [
        cell
        for cell in exactness.compiled()
        if (cell.method, cell.backend) == (method, "torch_cpu")
        and cell.strategies in ((), ("activation_checkpointing",))
    ]
    found = [matrix.outcome(cell) for cell in cells]
    assert [(one.kind, one.says) for one in found] == [("exact", "")] * 2
