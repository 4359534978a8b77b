"""The run folder: where everything that a run leaves behind lies, and who may write it; no torch."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType

import psutil

from memtrain.errors import LaunchError
from memtrain.recipes.sections.base import Section
from memtrain.trainers.runtime.atomic_files import disk_fault, write_whole


class RunState(StrEnum):
    """How a run stands."""

    RUNNING = "running"
    SAVED = "saved"
    """Asked to stop; saved, and can be continued."""
    DONE = "done"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"


class Status(Section):
    """What `status.json` says."""

    state: RunState
    step: int
    """Optimizer steps made."""
    time: float
    """Seconds since 1970 when this was written."""
    message: str = ""
    """Why it failed, in one sentence."""


class Owner(Section):
    """The process that writes a run folder, as the lock file names it."""

    pid: int
    host: str
    started: float
    """When the process started, seconds since 1970: its number may have been given to a new process."""
    job: str
    """SLURM job, or empty: a job that is queued again is the same owner on another host."""

    def is_alive(self) -> bool:
        """Whether it still runs; a process of another host is taken for alive."""
        if self.host != socket.gethostname():
            return not self.job or self.job != os.environ.get("SLURM_JOB_ID")
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.NoSuchProcess:
            return False


def this_process() -> Owner:
    """The owner that this process is."""
    return Owner(
        pid=os.getpid(),
        host=socket.gethostname(),
        started=psutil.Process().create_time(),
        job=os.environ.get("SLURM_JOB_ID", ""),
    )


class RunLock:
    """The right to write a run folder, until `close`. A context manager."""

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path = path
        self.owner = owner

    def close(self) -> None:
        """Give the folder back; no effect when another process has taken it over."""
        if read_owner(self.path) == self.owner:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_owner(path: Path) -> Owner | None:
    """The owner that a lock file names; None for no file, or one that a dying process left unfinished."""
    try:
        return Owner.model_validate_json(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run. Nothing is made before `open_for_run`."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe, as YAML."""
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """The plan: the whole contract between launcher and workers."""
        return self.path / "plan.json"

    @property
    def launch(self) -> Path:
        """The command that starts this run again."""
        return self.path / "launch.sh"

    @property
    def metrics(self) -> Path:
        """One JSON line for every event (events.py)."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, `step-000123` each."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """The trained model, in the Hugging Face format."""
        return self.path / "final"

    @property
    def trackers(self) -> Path:
        """Folder of the trackers that write files (TensorBoard)."""
        return self.path / "trackers"

    @property
    def report(self) -> Path:
        """The report, one self-contained page."""
        return self.path / "report.html"

    @property
    def status(self) -> Path:
        """How the run stands, for a person or a script that watches it."""
        return self.path / "status.json"

    @property
    def log(self) -> Path:
        """What was printed, as plain lines."""
        return self.path / "log.txt"

    @property
    def faults(self) -> Path:
        """What ended the ranks of a run with several (faults.py)."""
        return self.path / ".faults"

    @property
    def lock(self) -> Path:
        """The process that writes this folder."""
        return self.path / ".lock"

    def open_for_run(self) -> RunLock:
        """Make the folder and take it for this process. The lock of a dead process is taken over.

        Raises: LaunchError when it cannot be made or written, or a living process has it.
        """
        doing = f"the run folder {self.path} cannot be used"
        if self.path.exists() and not self.path.is_dir():
            raise LaunchError(
                f"{doing}: it is a file", where=str(self.path), fix="move it, or choose another run_dir"
            )
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            return _take_lock(self.lock, self.path)
        except OSError as error:
            raise disk_fault(error, doing, self.path) from None

    def write_status(self, state: RunState, step: int, message: str = "") -> None:
        """Write `status.json` whole.

        Raises: LaunchError when the disk refuses.
        """
        status = Status(state=state, step=step, time=time.time(), message=message)
        try:
            write_whole(self.status, status.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise disk_fault(error, "the status of the run cannot be written", self.status) from None

    def read_status(self) -> Status | None:
        """How the run stands, or None when it has not begun. One that says `running` may have been killed."""
        try:
            return Status.model_validate_json(self.status.read_text(), strict=False)
        except FileNotFoundError:
            return None


def _take_lock(path: Path, folder: Path) -> RunLock:
    # The guard makes "is the owner dead" and "then it is mine" one act. It is not the lock itself: children
    # of a fork would hold it after their parent's death, and it could not be shown to the user.
    guard = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        owner = read_owner(path)
        if owner is not None and owner.is_alive():
            raise LaunchError(
                f"process {owner.pid} on {owner.host} is running in {folder}",
                where=str(path),
                fix=f"wait for it, stop it (kill {owner.pid}), or choose another run_dir"
                if owner.host == socket.gethostname()
                else f"if that process is gone, remove {path}; or choose another run_dir",
            )
        mine = this_process()
        write_whole(path, json.dumps(mine.model_dump()) + "\n")
    finally:
        os.close(guard)
    return RunLock(path, mine)
