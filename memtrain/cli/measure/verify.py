"""`memtrain verify` in words: the plan that is verified, and the verdict as a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from memtrain.cli.output.terminal import print_table, print_text
from memtrain.memory.plan.units import count_of

if TYPE_CHECKING:
    from memtrain.trainers.tools.verify.result import Ran, Verification


def verified(
    recipe: str,
    overrides: list[str],
    place: str,
    *,
    steps: int,
    is_shrunk: bool,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """The recipe planned for this machine, shrunk where that is asked, and verified; `place`: its folder.

    Raises: RecipeError, DataError, LaunchError, DoesNotFit.
    """
    from memtrain.cli.plan.make_plan import make_plan
    from memtrain.cli.plan.model_config import model_config
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.trainers.tools.verify.shrink import shrunk
    from memtrain.trainers.tools.verify.verify import verify

    plan = make_plan(load_recipe(recipe, overrides), run_dir=place, progress=progress).plan
    notes: list[str] = []
    if is_shrunk:
        plan, notes = shrunk(plan, model_config(plan.recipe.model), Path(place))
    return verify(plan, steps=steps, notes=notes)


def print_verification(made: Verification) -> None:
    """The checks, the strategies that ran, and the verdict."""
    print_text(
        f"{made.method}: {made.recipe}, {count_of(made.steps, 'step')} in {made.dtype} on {made.device}"
    )
    for note in made.notes:
        print_text(f"Note: {note}.")
    typer.echo()
    print_table(
        ("check", "outcome", "what was found"),
        [(check.name, check.outcome, check.says) for check in made.checks],
    )
    typer.echo()
    print_table(
        ("what ran", "planned", "plain"),
        [
            (name, mine, theirs)
            for (name, mine), (_, theirs) in zip(_ran(made.planned), _ran(made.plain), strict=True)
        ],
    )
    for kernel in made.planned.kernels:
        typer.echo(f"  {kernel}")
    typer.echo()
    failed = [check.name for check in made.checks if check.outcome == "fail"]
    print_text(
        "The plan gives the numbers of the plain run."
        if made.is_exact
        else f"The plan does NOT give the numbers of the plain run: {', '.join(failed)}."
    )


def _ran(ran: Ran) -> list[tuple[str, str]]:
    forward = [name for name in ran.attention_ops if not name.endswith("_backward")]
    calls = [f"{name.rpartition('scaled_dot_product_')[2]} x{ran.attention_ops[name]}" for name in forward]
    return [
        ("attention", ran.attention),
        ("its operators", ", ".join(calls) or "matrix products"),
        ("passes of a layer", f"{ran.layer_passes:.2f}"),
        ("rows of logits at once", f"{ran.largest_logits_rows:,}"),
        ("micro-batches", f"{ran.micro_batches:,}"),
        ("tokens forwarded", f"{ran.forwarded_tokens:,}"),
        ("bytes offloaded", f"{ran.offloaded_bytes:,}"),
        ("optimizer", ran.optimizer),
    ]
