"""A pairwise judge as a reward: every two completions of a prompt compared, and the share won by each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from memtrain.errors import DataError
from memtrain.trainers.online.rewards.answer import Answer
from memtrain.trainers.online.rewards.calls import Outcome
from memtrain.trainers.online.rewards.functions import Function

Ask = Callable[[dict[str, Any], int], list[Outcome]]
"""Call of a judge: (keyword arguments, number of pairs) to an outcome for each pair."""

NEITHER = (None, -1)
"""Verdicts that say that neither is better."""


def won_shares(answers: Sequence[Answer], function: Function, ask: Ask, group_size: int) -> list[Outcome]:
    """For each answer the share of its comparisons that it won, a tie counting half; None without any.

    The order in which two answers are shown alternates, so that a judge who likes the first is no help to
    either; with `both_orders` each pair is shown both ways, and counts as a tie unless both agree. A call
    that fails is the outcome of every answer.
    Raises: DataError for a verdict that is none of 0, 1, None and -1.
    """
    shown = [
        pair if (sum(pair)) % 2 else pair[::-1]
        for first in range(0, len(answers), group_size)
        for pair in combinations(range(first, first + group_size), 2)
    ]
    if function.recipe.both_orders:
        shown = [way for pair in shown for way in (pair, pair[::-1])]
    if not shown:
        return [Outcome(None)] * len(answers)
    outcomes = ask(_given(answers, shown), len(shown))
    failed = next((one for one in outcomes if one.error is not None), None)
    if failed is not None:
        return [failed] * len(answers)
    points = [_points(one.value, function, index) for index, one in enumerate(outcomes)]
    won, compared = [0.0] * len(answers), [0] * len(answers)
    for (first, second), point in _by_pair(shown, points, both=function.recipe.both_orders):
        won[first] += point
        won[second] += 1.0 - point
        compared[first] += 1
        compared[second] += 1
    return [Outcome(share / count) for share, count in zip(won, compared, strict=True)]


def _given(answers: Sequence[Answer], shown: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Arguments for a judge: prompts, pairs of completions, and the columns of their rows."""
    firsts = [answers[pair[0]] for pair in shown]
    names: set[str] = {name for answer in firsts for name in answer.columns}
    return {
        **{name: [answer.columns.get(name) for answer in firsts] for name in sorted(names)},
        "prompts": [answer.prompt for answer in firsts],
        "completions": [tuple(answers[one].completion for one in pair) for pair in shown],
        "completion_ids": [tuple(list(answers[one].completion_ids) for one in pair) for pair in shown],
    }


def _points(verdict: Any, function: Function, index: int) -> float:
    """Share of the first of a pair in 1: all, nothing, or half."""
    value = verdict.item() if hasattr(verdict, "item") else verdict
    if value in NEITHER:
        return 0.5
    if isinstance(value, Mapping) or value not in (0, 1):
        code = getattr(function.call, "__code__", None)
        named = str(function.recipe.function)
        raise DataError(
            f"judge '{function.label}' returned {value!r} for pair {index}",
            f"{code.co_filename}:{code.co_firstlineno}" if code is not None else named,
            "return 0 where the first completion of a pair is better, 1 where the second is, else None",
        )
    return 1.0 - float(value)


def _by_pair(
    shown: Sequence[tuple[int, ...]], points: Sequence[float], *, both: bool
) -> list[tuple[tuple[int, ...], float]]:
    """Each pair with the score of its first; half of two verdicts that differ."""
    if not both:
        return list(zip(shown, points, strict=True))
    ways = zip(shown[::2], points[::2], points[1::2], strict=True)
    return [(pair, point if point == 1.0 - other else 0.5) for pair, point, other in ways]
