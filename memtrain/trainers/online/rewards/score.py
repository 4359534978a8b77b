"""Completions to rewards: every function called with its parameters, faults counted or shown."""

# R completions, F functions.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from memtrain.errors import DataError
from memtrain.recipes.sections.rewards import Rewards
from memtrain.trainers.online.rewards.answer import Answer
from memtrain.trainers.online.rewards.calls import Caller, Exited, Outcome, TookTooLong, call_all, line_of
from memtrain.trainers.online.rewards.functions import Function, arguments
from memtrain.trainers.online.rewards.pairwise import won_shares

# Rewards of single completions, begun while other completions are still being written. No torch.


@dataclass(slots=True)
class Early:
    """The calls of one rollout that need one completion each, group by group.

    What a function says does not depend on when it is called: outcomes are those of calls that begin when
    all is written. A function that takes all completions together, a judge, a reward model and the built-ins
    (which are done before a thread begins) are not called here.
    """

    functions: Sequence[Function]
    rewards: Rewards
    callers: dict[str, Caller] = field(init=False)
    begun: dict[tuple[str, int], list[Future[Outcome]]] = field(
        default_factory=dict[tuple[str, int], list[Future[Outcome]]]
    )
    """By the function's label and the number of the group."""

    def __post_init__(self) -> None:
        self.callers = {
            one.label: Caller(one.is_async, self.rewards.timeout_s, self.rewards.at_once)
            for one in self.functions
            if is_called_for_each(one)
        }

    def begin(self, number: int, answers: Sequence[Answer]) -> None:
        """Begin the questions about group `number`; a begun group is not begun again."""
        for function in self.functions:
            if function.label in self.callers:
                self._begin(function, number, answers)

    def outcomes(self, function: Function, answers: Sequence[Answer], group_size: int) -> list[Outcome]:
        """The outcome for each answer, waited for; groups that were not begun are begun now."""
        for first in range(0, len(answers), group_size):
            self._begin(function, first // group_size, answers[first : first + group_size])
        numbers = range(-(-len(answers) // group_size))
        return [one.result() for number in numbers for one in self.begun[function.label, number]]

    def _begin(self, function: Function, number: int, answers: Sequence[Answer]) -> None:
        if (function.label, number) not in self.begun:
            begin = self.callers[function.label].begin
            self.begun[function.label, number] = [
                begin(partial(function.call, **arguments(function, given_of(answer)))) for answer in answers
            ]


def is_called_for_each(function: Function) -> bool:
    """Whether it is a function of the user's that takes one completion."""
    return not (function.recipe.model is not None or function.is_batched or function.is_builtin)


def given_of(answer: Answer) -> dict[str, Any]:
    """Arguments for a function that takes one completion."""
    own = {
        "prompt": answer.prompt,
        "completion": answer.completion,
        "completion_ids": list(answer.completion_ids),
    }
    return {**answer.columns, **own}


__all__ = ["Answer", "Scores", "score"]

MOST_REWARD = 1e12
"""Larger ones are taken as not finite: sums of their squares leave float32. Taste: none is meant so."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The verdicts."""

    value_RF: Tensor
    """float64; NaN where a function gave no verdict."""
    metrics: dict[str, float]
    """Means by function, means of other reported numbers, and counts of faults."""


def score(
    answers: Sequence[Answer],
    functions: Sequence[Function],
    rewards: Rewards,
    *,
    group_size: int = 1,
    known: Mapping[str, Sequence[float]] | None = None,
    early: Early | None = None,
) -> Scores:
    """The rewards of `answers` by every function; answers of one prompt stand next to each other.

    `known`: verdicts of reward models, by label. `early`: calls that were begun while completions were
    written. A pairwise judge gives none in groups of one.

    Raises: DataError when a function fails (unless `rewards` says otherwise) or returns no list of numbers.
    """
    columns: list[list[float]] = []
    metrics: dict[str, float] = {}
    early = early or Early(functions, rewards)
    for function in functions:
        if function.recipe.model is not None:
            assert known is not None, "Reward models were asked before."
            outcomes = [Outcome(value) for value in known[function.label]]
        elif function.recipe.pairwise:
            ask = partial(_asked_whole, function=function, rewards=rewards)
            outcomes = won_shares(answers, function, ask, group_size)
        else:
            outcomes = _outcomes(answers, function, rewards, early, group_size)
        values, own = _values(outcomes, function, rewards)
        columns.append(values)
        metrics |= own
    return Scores(torch.tensor(columns, dtype=torch.float64).T.reshape(len(answers), len(functions)), metrics)


def _outcomes(
    answers: Sequence[Answer], function: Function, rewards: Rewards, early: Early, group_size: int
) -> list[Outcome]:
    """Outcomes, one for each answer."""
    if function.is_batched:
        return _asked_whole(_batch(answers), len(answers), function=function, rewards=rewards)
    if function.is_builtin:
        return [Outcome(function.call(**arguments(function, given_of(answer)))) for answer in answers]
    return early.outcomes(function, answers, group_size)


def _asked_whole(given: dict[str, Any], count: int, *, function: Function, rewards: Rewards) -> list[Outcome]:
    """The outcomes of one call about `count` completions, or pairs, together."""
    call = partial(function.call, **arguments(function, given))
    (whole,) = (
        [Outcome(call())]
        if function.is_builtin
        else call_all([call], is_async=function.is_async, timeout_s=rewards.timeout_s, at_once=1)
    )
    if whole.error is not None:
        return [whole] * count
    values = whole.value.tolist() if hasattr(whole.value, "tolist") else whole.value
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        got = f"{len(values)} values" if isinstance(values, Sequence) else f"a {type(values).__name__}"
        what = "pairs" if function.recipe.pairwise else "completions"
        raise DataError(
            f"reward '{function.label}' returned {got} for {count} {what}",
            _place(function),
            f"return a list with one number (or None) for each of the {what}, in their order",
        )
    return [Outcome(value) for value in values]


def _batch(answers: Sequence[Answer]) -> dict[str, Any]:
    names = {name for answer in answers for name in answer.columns}
    return {
        **{name: [answer.columns.get(name) for answer in answers] for name in sorted(names)},
        "prompts": [answer.prompt for answer in answers],
        "completions": [answer.completion for answer in answers],
        "completion_ids": [list(answer.completion_ids) for answer in answers],
    }


def _values(
    outcomes: Sequence[Outcome], function: Function, rewards: Rewards
) -> tuple[list[float], dict[str, float]]:
    """(a number for each outcome, NaN for no verdict; the metrics)."""
    values: list[float] = []
    reported: dict[str, list[float]] = {}
    num_errors = num_nans = 0
    for index, outcome in enumerate(outcomes):
        value = outcome.value
        if outcome.error is not None:
            num_errors += 1
            key = f"{rewards.KEY}.on_error"
            value = _by_policy(
                rewards.on_error, key, _error_text(outcome.error), function, index, outcome.error
            )
        elif isinstance(value, Mapping):
            for name, number in value.items():
                if name != "score" and isinstance(number, Real):
                    reported.setdefault(str(name), []).append(as_float(number))
            if "score" not in value:
                raise DataError(
                    f"reward '{function.label}' returned a mapping without 'score' for completion {index}",
                    _place(function),
                    "put the number under 'score'; other entries are reported",
                )
            value = value["score"]
        number = _number(value, function, index)
        if not abs(number) <= MOST_REWARD and value is not None and outcome.error is None:
            num_nans += 1
            key = f"{rewards.KEY}.on_nan"
            number = _by_policy(rewards.on_nan, key, f"returned {number}", function, index, None)
        values.append(number)
    return values, _metrics(function.label, values, reported, num_errors, num_nans)


def _number(value: Any, function: Function, index: int) -> float:
    if value is None:
        return math.nan
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, Real):
        raise DataError(
            f"reward '{function.label}' returned a {type(value).__name__} for completion {index}",
            _place(function),
            "return a number, None for no reward, or a mapping with a number under 'score'",
        )
    return as_float(value)


def as_float(number: Real) -> float:
    """The number as a float, infinite where it is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _by_policy(
    policy: str, key: str, what: str, function: Function, index: int, error: Exception | None
) -> float:
    if policy == "error":
        raise DataError(
            f"reward '{function.label}' {what} (completion {index} of the batch)",
            _place(function, error),
            f"fix it, or set {key}: zero or skip",
        ) from error
    return 0.0 if policy == "zero" else math.nan


def _error_text(error: Exception) -> str:
    return (
        str(error) if isinstance(error, TookTooLong | Exited) else f"raised {type(error).__name__}: {error}"
    )


def _place(function: Function, error: Exception | None = None) -> str:
    """`file:line` of the last line of the error, or of the function."""
    if error is not None and (line := line_of(error)):
        return line
    code = getattr(function.call, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else str(function.recipe.function)


def _metrics(
    label: str, values: list[float], reported: dict[str, list[float]], num_errors: int, num_nans: int
) -> dict[str, float]:
    known = [value for value in values if not math.isnan(value)]
    metrics: dict[str, float] = {}
    if known:
        metrics[f"rewards/{label}"] = sum(known) / len(known)
    if len(known) < len(values):
        metrics[f"rewards/{label}/no_verdict"] = float(len(values) - len(known))
    if num_errors:
        metrics[f"rewards/{label}/errors"] = float(num_errors)
    if num_nans:
        metrics[f"rewards/{label}/not_finite"] = float(num_nans)
    metrics |= {f"rewards/{label}/{name}": sum(all_) / len(all_) for name, all_ in reported.items()}
    return metrics
