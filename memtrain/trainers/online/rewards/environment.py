"""Environments of `rewards.environment`: classes of the user's that answer the model, turn by turn.

A class has `step(text) -> str | list[str] | None`: it gets the text of the model's turn, and gives the words
that follow it (of a list, a message each), or None where the conversation is over. It may have `reset(...)`,
called once for each completion with what it takes by name: `prompt`, `seed` and columns of the row. `role`
("user", "tool", ...) is the role of its words in a conversation. Reward functions get the object itself as
`environment`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from memtrain.errors import DataError, Fault, RecipeError
from memtrain.recipes.sections.rewards import Environment, Rewards
from memtrain.trainers.online.rewards.calls import TookTooLong, call_all, line_of
from memtrain.trainers.online.rewards.functions import named_in_module

PLACE = "rewards.environment"
GIVEN = ("prompt", "seed")
"""Arguments of `reset` beside the columns of the row."""
DEFAULT_ROLE = "user"
Words = str | list[str]
"""Words of an environment: one message, or several."""


@dataclass(frozen=True, slots=True)
class EnvironmentClass:
    """A class of the user's, looked at for what its `reset` takes."""

    recipe: Environment
    make: type
    takes: tuple[str, ...]
    needs: tuple[str, ...]
    takes_all: bool
    is_async: bool

    @property
    def role(self) -> str:
        """Role of its words in a conversation."""
        return str(getattr(self.make, "role", DEFAULT_ROLE))

    def begin(self, given: Mapping[str, Any]) -> Any:
        """A new object, reset for one completion."""
        made = self.make()
        if hasattr(made, "reset"):
            made.reset(**{k: v for k, v in given.items() if self.takes_all or k in self.takes})
        return made


def load_environment(recipe: Environment) -> EnvironmentClass:
    """The class of a recipe.

    Raises: RecipeError when there is none, or it has no `step`.
    """
    make = named_in_module(recipe.path, PLACE)
    if not inspect.isclass(make) or not callable(getattr(make, "step", None)):
        raise no_environment(recipe)
    reset = getattr(make, "reset", None)
    parameters = list(inspect.signature(reset).parameters.values())[1:] if reset is not None else []
    return environment_class(recipe, make, parameters)


def no_environment(recipe: Environment) -> RecipeError:
    """The error of a name that stands for no environment."""
    return RecipeError(
        f"{recipe.path} is not an environment: it is not a class with a method `step`",
        PLACE,
        "write a class with `step(self, text)`, which returns the words that follow, or None at the end",
    )


def environment_class(
    recipe: Environment, make: type, parameters: Sequence[inspect.Parameter]
) -> EnvironmentClass:
    """The class with what its `reset` takes; `parameters`: of `reset`, without the object itself."""
    kind: Any = make
    by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return EnvironmentClass(
        recipe=recipe,
        make=make,
        takes=tuple(one.name for one in by_name),
        needs=tuple(one.name for one in by_name if one.default is one.empty),
        takes_all=any(one.kind is one.VAR_KEYWORD for one in parameters),
        is_async=inspect.iscoroutinefunction(getattr(kind, "step", None)),
    )


def check_environment(made: EnvironmentClass, columns: Sequence[str]) -> None:
    """Raise RecipeError when `reset` needs what the rows do not have."""
    missing = [need for need in made.needs if need not in (*GIVEN, *columns)]
    if missing:
        raise RecipeError(
            f"{made.recipe.path}.reset needs {' and '.join(missing)}, which the rows do not have",
            PLACE,
            f"beside the prompt they have {', '.join(columns) or 'no column'}; give it a default",
        )


def replies(
    made: EnvironmentClass, asked: Sequence[tuple[Any, str]], rewards: Rewards
) -> list[tuple[Words | None, bool]]:
    """(the words that follow each turn, or None at the end; whether the environment failed), in order.

    `asked`: an object with the text of the model's turn. Calls have the deadline of rewards.

    Raises: DataError when one fails (unless rewards.on_error says otherwise) or gives no text.
    """
    calls = [partial(environment.step, text) for environment, text in asked]
    outcomes = call_all(calls, is_async=made.is_async, timeout_s=rewards.timeout_s, at_once=rewards.at_once)
    found: list[tuple[Words | None, bool]] = []
    for outcome in outcomes:
        if outcome.error is not None:
            found.append((None, True))
            if rewards.on_error == "error":
                raise failure(made, outcome.error) from outcome.error
            continue
        if outcome.value is not None and not is_words(outcome.value):
            raise DataError(
                f"{made.recipe.path}.step returned a {type(outcome.value).__name__}",
                PLACE,
                "return the words that follow (a string, or a list of strings), or None where the "
                "conversation is over",
            )
        found.append((outcome.value, False))
    return found


def is_words(value: object) -> bool:
    """Whether a value is text, or a list of texts with one in it at least."""
    if isinstance(value, list):
        items = cast(list[object], value)
        return bool(items) and all(isinstance(one, str) for one in items)
    return isinstance(value, str)


def failure(made: EnvironmentClass, error: Exception) -> DataError:
    """Words for an environment that failed."""
    reason = str(error) if isinstance(error, TookTooLong) else f"raised {type(error).__name__}: {error}"
    line = line_of(error)
    return DataError(
        [
            Fault(
                f"{made.recipe.path}.step {reason}",
                f"{line} ({PLACE})" if line else PLACE,
                "fix it, or set rewards.on_error: zero or skip: the conversation then ends there",
            )
        ]
    )
