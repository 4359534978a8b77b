"""`memtrain export RUN`: a model for Hugging Face from any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import hide_progress_bars, print_text


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that has saved.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the model; RUN/export if not given.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the newest if not given.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Precision of the weights; the run's own if not given.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest file of weights, such as 5GiB; an index joins several.")
    ] = "50GB",
) -> None:
    """Export a checkpoint of any engine as a Hugging Face model."""
    hide_progress_bars()
    from memtrain.trainers.tools.export import export_run

    made = export_run(run, output, step=step, dtype=dtype, max_shard_bytes=_bytes_of(max_shard_size))
    kind = "adapter" if made.is_adapter else "model"
    files = "file" if made.num_files == 1 else "files"
    print_text(
        f"The {kind} after step {made.step} is in {made.folder} ({made.dtype}, {made.num_files} {files})."
    )
    print_text(made.compared.words("the checkpoint"))
    if made.why_whole:
        print_text(f"The whole model was in memory at once, not a module at a time: {made.why_whole}.")


def _bytes_of(size: str) -> int:
    """Bytes of a size with its unit. Raises: LaunchError."""
    from pydantic import TypeAdapter, ValidationError

    from memtrain.errors import LaunchError
    from memtrain.recipes.sections.base import Bytes

    try:
        return TypeAdapter(Bytes).validate_python(size)
    except ValidationError:
        raise LaunchError(
            f"'{size}' is not a size", "--max-shard-size", "write it as 5GiB, or 500MiB"
        ) from None
