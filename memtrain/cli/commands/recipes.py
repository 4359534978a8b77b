"""`memtrain recipes`: the shipped recipes, and the text of one."""

from __future__ import annotations

from typing import Annotated

import typer

from memtrain.cli.output.terminal import print_table, print_text
from memtrain.recipes.reading.shipped import configs_dir, find_recipe, header, shipped_names

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="The shipped recipes.")


def complete_name(incomplete: str) -> list[str]:
    """Shipped recipes that start with the typed text."""
    return [name for name in shipped_names() if name.startswith(incomplete)]


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context) -> None:
    """List the shipped recipes: the name, and the training."""
    if context.invoked_subcommand is not None:
        return
    folder = configs_dir()
    rows = [(name, header(folder / f"{name}.yaml")[0]) for name in shipped_names()]
    print_table(("recipe", "what it trains"), rows)
    print_text()
    print_text("Print one: memtrain recipes show NAME. Run one: memtrain METHOD NAME.")


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name from the list.", autocompletion=complete_name)
    ],
) -> None:
    """Print the text of a shipped recipe."""
    typer.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)
