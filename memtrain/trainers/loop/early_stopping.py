"""Best value of the watched metric, evaluations without a gain, and the end of a run that gains nothing.

Source: Prechelt 1998, "Early Stopping - But When?", the criterion UP_s with strips of one evaluation, and a
least gain as in Keras and transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from memtrain.errors import RecipeError
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.evaluation import LOSS, REWARD, SET_MARK, EarlyStopping
from memtrain.trainers.protocols.events import EvalEvent
from memtrain.trainers.protocols.position import TrainState


@dataclass(frozen=True, slots=True)
class Watched:
    """The metric that decides which weights are best, and when a run ends."""

    name: str
    is_greater_better: bool

    def score(self, event: EvalEvent) -> float:
        """Value of an evaluation as a number of which the lower is better.

        Raises: RecipeError when the evaluation has no such metric.
        """
        values = {LOSS: event.loss, **event.extra}
        if self.name not in values:
            raise RecipeError(
                f"the held-out rows have no metric {self.name}; there are {', '.join(sorted(values))}",
                "eval.early_stopping.metric",
                "name one of these; the checkpoints so far are unchanged",
            )
        return -values[self.name] if self.is_greater_better else values[self.name]

    def value(self, score: float) -> float:
        """The metric's own value of a score."""
        return -score if self.is_greater_better else score


def watched_of(recipe: Recipe) -> Watched:
    """The metric of a recipe: of its early stopping, else the held-out loss or reward."""
    stopping = recipe.eval.early_stopping or EarlyStopping()
    name = stopping.metric or _plain_name(recipe)
    rises = name.rpartition(SET_MARK)[2] != LOSS
    return Watched(name, rises if stopping.greater_is_better is None else stopping.greater_is_better)


def _plain_name(recipe: Recipe) -> str:
    return REWARD if recipe.online is not None else LOSS


def note_evaluation(position: TrainState, event: EvalEvent, recipe: Recipe) -> None:
    """Take an evaluation into the state of the run."""
    watched = watched_of(recipe)
    score = watched.score(event)
    if (position.watched or _plain_name(recipe)) != watched.name:
        # Values of another metric are no yardstick for this one.
        position.best_loss, position.gained_loss, position.stale_evals = None, None, 0
    position.watched = watched.name
    position.eval_loss = score
    # The weights before the first step are not the run's to keep.
    if position.step and (position.best_loss is None or score < position.best_loss):
        position.best_loss, position.best_step = score, position.step
    min_gain = recipe.eval.early_stopping.min_gain if recipe.eval.early_stopping is not None else 0.0
    if position.gained_loss is None or score < position.gained_loss - min_gain:
        position.gained_loss, position.stale_evals = score, 0
    else:
        position.stale_evals += 1


def is_spent(position: TrainState, recipe: Recipe) -> bool:
    """Whether as many evaluations as the recipe's patience have brought no gain."""
    stopping = recipe.eval.early_stopping
    return (
        stopping is not None
        and position.watched == watched_of(recipe).name
        and position.stale_evals >= stopping.patience
    )


def end_words(position: TrainState, recipe: Recipe, max_steps: int) -> str:
    """Sentence on the end of a run whose patience is spent."""
    stopping, watched = recipe.eval.early_stopping, watched_of(recipe)
    assert stopping is not None, "Only a recipe with early stopping ends a run early."
    assert position.gained_loss is not None, "Patience is spent by evaluations."
    gain = f" of more than {stopping.min_gain:g}" if stopping.min_gain else ""
    count = stopping.patience
    best = (
        f"; best {watched.value(position.best_loss):.4f} at step {position.best_step}"
        if position.best_loss is not None
        else ""
    )
    return (
        f"stopped early at step {position.step} of {max_steps}: no gain{gain} in held-out {watched.name} "
        f"over {count} evaluation{'' if count == 1 else 's'}{best}"
    )
