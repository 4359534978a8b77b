"""`builtin:arithmetic`: word problems with worked answers, made from a seed, in every format.

Small numbers and one step a sentence, so that a tiny model learns them in minutes; most problems have a few
steps, some have dozens (a long tail, as real data has). No torch here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memtrain.recipes.sections.data import Format

VERSION = 1
"""Changes whenever the same seed would give other rows."""
SPLITS = {"train": 0, "test": 1}
"""Seed of each split."""
DEFAULT_ROWS = 4096
MAX_STEPS = 48
TAIL = 1.1
"""Pareto exponent of the number of steps: half the problems have one, one in seventy has 48."""
HIGHEST = 99

PEOPLE = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gil", "Hana", "Ivo", "Jun", "Kim", "Leo")
THINGS = ("apples", "books", "coins", "eggs", "pens", "plums", "shells", "stamps")
GAINS = ("buys", "finds", "gets", "picks up")
LOSSES = ("gives away", "loses", "sells", "drops")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, the lines of its worked answer, and the result."""

    question: str
    lines: tuple[str, ...]
    result: int

    def solution(self) -> str:
        """The worked answer, ending in `#### N`."""
        return "\n".join((*self.lines, f"#### {self.result}"))


def problem(rng: random.Random) -> Problem:
    """A problem: a start and a number of gains and losses, the running count between 0 and 99."""
    person, thing = rng.choice(PEOPLE), rng.choice(THINGS)
    count = rng.randint(1, 20)
    sentences, lines = [f"{person} has {count} {thing}."], []
    for _ in range(min(int(rng.paretovariate(TAIL)), MAX_STEPS)):
        amount = rng.randint(1, 9)
        gains = count < amount or (count + amount <= HIGHEST and rng.random() < 0.5)
        after = count + amount if gains else count - amount
        sentences.append(f"{person} {rng.choice(GAINS if gains else LOSSES)} {amount} {thing}.")
        lines.append(f"{count} {'+' if gains else '-'} {amount} = {after}")
        count = after
    sentences.append(f"How many {thing} does {person} have?")
    return Problem(" ".join(sentences), tuple(lines), count)


def wrong(right: Problem, rng: random.Random) -> str:
    """A worked answer to the same problem: a step is miscounted, and later steps carry on from it."""
    at = rng.randrange(len(right.lines))
    shift = rng.choice((-2, -1, 1, 2, 10))
    lines = list(right.lines[:at])
    for index, line in enumerate(right.lines[at:]):
        first, sign, amount, _, after = line.split()
        start = int(first) + (shift if index else 0)
        lines.append(f"{start} {sign} {amount} = {int(after) + shift}")
    return "\n".join((*lines, f"#### {right.result + shift}"))


def _text(right: Problem, rng: random.Random) -> dict[str, object]:
    return {"text": f"{right.question}\n{right.solution()}"}


def _prompt_completion(right: Problem, rng: random.Random) -> dict[str, object]:
    return {"prompt": right.question + "\n", "completion": right.solution()}


def _messages(right: Problem, rng: random.Random) -> dict[str, object]:
    asked = {"role": "user", "content": right.question}
    return {"messages": [asked, {"role": "assistant", "content": right.solution()}]}


def _preference(right: Problem, rng: random.Random) -> dict[str, object]:
    return {"prompt": right.question + "\n", "chosen": right.solution(), "rejected": wrong(right, rng)}


def _unpaired(right: Problem, rng: random.Random) -> dict[str, object]:
    label = rng.random() < 0.5
    answer = right.solution() if label else wrong(right, rng)
    return {"prompt": right.question + "\n", "completion": answer, "label": label}


def _prompt(right: Problem, rng: random.Random) -> dict[str, object]:
    return {"prompt": right.question + "\n", "answer": f"#### {right.result}"}


FORMS: dict[Format, Callable[[Problem, random.Random], dict[str, object]]] = {
    "prompt_completion": _prompt_completion,
    "messages": _messages,
    "text": _text,
    "preference": _preference,
    "unpaired": _unpaired,
    "prompt": _prompt,
}


def rows(count: int, seed: int, form: Format) -> Iterator[dict[str, object]]:
    """`count` rows in the given form. Row i is the same problem whatever the count and the form."""
    for index in range(count):
        rng = random.Random(f"arithmetic {VERSION} {seed} {index}")
        yield FORMS[form](problem(rng), rng)
