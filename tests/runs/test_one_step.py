"""The step that the contributor's first page makes by hand is the one that a run makes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import memtrain

PAGE = Path(__file__).parents[2] / "examples/one_step.py"


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_the_page_makes_the_first_step_of_a_run(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("one_step", PAGE)
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "one_step", page)
    spec.loader.exec_module(page)
    made = getattr(page, f"{method}_step")(tmp_path / "page")
    recipe = memtrain.load_recipe(f"smoke/{method}", {"train.max_steps": 1})
    memtrain.train(recipe, run_dir=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if line["kind"] == "step")
    of_run = first["loss"], first["grad_norm"], first["tokens"]
    assert (made.loss, made.grad_norm, made.num_tokens) == of_run
