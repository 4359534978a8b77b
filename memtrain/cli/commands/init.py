"""`memtrain init`: a commented recipe to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import write_text
from memtrain.errors import RecipeError
from memtrain.recipes.registry import METHODS, nearest_methods, spelled_method
from memtrain.recipes.sections.methods.pair_losses import PAIR_LOSSES


def complete_method(incomplete: str) -> list[str]:
    """Methods that start with the typed text."""
    return [name for name in METHODS if name.startswith(incomplete)]


def init(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="A method, such as sft.", autocompletion=complete_method)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; else it is printed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a commented starter recipe. It runs unchanged, on a built-in model and built-in data.

    Every spelling of a method works: online-dpo, online_dpo, OnlineDPO.
    """
    from memtrain.recipes.reference.starter import starter_recipe

    method = spelled_method(method)
    if method not in METHODS:
        near = nearest_methods(method)
        fix = f"did you mean {' or '.join(near)}?" if near else f"the methods are {', '.join(METHODS)}"
        if method in PAIR_LOSSES:
            fix = f"{method} is a loss of dpo: memtrain init dpo, and dpo.loss: {method} in the recipe"
        raise RecipeError(f"unknown method '{method}'", "the command line", fix)
    text = starter_recipe(method, "recipe.yaml" if output is None else str(output))
    write_text(text, output, replace=force)
