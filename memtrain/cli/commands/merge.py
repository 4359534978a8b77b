"""`memtrain merge RUN`: fold the adapter of a run into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import hide_progress_bars, print_text, whole


def merge(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished run that trained an adapter.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the model; RUN/merged if not given.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Precision of the weights; the run's own if not given.")
    ] = None,
) -> None:
    """Merge a run's adapter into its base model and write a full model. The run itself is not changed."""
    hide_progress_bars()
    from memtrain.trainers.tools.merge import merge_run

    merged = merge_run(run, output, dtype)
    print_text(
        f"{merged.num_modules} modules merged; the model is in {whole(merged.folder)} ({merged.dtype})."
    )
    print_text(merged.compared.words("the adapter on its base"))
    if merged.why_whole:
        print_text(f"The whole model was in memory at once, not a module at a time: {merged.why_whole}.")
    if merged.was_quantized:
        print_text(
            f"The adapter was trained on {merged.was_quantized} weights and merged into the full ones: "
            "evaluate it again before you use it."
        )
