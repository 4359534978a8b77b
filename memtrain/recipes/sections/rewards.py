"""The `rewards:` section: functions and models that judge completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from memtrain.recipes.sections.base import PositiveInt, Section, changes, one_or_many

BuiltinReward = Literal["exact_answer", "format", "length", "repetition"]
BUILTIN_REWARDS: tuple[str, ...] = ("exact_answer", "format", "length", "repetition")


def model_of(value: object) -> object:
    """A reward model from its path alone."""
    return {"path": value} if isinstance(value, str) else value


class RewardModel(Section):
    """A trained reward model, as `memtrain reward` writes one: any sequence classifier with one number."""

    path: str
    """Hub id or folder, with its tokenizer. A conversation is rendered by the model's own chat template,
    and strings end as in its training, so that the score is read at the position that it was trained for."""

    revision: str | None = None
    """Branch, tag or commit on the hub; never the policy's."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of its weights. `auto`: the policy's."""

    chat_template: str | None = None
    """A Jinja file, or a shipped template by name, for a tokenizer without a chat template."""

    max_length: PositiveInt | None = None
    """Longest prompt with completion that it reads, in tokens; longer ones lose their beginning. If not
    set: no limit."""


class RewardFunction(Section):
    """A reward: a function or a model, with its weight and its arguments."""

    function: str | None = None
    """A built-in (`exact_answer`, `format`, `length`, `repetition`), `./file.py:name` or
    `package.module:name`. A function with a parameter `completions` is called once a batch and returns a
    list; with `completion`, once for each. Other parameters are filled by name: prompts, completion_ids,
    columns of the rows. It may be async."""

    model: Annotated[RewardModel | None, BeforeValidator(model_of)] = None
    """A reward model instead of a function: its path, or a section. It is loaded beside the policy."""

    pairwise: bool = False
    """The function is a judge: `completions` is a list of pairs, and it returns 0 or 1 for the better one of
    each, None for neither. Every two completions of a prompt are compared; the reward is the share won."""

    both_orders: bool = False
    """`pairwise`: ask for each pair in both orders; verdicts that differ count as a tie."""

    name: str | None = None
    """Name in the metrics. If not set: the function's, or the model's."""

    weight: float = 1.0
    """Factor of the reward in the sum of rewards. 0: the reward is only reported."""

    args: dict[str, JsonValue] = {}
    """More keyword arguments, the same for every call."""

    columns: dict[str, str] = {}
    """Columns of the rows that go to parameters of another name: `{answer: solution}` gives the column
    `solution` as `answer`."""

    @property
    def label(self) -> str:
        """Name in the metrics."""
        if self.model is not None:
            return self.name or self.model.path.rstrip("/").rpartition("/")[2]
        return self.name or str(self.function).rpartition(":")[2]

    @model_validator(mode="after")
    def _is_one_of_two(self) -> RewardFunction:
        if (self.function is None) == (self.model is None):
            given = "both function and model" if self.model else "neither function nor model"
            raise ValueError(f"a reward has {given}; give one of them")
        if self.model is not None:
            for name in ("pairwise", "args", "columns"):
                if changes(self, name):
                    raise ValueError(f"{name} has no effect on a reward model; remove it")
        if self.both_orders and not self.pairwise:
            raise ValueError("both_orders has no effect without pairwise; set pairwise: true, or remove it")
        return self

    @model_validator(mode="after")
    def _is_a_function(self) -> RewardFunction:
        if self.function is None:
            return self
        module, _, name = self.function.rpartition(":")
        if not module and name not in BUILTIN_REWARDS:
            known = ", ".join(BUILTIN_REWARDS)
            raise ValueError(
                f"unknown built-in reward '{name}'; give one of {known}, or your own as ./file.py:name"
            )
        if module and not name.isidentifier():
            raise ValueError(
                f"'{self.function}' is not a function; write ./file.py:name or package.module:name"
            )
        if self.pairwise and not module:
            raise ValueError(f"{name} scores single completions; remove pairwise, or give your own judge")
        return self


def environment_of(value: object) -> object:
    """An environment from its path alone."""
    return {"path": value} if isinstance(value, str) else value


class Environment(Section):
    """A class that answers the model, turn by turn: a game, a tool, a tester. Its tokens are read by the
    model and never trained on."""

    path: str
    """`./file.py:Class` or `package.module:Class`. The class has `step(text)`, which gets a turn of the
    model and returns the reply, or None at the end; and may have `reset`, which takes `prompt`, `seed` and
    columns of the row by name, and `role`, the role of its words in a conversation (`user`). Reward
    functions get the object as `environment`."""

    max_turns: PositiveInt = 8
    """Maximum number of model turns in a completion. `generate.max_tokens` bounds all of them together
    with the environment's replies, so the plan covers any number of turns."""

    turn_tokens: PositiveInt | None = None
    """Longest turn of the model in tokens; a longer one ends the completion as cut. If not set: only
    `generate.max_tokens` limits it."""

    @model_validator(mode="after")
    def _is_a_class(self) -> Environment:
        module, _, name = self.path.rpartition(":")
        if not module or not name.isidentifier():
            raise ValueError(f"'{self.path}' is not a class; write ./file.py:Name or package.module:Name")
        return self


def functions_of(value: object) -> object:
    """A list of functions from a name, a mapping, or a list of either."""
    items = one_or_many(value)
    if not isinstance(items, tuple):
        return items
    several: tuple[object, ...] = items  # pyright: ignore[reportUnknownVariableType]
    return tuple({"function": item} if isinstance(item, str) else item for item in several)


class Rewards(Section):
    """Rewards of completions: functions or models, and the treatment of failures."""

    KEY: ClassVar[str] = "rewards"
    """Place of the section in a recipe."""

    functions: Annotated[tuple[RewardFunction, ...], BeforeValidator(functions_of), Field(min_length=1)]
    """A reward, or a list of them: a name, or a section each."""

    environment: Annotated[Environment | None, BeforeValidator(environment_of)] = None
    """Class that answers the model, for completions of several turns: `./file.py:Class`, or a section. If
    not set: a completion is one turn."""

    @property
    def models(self) -> tuple[RewardModel, ...]:
        """The reward models among them."""
        return tuple(one.model for one in self.functions if one.model is not None)

    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Timeout of one call, in seconds. A thread that hangs is abandoned, not killed."""

    at_once: PositiveInt = 8
    """Calls of one function that run at the same time."""

    on_error: Literal["error", "zero", "skip"] = "error"
    """Handling of a function that raises or takes too long: stop the run, give reward 0, or give no
    verdict. Always counted in the metrics."""

    on_nan: Literal["error", "zero", "skip"] = "error"
    """The same for a reward that is not a finite number, or beyond 1e12. `None` is not an error: it means
    no verdict."""

    @model_validator(mode="after")
    def _names_differ(self) -> Rewards:
        names = [one.label for one in self.functions]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"two rewards have the name '{doubled[0]}'; give one of them another name")
        if self.environment is not None and self.models:
            raise ValueError(
                "a reward model reads one answer, and rewards.environment makes conversations; remove one of "
                "them"
            )
        if all(one.weight == 0 for one in self.functions):
            raise ValueError(
                "every reward has weight 0, so there is nothing to learn; give a reward another weight"
            )
        return self
