"""`memtrain import`, `memtrain import-trl`: configurations of other trainers as recipes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import columns, write_text
from memtrain.errors import RecipeError
from memtrain.recipes.registry import nearest_methods, spelled_method

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML file, a Python script (read, never run), or the command line in quotes.",
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        help="Method, if the file does not say it: sft, dpo, kto, reward, grpo, rloo or distill.",
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The recipe to write; else it is printed.")
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes", "--num-gpus", min=1, help="Devices of the original run; 1 if the file does not say."
    ),
]
Trainer = Annotated[
    int | None,
    typer.Option("--trainer", min=1, help="Which trainer of a script that trains more than once: 1, 2, ..."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]


def import_config(
    config: Config,
    tool: Annotated[
        str | None,
        typer.Option("--tool", "-t", help="trl, axolotl, llamafactory, unsloth or verl; else it is guessed."),
    ] = None,
    method: Method = None,
    output: Output = None,
    processes: Processes = None,
    trainer: Trainer = None,
    force: Force = False,
) -> None:
    """Translate another trainer's configuration into a recipe, and list its keys without a counterpart."""
    _import(config, tool, method, output, processes, force, trainer)


def import_trl(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="A YAML file as `trl sft --config` takes it.")
    ],
    method: Annotated[
        str, typer.Option("--method", "-m", help="sft, dpo, kto, reward, grpo, rloo or distill.")
    ],
    output: Output = None,
    processes: Processes = None,
    force: Force = False,
) -> None:
    """Translate a TRL configuration into a recipe, and list its keys without a counterpart."""
    _import(str(config), "trl", method, output, processes, force)


def _import(
    config: str,
    tool: str | None,
    method: str | None,
    output: Path | None,
    processes: int | None,
    force: bool,
    trainer: int | None = None,
) -> None:
    from memtrain.recipes.importers.importing import import_config as imported
    from memtrain.recipes.importers.importing import read_foreign
    from memtrain.recipes.trl.translate import IMPORTED

    method = None if method is None else spelled_method(method)
    if method is not None and method not in IMPORTED:
        near = nearest_methods(method, IMPORTED)
        raise RecipeError(
            f"unknown method '{method}'",
            where="--method",
            fix=f"did you mean {' or '.join(near)}?" if near else f"give one of {', '.join(IMPORTED)}",
        )
    foreign = read_foreign(config, tool, method, processes, trainer)
    made = imported(foreign, "recipe.yaml" if output is None else str(output))
    if output is None:
        write_text(made.text, None)
    else:
        files = {output: made.text, **{output.parent / name: text for name, text in made.code.items()}}
        # A file that is there is refused before another is written.
        for path in sorted(files, key=lambda path: not path.exists()):
            write_text(files[path], path, replace=force, confirm_on_stderr=True)
    summary = f"Read as a configuration of {made.tool.title}, method {made.method}."
    for line in [summary, *made.notes] if tool is None else made.notes:
        wrapped = textwrap.wrap(line, columns(), subsequent_indent="  ", break_long_words=False)
        typer.echo("\n".join(wrapped), err=True)
    if made.code and output is None:
        typer.echo(f"-o FILE writes {', '.join(made.code)} too, which the recipe names.", err=True)
    if made.faults:
        name = "the recipe" if output is None else str(output)
        typer.echo(f"{name} is not complete yet:", err=True)
        raise RecipeError(made.faults)
    if output is not None:
        typer.echo(f"next: memtrain check {output}", err=True)
