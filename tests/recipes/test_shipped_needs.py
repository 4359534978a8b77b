"""The `needs:` lines of the shipped recipes against the planner."""

import importlib.util
from pathlib import Path

import pytest

from memtrain.recipes.reading.shipped import configs_dir

_PATH = Path(__file__).parents[2] / "benchmarks" / "predict_shipped.py"
_SPEC = importlib.util.spec_from_file_location("predict_shipped", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
predict_shipped = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(predict_shipped)


@pytest.mark.parametrize("name", predict_shipped.predicted_names())
def test_a_shipped_recipe_says_what_the_planner_predicts(name: str):
    """Where it does not: `python benchmarks/predict_shipped.py`."""
    lines = (configs_dir() / f"{name}.yaml").read_text().splitlines()
    assert predict_shipped.needs_line(name) in lines
