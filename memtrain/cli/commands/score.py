"""`memtrain score MODEL DATA`: the rewards that a trained reward model gives to answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.arguments import OverridesArgument
from memtrain.cli.output.terminal import hide_progress_bars, print_text, whole
from memtrain.memory.plan.units import count_of


def score(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A run, or the folder or hub id of a reward model (or of its adapter)."
        ),
    ],
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="A file, folder or hub id: pairs, or prompts with one answer."),
    ],
    overrides: OverridesArgument = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File for the rewards: one JSON line per row.")
    ] = Path("rewards.jsonl"),
) -> None:
    """Write the reward of every answer; for pairs, say how often the chosen one is preferred.

    Keys of a recipe may follow as `section.key=value` (data.columns, length.max_length, cluster.device, ...).
    With `memory.weights_offload=on` layers are read from their files whenever they are called, one at a time.
    """
    from memtrain.cli.plan.model_config import model_config
    from memtrain.memory.hardware.devices import detect
    from memtrain.memory.rules.ledger import SourcedRecipe
    from memtrain.memory.rules.score_settings import scoring_settings
    from memtrain.recipes.reading.load import recipe_of_words
    from memtrain.trainers.tools.reward_model_path import find_scored

    scored = find_scored(model, overrides or [])
    words = ["method=reward", *scored.words, f"data.train={data}", *(overrides or [])]
    if not any(word.startswith("length.max_length=") for word in words):
        words.append("length.max_length=null")
    loaded = recipe_of_words(words)
    hardware = detect(loaded.recipe.cluster.device)
    config = model_config(loaded.recipe.model)
    settings = scoring_settings(SourcedRecipe(loaded.recipe, loaded.where), hardware, config)

    hide_progress_bars()
    from memtrain.trainers.tools.score import write_rewards

    count, share = write_rewards(
        loaded.recipe, settings, output, scored.adapter, emit=lambda note: print_text(f"Data {note}.")
    )
    print_text(f"{count_of(count, 'row')} scored; the rewards are in {whole(output)}.")
    if share is not None:
        print_text(f"The chosen answer has the higher reward in {share:.1%} of the pairs.")
