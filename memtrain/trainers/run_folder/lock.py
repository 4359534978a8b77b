"""The lock of a run folder: one writer, with the launcher that started it; no torch.

A process is known by its number, the ticks of the machine's own clock at its start, and the machine's boot:
no step of the wall clock makes a living process look dead, or a dead one alive. Nothing can be asked of
another host: its lock holds until it is given back, its SLURM job is queued again, or a person removes it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from memtrain.errors import LaunchError
from memtrain.recipes.sections.base import Section
from memtrain.trainers.runtime.file_locks import wait_for_lock

OWNER = "MEMTRAIN_RUN_OWNER"
"""Set for launched processes: the owner that holds the run folder for them, as JSON."""

TRIES = 1000
"""Times that a lock file is opened which is another one a moment later. Taste: more than processes begin at
once. A file system may number its files anew at each look: then nothing is known of it but its name."""


class Owner(Section):
    """A process that writes a run folder, as the lock file names it."""

    pid: int
    host: str
    boot: str
    """Of the machine: a new one each time that it starts."""
    ticks: int
    """Of the machine's clock since its boot, when the process started: its number may be given anew."""
    job: str
    """SLURM job, or empty: a job that is queued again is the same owner on another host."""
    launcher: Owner | None = None
    """The process that started it, which holds the folder together with it."""

    def is_running(self) -> bool:
        """Whether the process itself still runs; a process of another host is taken to run."""
        if self.host != socket.gethostname():
            return not self.job or self.job != os.environ.get("SLURM_JOB_ID")
        return self.boot == boot_id() and self.ticks == ticks_of(self.pid)

    def living(self) -> Owner | None:
        """The process that still holds the folder, itself or its launcher; None where both are gone."""
        held = (self,) if self.launcher is None else (self, self.launcher)
        return next((one for one in held if one.is_running()), None)

    def is_alive(self) -> bool:
        """Whether it, or its launcher, still runs."""
        return self.living() is not None


def boot_id() -> str:
    """The boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def ticks_of(pid: int) -> int | None:
    """Clock ticks since boot at which a process of this machine started; None where it runs no more.

    Source: proc(5): field 22 of /proc/PID/stat, counted behind the name, which may hold blanks and brackets.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, ticks = words[0], words[19]
    return None if state in "ZX" else int(ticks)


def this_process(launcher: Owner | None = None) -> Owner:
    """The owner that this process is."""
    ticks = ticks_of(os.getpid())
    assert ticks is not None, "This process runs."
    return Owner(
        pid=os.getpid(),
        host=socket.gethostname(),
        boot=boot_id(),
        ticks=ticks,
        job=os.environ.get("SLURM_JOB_ID", ""),
        launcher=launcher,
    )


def read_owner(path: Path) -> Owner | None:
    """The owner that a lock file names; None for no file, or a dying process's unfinished file."""
    try:
        return Owner.model_validate_json(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


class RunLock:
    """The right to write a run folder, until `close`. A context manager."""

    def __init__(self, path: Path, owner: Owner, made: Sequence[Path] = ()) -> None:
        self.path = path
        self.owner = owner
        self._made = made
        """Folders that were made for it, the deepest first: empty folders are removed again."""

    def close(self) -> None:
        """Give the folder back, to the launcher where that still runs; no effect once another one has it."""
        if not self.path.exists():
            return
        with _held(self.path) as file:
            found = read_owner(self.path)
            if found == self.owner:
                self._give_back(file)
            elif found is not None and found.launcher == self.owner and not found.is_running():
                self._remove()

    def _give_back(self, file: int) -> None:
        launcher = self.owner.launcher
        if launcher is not None and launcher.is_running():
            _write(file, launcher)
        else:
            self._remove()

    def _remove(self) -> None:
        self.path.unlink()
        for folder in self._made:
            try:
                folder.rmdir()
            except OSError:
                return

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def take_lock(path: Path, folder: Path, *, made: Sequence[Path] = ()) -> RunLock:
    """Take a run folder for this process; the lock of an ended process is taken over.

    Raises: LaunchError when a living process has it; OSError when the disk refuses.
    """
    with _held(path) as file:
        owner = read_owner(path)
        holder = None if owner is None else owner.living()
        if holder is not None:
            raise LaunchError(
                f"process {holder.pid} on {holder.host} is running in {folder}",
                where=str(path),
                fix=f"wait for it, stop it (kill {holder.pid}), or choose another run_dir"
                if holder.host == socket.gethostname()
                else f"if this process is gone, remove {path}; or choose another run_dir",
            )
        mine = this_process()
        _write(file, mine)
    return RunLock(path, mine, made)


def join_lock(path: Path, folder: Path, launcher: Owner) -> RunLock:
    """Hold a run folder together with the launcher that took it for this process.

    Raises: LaunchError when the launcher has it no more; OSError when the disk refuses.
    """
    with _held(path) as file:
        if read_owner(path) != launcher:
            raise LaunchError(
                f"process {launcher.pid}, which started this one, no longer holds {folder}",
                where=str(path),
                fix="run the same command again",
            )
        mine = this_process(launcher)
        _write(file, mine)
    return RunLock(path, mine)


@contextmanager
def _held(path: Path) -> Iterator[int]:
    """The lock file, open, and nobody else's to look at and change meanwhile: a moment, not the run.

    A child of a fork would hold such a lock after its parent's death, so it is not the run's lock itself. A
    file system that has none is used without: there two starts of the same instant may both believe.
    """
    for tries in range(1, TRIES + 1):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            wait_for_lock(file)
            if _is_still(file, path) or tries == TRIES:
                try:
                    yield file
                finally:
                    if not os.fstat(file).st_size:
                        path.unlink(missing_ok=True)
                return
        finally:
            os.close(file)


def _is_still(file: int, path: Path) -> bool:
    """Whether the open file is the one of this name: its last holder may have removed it meanwhile, which
    NFS calls a stale handle."""
    try:
        return os.fstat(file).st_ino == path.stat().st_ino
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return False


def _write(file: int, owner: Owner) -> None:
    """Write the owner into the lock file. A kill in between leaves one that is taken over."""
    os.ftruncate(file, 0)
    os.pwrite(file, (owner.model_dump_json() + "\n").encode(), 0)
    os.fsync(file)
