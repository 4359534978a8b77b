"""`memtrain verify`: a recipe's steps as planned and plainly, held against each other."""

from __future__ import annotations

from typing import Annotated

import typer

from memtrain.cli.arguments import OverridesArgument, RecipeArgument


def verify(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Number of optimizer steps to compare.")] = 2,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="Use a small random model with the same kinds of layers, and short rows, under the planned "
            "settings.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Test that the plan of a recipe gives the same numbers as the plain run.

    Makes a few steps twice from equal weights: as the plan says, and plainly (padded rows, whole logits, no
    checkpointing, the model's own attention). Compares losses, log-probs, gradients and updates; changes rows
    to see whether others move; saves and restores. Ends with exit code 1 where one of these fails.
    """
    from tempfile import TemporaryDirectory

    from memtrain.cli.launch.summary import reading_progress
    from memtrain.cli.measure.verify import print_verification, verified

    with TemporaryDirectory(prefix="memtrain-verify-") as place, reading_progress() as progress:
        made = verified(recipe, overrides or [], place, steps=steps, is_shrunk=shrink, progress=progress)
    if as_json:
        typer.echo(made.model_dump_json(indent=1))
    else:
        print_verification(made)
    raise typer.Exit(0 if made.is_exact else 1)
