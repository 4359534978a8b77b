"""`memtrain score-teacher RECIPE`: the file of a teacher's likeliest tokens that a distillation reads."""

from __future__ import annotations

from typing import Annotated

import typer

from memtrain.cli.arguments import OverridesArgument, complete_recipe
from memtrain.cli.output.terminal import print_text, whole


def score_teacher(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A recipe file, or a shipped recipe.", autocompletion=complete_recipe
        ),
    ],
    overrides: OverridesArgument = None,
) -> None:
    """Write the teacher's top-k tokens for the data of a recipe, so that its run loads no teacher.

    The recipe's distill section has teacher, top_k and top_k_file. The teacher alone is loaded.
    """
    from memtrain.cli.launch.summary import reading_progress
    from memtrain.cli.plan.score_teacher import prepared_pass
    from memtrain.recipes.reading.load import load_recipe

    with reading_progress() as progress:
        ready = prepared_pass(load_recipe(recipe, overrides or [], method=None), progress=progress)

    from memtrain.trainers.tools.score_teacher import score_teacher as scored

    made = scored(ready.recipe, ready.data, ready.settings, num_columns=ready.num_columns)
    facts = made.facts
    print_text(
        f"{made.num_tokens:,} tokens scored by {facts.teacher}; its top {facts.top_k} tokens are in "
        f"{whole(made.path)} ({made.num_bytes / 2**20:,.1f} MiB)."
    )
    print_text(
        f"All other tokens together have a probability of {facts.mean_tail:.2%} on average, "
        f"and {facts.most_tail:.2%} at most."
    )
