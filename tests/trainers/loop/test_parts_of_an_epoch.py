"""Evaluations and saves so many times an epoch (`eval.per_epoch`, `save.per_epoch`)."""

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import load_text
from memtrain.trainers.loop.loop import is_part

RECIPE = "method: sft\nmodel: {path: builtin:tiny}\n"


@pytest.mark.parametrize("steps", [1, 2, 5, 7, 12, 100])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_an_epoch_has_as_many_ends_as_parts_evenly_and_one_at_its_end(steps: int, parts: int):
    ends = [done for done in range(1, steps + 1) if is_part(done, steps, parts)]
    assert len(ends) == min(parts, steps)
    assert ends[-1] == steps
    gaps = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_what_ends_no_step_of_the_data_ends_no_part():
    assert not is_part(0, 1, 4)


@pytest.mark.parametrize(
    ("data", "keys", "words"),
    [
        ("{train: a, eval: b}", "eval: {every_steps: 2, per_epoch: 2}", "eval.every_steps or eval.per_epoch"),
        ("{train: a}", "save: {every_steps: 2, per_epoch: 2}", "save.every_steps or save.per_epoch"),
        ("{train: a}", "eval: {per_epoch: 2}", "needs held-out rows"),
    ],
)
def test_two_intervals_and_nothing_to_evaluate_are_refused(data: str, keys: str, words: str):
    with pytest.raises(RecipeError, match=words):
        load_text(f"{RECIPE}data: {data}\n{keys}\n", "recipe.yaml")
