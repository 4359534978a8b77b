"""The `rewards:` section: what judges the completions of the methods that write them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from memtrain.recipes.base import PositiveInt, Section, one_or_many

BuiltinReward = Literal["exact_answer", "format", "length", "repetition"]
BUILTIN_REWARDS: tuple[str, ...] = ("exact_answer", "format", "length", "repetition")


class RewardFunction(Section):
    """One reward: a function, how much it counts, and what it is given."""

    function: str
    """A built-in (`exact_answer`, `format`, `length`, `repetition`), `./file.py:name` or
    `package.module:name`. A function with a parameter `completions` is called once a batch and returns a
    list; with `completion`, once for each. Other parameters take what there is of that name: prompts,
    completion_ids, columns of the rows. It may be async."""

    name: str | None = None
    """Name in the metrics. Not given: the function's."""

    weight: float = 1.0
    """What its verdict is multiplied by before the rewards are summed. 0: it is only reported."""

    args: dict[str, JsonValue] = {}
    """More keyword arguments, the same for every call."""

    columns: dict[str, str] = {}
    """Columns of the rows that go to parameters of another name: `{answer: solution}` gives the column
    `solution` as `answer`."""

    @property
    def label(self) -> str:
        """What the metrics call it."""
        return self.name or self.function.rpartition(":")[2]

    @model_validator(mode="after")
    def _is_a_function(self) -> RewardFunction:
        module, _, name = self.function.rpartition(":")
        if not module and name not in BUILTIN_REWARDS:
            known = ", ".join(BUILTIN_REWARDS)
            raise ValueError(
                f"there is no built-in reward '{name}'; give one of {known}, or your own as ./file.py:name"
            )
        if module and not name.isidentifier():
            raise ValueError(
                f"'{self.function}' names no function; write ./file.py:name or package.module:name"
            )
        return self


def functions_of(value: object) -> object:
    """A list of functions from a name, a mapping, or a list of either."""
    items = one_or_many(value)
    if not isinstance(items, tuple):
        return items
    several: tuple[object, ...] = items  # pyright: ignore[reportUnknownVariableType]
    return tuple({"function": item} if isinstance(item, str) else item for item in several)


class Rewards(Section):
    """What judges completions: one function or several, and what happens when one fails."""

    functions: Annotated[tuple[RewardFunction, ...], BeforeValidator(functions_of), Field(min_length=1)]
    """One reward, or a list of them: a name, or a section each."""

    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that one call may take. A thread that hangs is left behind, not killed."""

    at_once: PositiveInt = 8
    """Calls of one function that run at the same time."""

    on_error: Literal["error", "zero", "skip"] = "error"
    """When a function raises or takes too long: stop the run, count 0, or count no verdict. Always counted
    in the metrics."""

    on_nan: Literal["error", "zero", "skip"] = "error"
    """The same for a reward that is not a finite number. `None` is no fault: it means no verdict."""

    @model_validator(mode="after")
    def _names_differ(self) -> Rewards:
        names = [one.label for one in self.functions]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"two rewards are called '{doubled[0]}'; give one of them a name of its own")
        if all(one.weight == 0 for one in self.functions):
            raise ValueError("every reward has weight 0, so nothing can be learnt; give one another weight")
        return self
