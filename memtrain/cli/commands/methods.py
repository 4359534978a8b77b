"""`memtrain methods`: the methods and strategies that a recipe may ask for."""

from __future__ import annotations

from typing import Annotated

import typer

from memtrain.cli.output.terminal import print_table, print_text
from memtrain.recipes.registry import METHODS


def methods(
    strategies: Annotated[
        bool, typer.Option("--strategies", help="List the memory strategies instead of the methods.")
    ] = False,
) -> None:
    """List the training methods; each is a command and a value of `method:`."""
    if not strategies:
        print_table(
            ("method", "what it does"), [(method.name, method.summary) for method in METHODS.values()]
        )
        return
    from memtrain.memory.strategies.registry import STRATEGIES

    for is_exact, words in (
        (True, "Exact, the same numbers as without them (memory.use, memory.never):"),
        (False, "Changing the result of training (memory.allow, memory.use, memory.never):"),
    ):
        print_text(words)
        print_table(
            ("strategy", "what it does"),
            [(one.name, one.summary) for one in STRATEGIES.values() if one.is_exact is is_exact],
        )
        typer.echo()
