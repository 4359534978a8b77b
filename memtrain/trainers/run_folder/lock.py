"""The lock of a run folder: one writer, with the launcher that started it; no torch.

A process that can be seen is known by its number, the ticks of the machine's own clock at its start, and
the machine's boot: no step of the wall clock makes a living process look dead, or a dead one alive. One that
cannot be seen, on another host or in another container, gives signs of life: it touches the lock file, and
who wants the folder watches for them (docs/decisions/0024-a-run-folder-is-held-by-a-lease.md). Who lost the
folder notices before it writes again (`check_held`).
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

from memtrain.errors import LaunchError, printable
from memtrain.recipes.sections.base import Section
from memtrain.trainers.runtime.atomic_files import disk_fault
from memtrain.trainers.runtime.file_locks import wait_for_lock
from memtrain.trainers.runtime.namespaces import pid_namespace

OWNER = "MEMTRAIN_RUN_OWNER"
"""Set for launched processes: the owner that holds the run folder for them, as JSON."""

RENEW_S = 10.0
"""Time between two signs of life of a holder. Taste."""

LEASE_S = 60.0
"""Silence after which a folder is free, by its own file system's clock: more than a network disk pauses."""

WATCH_S = 2.5 * RENEW_S
"""Time for which a holder must have been silent before the eyes of who takes its folder: no step of a
server's clock makes a living one look gone."""

POLL_S = 0.5

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
    space: str = ""
    """Namespace of its number: another container does not see it. Empty in locks of earlier versions."""
    token: str = ""
    """Of this holding of the folder, and of no other."""
    launcher: Owner | None = None
    """The process that started it, which holds the folder together with it."""

    def is_seen(self) -> bool:
        """Whether this process can see it, if it runs."""
        if self.host != socket.gethostname():
            return False
        return not self.space or (self.boot == boot_id() and self.space == _space())

    def is_running(self) -> bool:
        """Whether the process itself still runs; one that cannot be seen is taken to run."""
        if not self.is_seen():
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


def ticks_of(pid: int | Literal["self"]) -> int | None:
    """Clock ticks since boot at which a process of this machine started; None where it runs no more.

    Source: proc(5): field 22 of /proc/PID/stat, counted behind the name, which may hold blanks and brackets.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, ticks = words[0], words[19]
    return None if state in "ZX" else int(ticks)


def _space() -> str:
    """Namespace of the process numbers that /proc shows; one that nobody shares where it is not this
    process's own."""
    is_own = os.readlink("/proc/self") == str(os.getpid())
    return pid_namespace() if is_own else f"unseen {os.getpid()} {uuid.uuid4().hex}"


def this_process(launcher: Owner | None = None) -> Owner:
    """The owner that this process is."""
    return Owner(
        pid=os.getpid(),
        host=socket.gethostname(),
        boot=boot_id(),
        ticks=ticks_of("self") or 0,
        job=os.environ.get("SLURM_JOB_ID", ""),
        space=_space(),
        token=uuid.uuid4().hex,
        launcher=launcher,
    )


def read_owner(path: Path) -> Owner | None:
    """The owner that a lock file names; None for no file, or a dying process's unfinished file."""
    try:
        return Owner.model_validate_json(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


clock_s = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic
"""A clock that goes on while the machine sleeps, and is never set."""

_held_here: dict[str, RunLock] = {}
"""Locks that this process holds, by the folder's path."""


def check_held(folder: Path) -> None:
    """Nothing where this process has the folder, or never took it: other commands write beside a run.

    Raises: LaunchError when another process has taken it over, because this one gave no sign of life.
    """
    lock = lock_of(folder)
    if lock is not None:
        lock.check()


def lock_of(folder: Path) -> RunLock | None:
    """The lock by which this process has the folder; None where it never took it."""
    return _held_here.get(os.path.abspath(folder))


def is_lost(folder: Path) -> bool:
    """Whether this process had the folder, and another one has it now."""
    try:
        check_held(folder)
    except LaunchError:
        return _held_here[os.path.abspath(folder)].is_taken
    return False


class RunLock:
    """The right to write a run folder, until `close`. A context manager.

    A thread gives signs of life meanwhile.
    """

    def __init__(self, path: Path, owner: Owner, made: Sequence[Path] = ()) -> None:
        self.path = path.absolute()
        self.owner = owner
        self._made = made
        """Folders that were made for it, the deepest first: empty folders are removed again."""
        self._taken_by: Owner | None = None
        self.sure_until_s = clock_s() + LEASE_S / 2
        """Until then, by `clock_s`, nobody else can have the folder."""
        self._ended = threading.Event()
        _held_here[os.path.abspath(path.parent)] = self
        threading.Thread(target=self._renew_on, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raise LaunchError when another process has taken the folder over."""
        if self._taken_by is None and clock_s() > self.sure_until_s:
            # It was stopped, or its disk was: what another one has done meanwhile is in the file.
            try:
                self.renew()
            except OSError as error:
                raise disk_fault(error, "the lock of the run folder cannot be renewed", self.path) from None
        if self._taken_by is not None:
            by = self._taken_by
            raise LaunchError(
                f"process {by.pid} on {by.host} has taken {self.path.parent} over: this one gave no sign of "
                f"life for {LEASE_S:.0f} s",
                where=str(self.path),
                fix="let that one go on: this one has stopped writing; or stop both, and start one again",
            )

    @property
    def is_taken(self) -> bool:
        """Whether another process is known to have the folder."""
        return self._taken_by is not None

    def renew(self) -> None:
        """Give a sign of life, where the folder is still this process's.

        Raises: OSError when the disk refuses.
        """
        found = read_owner(self.path)
        if found is None:
            # Removed by hand, or unfinished words of a process that is gone.
            with _held(self.path) as file:
                if read_owner(self.path) is None and not self._ended.is_set():
                    _write(file, self.owner)
                    found = self.owner
        if found is None:
            return
        if found == self.owner or found.launcher == self.owner:
            os.utime(self.path)
            self.sure_until_s = clock_s() + LEASE_S / 2
        elif found != self.owner.launcher:
            self._taken_by, self.sure_until_s = found, 0.0

    def _renew_on(self) -> None:
        while not self._ended.wait(RENEW_S):
            # A disk that refuses is met, and reported, by what the run itself writes.
            with suppress(OSError):
                self.renew()
            if self._taken_by is not None:
                return

    def close(self) -> None:
        """Give the folder back, to the launcher where that still runs; no effect once another one has it."""
        self._ended.set()
        _held_here.pop(os.path.abspath(self.path.parent), None)
        try:
            self._close()
        except OSError as error:
            text = f"{self.path} could not be given back ({error.strerror}): it ends with this process"
            print(f"note: {printable(text)}", file=sys.stderr)

    def _close(self) -> None:
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
    """Take a run folder for this process; the lock of an ended process is taken over, that of one that is
    not seen when it has given no sign of life for `LEASE_S`, which is waited for.

    Raises: LaunchError when a living process has it; OSError when the disk refuses.
    """
    silent: tuple[Owner, int] | None = None
    while True:
        with _held(path) as file:
            owner = read_owner(path)
            holder = None if owner is None else owner.living()
            is_free = holder is None or _was_not_given_back(holder)
            if owner is None or is_free or (owner, _touched_ns(path)) == silent:
                mine = this_process()
                _write(file, mine)
                return RunLock(path, mine, made)
        assert holder is not None, "Nobody has what is free."
        if holder.is_seen() or not holder.space:
            raise _held_by(holder, path, folder)
        if silent is not None and silent[0] == owner:
            raise _held_by(holder, path, folder)
        silent = owner, _silence_of(owner, path, folder)


def _was_not_given_back(holder: Owner) -> bool:
    """Whether this process had the folder, and a disk that refused kept it from taking its name out."""
    is_mine = holder.is_seen() and holder.pid == os.getpid() and bool(holder.token)
    return is_mine and holder.token not in {lock.owner.token for lock in _held_here.values()}


def _held_by(holder: Owner, path: Path, folder: Path) -> LaunchError:
    if holder.is_seen():
        fix = f"wait for it, stop it (kill {holder.pid}), or choose another run_dir"
    elif holder.space:
        fix = f"stop it there, or choose another run_dir; {LEASE_S:.0f} s after its end the folder is free"
    else:
        fix = f"if this process is gone, remove {path}; or choose another run_dir"
    where = "" if holder.is_seen() or holder.host != socket.gethostname() else ", in another container,"
    what = f"process {holder.pid} on {holder.host}{where} is running in {folder}"
    return LaunchError(what, where=str(path), fix=fix)


def _silence_of(owner: Owner, path: Path, folder: Path) -> int:
    """Watch a holder that is not seen until its lease is over; when it gave the last sign of life, in
    nanoseconds of the file system's clock.

    Raises: LaunchError when it gives one, or another process has the folder meanwhile.
    """
    first = _touched_ns(path)
    wait_s = max(WATCH_S, min(LEASE_S, LEASE_S - silent_s(path)))
    print(
        f"process {owner.pid} on {owner.host}, which is not seen from here, held {printable(str(folder))}: "
        f"waiting {wait_s:.0f} s for a sign of life",
        file=sys.stderr,
        flush=True,
    )
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        time.sleep(POLL_S)
        found = read_owner(path)
        if found is None:
            break
        if found != owner or _touched_ns(path) != first:
            raise _held_by(found, path, folder)
    return first


def silent_s(path: Path) -> float:
    """Seconds since the last sign of life in a lock file, by the clock of its file system: that gives a new
    file its time, whatever the clocks of the hosts say. By this host's clock where nothing may be written."""
    probe = path.with_name(f".lock-now.{os.getpid()}.tmp")
    try:
        try:
            probe.touch()
            os.utime(probe)
            now_ns = _touched_ns(probe)
        finally:
            probe.unlink(missing_ok=True)
    except OSError:
        now_ns = time.time_ns()
    return (now_ns - _touched_ns(path)) / 1e9


def _touched_ns(path: Path) -> int:
    """When a file was last touched; 0 where there is none. Opened, for NFS asks the server then."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(file).st_mtime_ns
    finally:
        os.close(file)


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
