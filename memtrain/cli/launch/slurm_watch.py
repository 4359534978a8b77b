"""The watch over the ranks of a SLURM job, which have no launcher: from its first node, by signs of life.

The ranks of several nodes have no process in common; their signs lie in the run folder, which all nodes see
(run_folder/pulse.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memtrain.cli.launch.hang import LOOK_S, HangWatch
from memtrain.trainers.loop.slurm_entry import ASKED_FILE, STEP_FILE
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.rank_failures import note_fault

WATCHER = -1
"""In place of a rank's number: who watches all of them."""


def watch_ranks(
    watch: HangWatch, folder: RunFolder, lives: Callable[[], bool], kill: Callable[[], None]
) -> None:
    """Look until srun `lives` no more; `kill` ranks that were asked to stop and do not move."""
    while lives():
        if watch.is_hung(is_asked=(folder.path / ASKED_FILE).exists()):
            assert watch.hung is not None, "A hang has its error."
            note_fault(folder, WATCHER, watch.hung)
            kill()
            return
        time.sleep(LOOK_S)


def kill_step(folder: RunFolder, srun: int) -> None:
    """End every task of the job's step at once; srun itself where the step is not known, or SLURM refuses."""
    with suppress(OSError):
        step = (folder.path / STEP_FILE).read_text().strip()
        done = subprocess.run(["scancel", "--signal=KILL", step], check=False)
        if done.returncode == 0:
            return
    with suppress(ProcessLookupError):
        os.kill(srun, signal.SIGKILL)


def main() -> int:
    """Entry point: the run folder, the number of ranks, cluster.stop_grace_s, and srun's process."""
    folder = RunFolder(Path(sys.argv[1]))
    num_ranks, grace_s, srun = (int(word) for word in sys.argv[2:5])
    shell = os.getppid()

    def lives() -> bool:
        with suppress(ProcessLookupError):
            os.kill(srun, 0)
            return os.getppid() == shell
        return False

    watch_ranks(HangWatch(folder, num_ranks, grace_s), folder, lives, lambda: kill_step(folder, srun))
    return 0


if __name__ == "__main__":
    sys.exit(main())
