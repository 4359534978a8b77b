"""Values to try: `train.seed=0,1,2` as the overrides of one run each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from memtrain.errors import Fault, RecipeError
from memtrain.recipes.reading.overrides import path_of

SHARED = ("cluster", "run_dir")
"""Keys, or sections, that all jobs of an array have in common."""


def sweep(words: Sequence[str], where: str = "") -> tuple[tuple[str, ...], ...]:
    """The overrides of each run: every combination, the last key varying fastest; one empty run for no words.

    A value is what stands between commas that no bracket encloses: `optim.betas=[0.9,0.95],[0.9,0.999]` is
    two.

    Raises: RecipeError with every word that cannot be taken.
    """
    faults: list[Fault] = []
    choices: list[tuple[str, ...]] = []
    for word in words:
        key, equals, text = word.partition("=")
        values = split_values(text)
        key = key.strip()
        if not equals or not key or "" in values:
            fix = "write key=a,b,c, such as train.seed=0,1,2"
            faults.append(Fault(f"'{word}' gives no values to try", where, fix))
        elif path_of(key)[0] in SHARED:
            fix = "remove it; the jobs of an array share their cluster, and each has its own folder"
            faults.append(Fault(f"{key} cannot differ within an array", where, fix))
        elif len(set(values)) < len(values):
            faults.append(
                Fault(f"'{word}' gives a value twice", where, "remove one of the two: they name the same run")
            )
        choices.append(tuple(f"{key}={value}" for value in values))
    if faults:
        raise RecipeError(faults)
    return tuple(product(*choices))


def split_values(text: str) -> list[str]:
    """The parts between commas outside of brackets, braces and quotes."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def folder_name(overrides: Sequence[str]) -> str:
    """A name for one run of a sweep: the last part of each key with its value, odd letters replaced."""
    words = [override.partition("=") for override in overrides]
    pairs = "_".join(f"{str(path_of(key)[-1])}={value}" for key, _, value in words)
    return "".join(letter if letter.isalnum() or letter in "=_.-+" else "-" for letter in pairs)
