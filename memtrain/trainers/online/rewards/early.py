"""Rewards of single completions, begun while other completions are still being written. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from memtrain.recipes.sections.rewards import Rewards
from memtrain.trainers.online.rewards.answer import Answer
from memtrain.trainers.online.rewards.calls import Caller, Outcome
from memtrain.trainers.online.rewards.functions import Function, arguments


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
