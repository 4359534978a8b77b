"""Metrics of others' code are watched as rewards are, where a run has no rewards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtrain.trainers.loop import held_out_metrics as module


@pytest.mark.parametrize(
    ("is_builtin", "is_main", "times"), [(False, True, 1), (True, True, 0), (False, False, 0)]
)
def test_a_run_with_metrics_alone_watches_its_interpreter(
    is_builtin: bool, is_main: bool, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    watched: list[Path] = []
    functions = (SimpleNamespace(is_builtin=is_builtin),)
    monkeypatch.setattr(module, "load_functions", lambda asked: functions)
    monkeypatch.setattr(module, "check_columns", lambda functions, columns, asked: None)
    monkeypatch.setattr(module, "held_out_prompts", lambda recipe, data: ())
    monkeypatch.setattr(module, "watch_interpreter", watched.append)
    recipe = SimpleNamespace(eval=SimpleNamespace(metrics="some"), data=SimpleNamespace(eval_sets={}))
    plan: Any = SimpleNamespace(recipe=recipe, data=None, run_dir=str(tmp_path))
    ranks: Any = SimpleNamespace(is_main=is_main)
    writer: Any = object()
    assert module.open_metrics(plan, writer, ranks) is not None
    assert watched == [tmp_path] * times
