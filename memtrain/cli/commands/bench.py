"""`memtrain bench`: savings and costs of each strategy of a plan, measured on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.arguments import OverridesArgument, RecipeArgument


def bench(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Also measure the plan without each of its strategies.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Another recipe to measure for comparison.", show_default=False),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of each variant.")] = 4,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repetitions; their spread is shown.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page.", show_default=False)
    ] = None,
) -> None:
    """Measure a recipe from the plain run to its plan, one strategy at a time.

    Each variant runs in a separate process on the same rows, and the variants take turns. Measured are peak
    memory, tokens per second and losses, beside the planner's predictions. Completions of online methods are
    fixed.
    """
    from tempfile import TemporaryDirectory

    from memtrain.cli.measure.bench import bench_recipe
    from memtrain.cli.measure.bench_tables import page, print_bench
    from memtrain.cli.output.terminal import write_text

    with TemporaryDirectory(prefix="memtrain-bench-") as place:
        made = bench_recipe(
            recipe,
            overrides or [],
            Path(place),
            ablate=ablate,
            against=against,
            steps=steps,
            repeats=repeats,
            progress=lambda text: typer.echo(text, err=True),
        )
    if html is not None:
        write_text(page(made), html, confirm_on_stderr=as_json)
    if as_json:
        typer.echo(json.dumps(made.as_json(), indent=1))
    else:
        print_bench(made)
