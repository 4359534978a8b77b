"""The arguments that several commands share, with their completion in the shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memtrain.recipes.reading.shipped import ENDINGS, shipped_names


def complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes, and recipe files and folders on the disk, that start with the typed text."""
    names = [name for name in shipped_names() if name.startswith(incomplete)]
    typed = Path(incomplete)
    folder = typed if incomplete.endswith("/") or not incomplete else typed.parent
    if not folder.is_dir():
        return names
    start = "" if folder == typed else typed.name
    for path in sorted(folder.iterdir()):
        if path.name.startswith(start) and not path.name.startswith("."):
            if path.suffix in ENDINGS:
                names.append(str(path))
            elif path.is_dir():
                names.append(f"{path}/")
    return names


def complete_override(incomplete: str) -> list[str]:
    """Keys of a recipe that start with the typed text, ready for their value."""
    from memtrain.recipes.reading.field_types import every_key
    from memtrain.recipes.recipe import Recipe

    keys = every_key(Recipe)
    sections = {key.rpartition(".")[0] for key in keys}
    return [f"{key}=" for key in keys if key.startswith(incomplete) and key not in sections]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or the name of a shipped recipe.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]

OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides of recipe keys, such as optim.lr=1e-4.",
        autocompletion=complete_override,
        show_default=False,
    ),
]

HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="Host memory, such as 512GiB, for what is offloaded. Default with named GPUs: 1.75 times "
        "their memory, at least 64GiB.",
    ),
]
