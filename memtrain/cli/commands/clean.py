"""`memtrain clean`: removes half-written files of killed processes from a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memtrain.cli.output.terminal import print_text, whole


def clean(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.", show_default=False)],
) -> None:
    """Remove half-written files of killed processes. The next start of the run does so too.

    Checkpoints, metrics and models stay. Refused while a process runs there.
    """
    from memtrain.errors import LaunchError
    from memtrain.memory.plan.units import gib
    from memtrain.trainers.checkpoints.checkpoint import left_checkpoints, mend_checkpoints
    from memtrain.trainers.run_folder.folder import RunFolder
    from memtrain.trainers.run_folder.litter import litter_in, weighed
    from memtrain.trainers.run_folder.rank_failures import clear_faults

    folder = RunFolder(run)
    if not folder.plan.is_file() and not folder.status.is_file():
        raise LaunchError(
            f"{run} is not a run folder: it has no {folder.plan.name}", str(run), "give the folder of a run"
        )
    left = [*litter_in(run), *map(weighed, left_checkpoints(folder))]
    # Refuses where somebody writes, and removes what lies in the folder itself.
    with folder.open_for_run():
        mend_checkpoints(folder)
        clear_faults(folder)
    for one in left:
        print_text(f"removed {whole(one.path)} ({gib(one.num_bytes)})")
    if not left:
        print_text("there are no half-written files")
