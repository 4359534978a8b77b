"""A watch over calls of others' code that keep the interpreter to themselves, from a process of its own.

A regular expression that tries for ever, or a C extension, holds Python's one lock (the GIL): no limit of
time can be held from inside, no signal is heard and no step goes on. A small process is told once a second
that calls are under way and the interpreter moves. When it does not for the calls' limit and `GRACE_S` more,
it has the system's own handler write down where every thread is (faulthandler needs no lock), says so, writes
the status, and ends the run: its checkpoints stand. Why no child process for each call:
docs/decisions/0027-calls-that-hold-the-interpreter-end-the-run.md.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

GRACE_S = 10.0
"""Time beyond a call's own limit. Taste: more than any operation of the loop itself keeps the interpreter."""

BEAT_S = 1.0
ENDS = signal.SIGTRAP
"""Ends the watched process at once, with its number as the exit code: that of a LaunchError."""

LOOK_S = 0.5
SLEPT_S = 5.0
"""The watching process was not awake itself for so long: nothing is known of the time before."""

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')

_helper: subprocess.Popen[bytes] | None = None
_places: IO[bytes] | None = None
_running = 0


def watch_interpreter(run_dir: Path) -> None:
    """Start the watching process of this run, once."""
    global _helper, _places
    if not sys.platform.startswith("linux") or (_helper is not None and _helper.poll() is None):
        return
    _places = tempfile.NamedTemporaryFile(prefix="memtrain-places-")  # noqa: SIM115 (for the life of the run)
    faulthandler.register(_dump_signal(), file=_places, all_threads=True, chain=False)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(int(ENDS), ctypes.cast(libc._exit, ctypes.c_void_p))
    words = [
        str(os.getpid()),
        str(GRACE_S),
        _places.name,
        str(run_dir.absolute()),
        os.environ.get("RANK", ""),
    ]
    paths = [one for one in sys.path if one]
    code = f"import sys; sys.path[:0] = {paths!r}; from {__name__} import main; main()"
    _helper = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0
    )


def _dump_signal() -> int:
    return signal.SIGRTMIN + 9


def begun() -> None:
    """One more call is under way."""
    global _running
    _running += 1


def over() -> None:
    """One call less is under way."""
    global _running
    _running -= 1
    if not _running:
        _say(b"rest\n")


def beat(limit_s: float) -> None:
    """Calls of this limit are under way, and the interpreter moves."""
    _say(f"{limit_s}\n".encode())


def _say(words: bytes) -> None:
    if _helper is not None and _helper.stdin is not None:
        with suppress(OSError):
            _helper.stdin.write(words)


def main() -> None:
    """Entry point of the watching process; it ends with the one that it watches."""
    pid, grace_s, places, run_dir, rank = int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:6]
    for one in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        # They are for the run, which closes the pipe when it ends.
        signal.signal(one, signal.SIG_IGN)
    limit_s: float | None = None
    heard = looked = time.monotonic()
    while True:
        ready, _, _ = select.select([0], [], [], LOOK_S)
        now = time.monotonic()
        if now - looked > SLEPT_S or _is_stopped(pid):
            heard = now
        looked = now
        if ready:
            words = os.read(0, 2**16)
            if not words:
                return
            last = words.strip().splitlines()[-1]
            limit_s, heard = None if last == b"rest" else float(last), now
        elif limit_s is not None and now - heard > limit_s + grace_s:
            _end(pid, limit_s, places, Path(run_dir), rank)
            return


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a person or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _end(pid: int, limit_s: float, places: str, run_dir: Path, rank: str) -> None:
    """Say where the process is, and end it."""
    from memtrain.errors import LaunchError
    from memtrain.trainers.run_folder.folder import RunFolder, RunState
    from memtrain.trainers.run_folder.rank_failures import note_fault

    with suppress(OSError):
        os.kill(pid, _dump_signal())
        time.sleep(LOOK_S)
    place = place_of(Path(places).read_text(errors="replace"))
    error = LaunchError(
        f"a reward, environment or metric has kept Python's interpreter for more than its timeout_s "
        f"({limit_s:g} s) and could not be ended, so the run was ended",
        place or str(run_dir),
        "bound the work there (a regular expression with nested repeats tries for ever); the same command "
        "resumes from the last checkpoint",
    )
    folder = RunFolder(run_dir)
    with suppress(Exception):
        status = folder.read_status()
        folder.write_status(RunState.FAILED, status.step if status else 0, error.faults[0].what)
        if rank:
            note_fault(folder, int(rank), error)
    print(error.text(), file=sys.stderr, flush=True)
    with suppress(OSError):
        os.kill(pid, ENDS)
        time.sleep(2.0)
        os.kill(pid, signal.SIGKILL)


def place_of(dump: str) -> str:
    """`file:line` of the innermost line of others' code in a dump of all threads; or nothing."""
    ours = str(Path(__file__).parents[4] / "memtrain")
    inner = (os.path.dirname(os.__file__), "<", ours)
    for thread in dump.split("\n\n"):
        for found in FRAME.finditer(thread):
            if not found["file"].startswith(inner) and "site-packages" not in found["file"]:
                return f"{found['file']}:{found['line']}"
    return ""
