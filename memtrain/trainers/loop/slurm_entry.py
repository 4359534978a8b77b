"""The entry of an srun task: signals held, its rank from SLURM's words, then the worker."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from memtrain.errors import EXIT_SAVED, LaunchError
from memtrain.trainers.runtime.signals import hold_signals, let_signals_pass

SAVED_FILE = "slurm/saved"
"""Written into the run folder when the run was asked to stop and has saved: the job may go on later."""

STEP_FILE = "slurm/step"
"""Names the job's step that the ranks are, as scancel knows it."""

ASKED_FILE = "slurm/asked"
"""Made by the batch script when it has asked the ranks to stop."""

NAMES = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
}
"""Words of torch.distributed, and SLURM's for the same."""


def rank_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The words by which torch.distributed and accelerate know this process; the address is the script's.

    Raises: LaunchError when this is no task of an srun that `memtrain slurm` wrote.
    """
    missing = [name for name in (*NAMES.values(), "MASTER_ADDR", "MASTER_PORT") if name not in given]
    if missing:
        raise LaunchError(
            f"this process is not a task of srun: {', '.join(missing)} not set",
            where="environment of this process",
            fix="submit the job.sbatch that `memtrain slurm` writes; `memtrain train` runs without SLURM",
        )
    return {name: given[theirs] for name, theirs in NAMES.items()}


def main() -> int:
    """Entry point of a task: the plan's path is its only argument. The exit code.

    0 also for a run that was stopped and has saved, which the file says: after a task that ends with another
    code srun ends all of them, be they still writing.
    """
    hold_signals()
    try:
        os.environ.update(rank_environment(os.environ))
    except LaunchError as error:
        print(error.text(), file=sys.stderr)
        return error.exit_code
    # Torch is imported only here: until the worker listens, signals wait.
    from memtrain.trainers.loop import worker

    run = Path(sys.argv[1]).parent
    # A plan of one process takes the words out of the environment.
    is_main = os.environ["RANK"] == "0"
    if is_main:
        _write(run / STEP_FILE, f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}\n")
    _meet()
    code = worker.main()
    let_signals_pass()
    if code != EXIT_SAVED:
        return code
    if is_main:
        _write(run / SAVED_FILE, "")
    return 0


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def _meet() -> None:
    """Ranks of one node meet on its loopback interface; of several, the main one says where."""
    from memtrain.trainers.runtime.loopback import LOOPBACK, listen_on_loopback

    num_nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    if num_nodes == 1:
        os.environ["MASTER_ADDR"] = LOOPBACK
        listen_on_loopback()
    elif os.environ["RANK"] == "0":
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        print(
            f"the ranks of {num_nodes} nodes connect at {place}, and at ports that the system chooses",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
