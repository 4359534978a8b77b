"""The run folder: where everything that a run leaves behind lies, and who may write it; no torch."""

from __future__ import annotations

import errno
import stat
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from memtrain.errors import OR, LaunchError, sayable
from memtrain.recipes.sections.base import Section
from memtrain.trainers.run_folder.litter import remove_litter
from memtrain.trainers.run_folder.lock import Owner, RunLock, check_held, join_lock, take_lock
from memtrain.trainers.runtime.atomic_files import disk_fault, disk_faults, write_whole

TRIES = 20
"""Times that a folder is made again which another process removes at that moment. Taste."""


class RunState(StrEnum):
    """State of a run."""

    RUNNING = "running"
    SAVED = "saved"
    """Asked to stop; saved, and can be continued."""
    DONE = "done"
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"


class Status(Section):
    """Contents of `status.json`."""

    state: RunState
    step: int
    """Optimizer steps made."""
    time: float
    """Seconds since 1970 when this was written."""
    message: str = ""
    """Reason of a failure, in one sentence."""


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
        """File of metrics: a JSON line for every event (events.py)."""
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
    def final_list(self) -> Path:
        """List of the files in `final/` (checkpoints/final_model.py)."""
        return self.path / "final.json"

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
        """State of the run, for a person or a script that watches it."""
        return self.path / "status.json"

    @property
    def log(self) -> Path:
        """Lines that were printed, as plain text."""
        return self.path / "log.txt"

    @property
    def faults(self) -> Path:
        """Errors that ended the ranks of a run with several (rank_failures.py)."""
        return self.path / ".faults"

    @property
    def lock(self) -> Path:
        """The process that writes this folder."""
        return self.path / ".lock"

    def open_for_run(self) -> RunLock:
        """Make the folder and take it for this process, without half-written files of killed processes.

        The lock of a dead process is taken over.

        Raises: LaunchError when it cannot be made or written, or a living process has it.
        """
        doing = f"the run folder {self.path} cannot be used"
        with disk_faults(doing, self.path):
            self._refuse_strangers()
        above = (self.checkpoints, self.path, *self.path.parents)
        for is_last in (*[False] * TRIES, True):
            try:
                missing = [one for one in above if not one.exists()]
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                lock = take_lock(self.lock, self.path, made=missing)
            except OSError as error:
                # A last owner has just removed the empty folder: ENOENT, or EEXIST where the folder went
                # between the attempt to make it and the look whether it is there.
                if error.errno not in (errno.ENOENT, errno.EEXIST) or is_last:
                    raise disk_fault(error, doing, self.path) from None
                continue
            self._tidy(lock)
            return lock
        raise AssertionError("The last try returns or raises.")

    def _tidy(self, lock: RunLock) -> None:
        """Remove half-written files of killed processes. Raises: LaunchError when the disk refuses."""
        try:
            remove_litter(self.path)
        except OSError as error:
            lock.close()
            doing = "leftovers of killed processes in the run folder cannot be removed"
            raise disk_fault(error, doing, Path(error.filename or self.path)) from None

    def join_for_run(self, launcher: Owner) -> RunLock:
        """Hold the folder together with the launcher that took it.

        Raises: LaunchError when the launcher has it no more, or the disk refuses.
        """
        try:
            return join_lock(self.lock, self.path, launcher)
        except OSError as error:
            raise disk_fault(error, f"the run folder {self.path} cannot be used", self.path) from None

    def _refuse_strangers(self) -> None:
        """Raise LaunchError where a file stands in the place of a folder, a folder in that of a file, a link
        in that of either; and where files of a run's names are there without a run.
        """
        folders = (self.path, self.checkpoints, self.final, self.trackers, self.faults)
        files = (
            self.recipe,
            self.plan,
            self.launch,
            self.metrics,
            self.report,
            self.status,
            self.log,
            self.lock,
            self.final_list,
        )
        wanted = dict.fromkeys(folders, "folder") | dict.fromkeys(files, "file")
        for path, kind in wanted.items():
            found = _kind_of(path)
            if found not in ("", kind):
                raise LaunchError(
                    f"the run folder {self.path} cannot be used: {path.name} is a {found}",
                    where=str(path),
                    fix=f"move {path} away, or choose another run_dir",
                )
            if path.is_symlink() and path != self.path:
                raise LaunchError(
                    f"the run folder {self.path} cannot be used: {path.name} is a link to {path.readlink()}",
                    where=str(path),
                    fix=f"remove the link: links are not followed{OR}for another disk, let run_dir itself be "
                    "a folder there, or a link to one",
                )
        strangers = [
            path.name for path in (self.recipe, self.launch, self.metrics, self.report) if path.exists()
        ]
        # A plan that is gone leaves checkpoints, which know it.
        is_run = self.plan.exists() or any(self.checkpoints.glob("*/manifest.json"))
        if strangers and not is_run:
            raise LaunchError(
                f"{self.path} is no run folder, and a run would overwrite {' and '.join(strangers)} there",
                where=str(self.path),
                fix="choose another run_dir (--run-dir)",
            )

    def write_status(self, state: RunState, step: int, message: str = "") -> None:
        """Write `status.json` whole.

        Raises: LaunchError when the disk refuses, or another process has taken the folder over.
        """
        check_held(self.path)
        status = Status(state=state, step=step, time=time.time(), message=sayable(message))
        try:
            write_whole(self.status, status.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise disk_fault(error, "the status of the run cannot be written", self.status) from None

    def read_status(self) -> Status | None:
        """State of the run, or None when it has not begun, or the file is of another version.

        One that says `running` may have been killed.
        """
        try:
            return Status.model_validate_json(self.status.read_text(errors="replace"), strict=False)
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise disk_fault(error, "the status of the run cannot be read", self.status) from None


def _kind_of(path: Path) -> str:
    """`file` or `folder`; empty where there is nothing. In one look: another process may be making it."""
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except OSError:
        return ""
