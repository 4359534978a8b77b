"""Gains, patience, and metrics that rise."""

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.loop.early_stopping import end_words, is_spent, note_evaluation
from memtrain.trainers.protocols.events import EvalEvent
from memtrain.trainers.protocols.position import TrainState


def recipe(stopping: dict[str, object]) -> Recipe:
    return Recipe.model_validate(
        {
            "method": "sft",
            "model": {"path": "builtin:tiny"},
            "data": {"train": "a.jsonl", "eval": {"math": "b.jsonl", "chat": ["c.jsonl"]}},
            "eval": {"early_stopping": stopping},
        }
    )


def noted(asked: Recipe, values: list[float], metric: str = "loss") -> TrainState:
    state = TrainState()
    for step, value in enumerate(values, start=1):
        state.step = step
        extra = {} if metric == "loss" else {metric: value}
        note_evaluation(state, EvalEvent(step=step, loss=value, tokens=1, extra=extra), asked)
    return state


def test_a_small_gain_does_not_count_though_the_weights_are_the_best():
    """3.0, then less by 0.05 each time: under a least gain of 0.1 only every third counts (0.15)."""
    asked = recipe({"patience": 3, "min_gain": 0.1})
    state = noted(asked, [3.0, 2.95, 2.91])
    assert (state.stale_evals, state.best_step, is_spent(state, asked)) == (2, 3, False)
    assert noted(asked, [3.0, 2.95, 2.91, 2.85]).stale_evals == 0
    state = noted(asked, [3.0, 2.95, 2.91, 2.92])
    assert is_spent(state, asked)
    assert end_words(state, asked, 9) == (
        "stopped early at step 4 of 9: no gain of more than 0.1 in held-out loss over 3 evaluations; "
        "best 2.9100 at step 3"
    )


def test_an_accuracy_rises_and_a_new_metric_begins_anew():
    asked = recipe({"patience": 2, "metric": "math/accuracy"})
    state = noted(asked, [0.5, 0.6, 0.4, 0.55], "math/accuracy")
    assert (state.eval_loss, state.best_loss, state.best_step) == (-0.55, -0.6, 2)
    assert is_spent(state, asked)
    note_evaluation(state, EvalEvent(step=5, loss=7.0, tokens=1), other := recipe({"patience": 2}))
    assert (state.best_loss, state.stale_evals, is_spent(state, other)) == (7.0, 0, False)


def test_a_metric_that_is_not_there_is_reported_with_those_that_are():
    with pytest.raises(RecipeError, match="no metric chat/accuracy; there are loss"):
        noted(recipe({"metric": "chat/accuracy"}), [1.0])
    with pytest.raises(
        ValueError, match=r"metric speed is not a metric of the held-out rows .* math/accuracy"
    ):
        recipe({"metric": "speed"})
