"""`memtrain import-trl`: a TRL configuration as a recipe, and what of it has no counterpart."""

from __future__ import annotations

import difflib
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import columns, write_text
from memtrain.errors import RecipeError


def import_trl(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A YAML file as `trl sft --config` takes it.")
    ],
    method: Annotated[str, typer.Option("--method", "-m", help="sft, dpo, kto, reward, grpo or rloo.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The recipe to write; else it is printed.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, help="Devices that it was run on; 1 where it does not say."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write the recipe that trains what a TRL configuration trains; list what has no counterpart."""
    from memtrain.recipes.trl.importing import import_config
    from memtrain.recipes.trl.translate import IMPORTED

    if method not in IMPORTED:
        near = difflib.get_close_matches(method.lower(), IMPORTED, n=1)
        raise RecipeError(
            f"'{method}' is no method that TRL's command line has",
            fix=f"did you mean {near[0]}?" if near else f"say one of {', '.join(IMPORTED)}",
        )
    made = import_config(config, method, processes)
    write_text(made.text, output, replace=force, says_aside=True)
    for line in made.told:
        wrapped = textwrap.wrap(line, columns(), subsequent_indent="  ", break_long_words=False)
        typer.echo("\n".join(wrapped), err=True)
    if made.faults:
        name = "the recipe" if output is None else str(output)
        typer.echo(f"{name} is not complete yet:", err=True)
        raise RecipeError(made.faults)
