"""The failure of a rank, left in the run folder, because launchers hide it; no torch."""

from __future__ import annotations

import re
import time
import traceback
from contextlib import suppress

import memtrain.errors
from memtrain.errors import Fault, Interrupted, LaunchError, MemtrainError, sayable
from memtrain.recipes.sections.base import Section
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.report.final_status import record_end
from memtrain.trainers.runtime.atomic_files import write_whole

LAUNCHED = "MEMTRAIN_LAUNCHED"
"""Set by a launcher that reports the end of its processes itself."""

WORDS = re.compile(r"rank-[-0-9]+\.json|pulse-[0-9]+|\.rank-[-0-9]+\.json\.[0-9]+\.tmp")
"""Names of what ranks leave in `.faults`."""

ECHOES = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "NCCL",
    "DistBackendError",
)
"""Words of the errors that a rank meets because another one is gone."""


class RankFault(Section):
    """Error that ended one rank."""

    rank: int
    """Below 0: who watches all ranks."""
    time: float
    """Seconds since 1970."""
    kind: str
    """Name of the MemtrainError, or empty for an error that is not the user's."""
    faults: tuple[tuple[str, str, str], ...] = ()
    """(what, where, fix) of each fault."""
    trace: str = ""
    """Traceback of an error that is not the user's."""
    is_echo: bool = False
    """Whether it only says that another rank is gone."""


def note_fault(folder: RunFolder, rank: int, error: Exception) -> None:
    """Write down the error that ended this rank."""
    if isinstance(error, MemtrainError):
        faults = tuple((one.what, one.where, one.fix) for one in error.faults)
        fault = RankFault(rank=rank, time=time.time(), kind=type(error).__name__, faults=faults)
    else:
        trace = sayable("".join(traceback.format_exception(error)))
        is_echo = any(word in trace for word in ECHOES)
        fault = RankFault(rank=rank, time=time.time(), kind="", trace=trace, is_echo=is_echo)
    folder.faults.mkdir(exist_ok=True)
    write_whole(folder.faults / f"rank-{rank}.json", fault.model_dump_json() + "\n")


def clear_faults(folder: RunFolder) -> None:
    """Forget how the processes before ended."""
    with suppress(OSError):
        for file in folder.faults.iterdir():
            if WORDS.fullmatch(file.name):
                file.unlink()
        folder.faults.rmdir()


def read_faults(folder: RunFolder) -> list[RankFault]:
    """Faults that the ranks left, the earliest first."""
    files = folder.faults.glob("rank-*.json")
    found = [RankFault.model_validate_json(file.read_text(), strict=False) for file in files]
    return sorted(found, key=lambda fault: fault.time)


def root_fault(folder: RunFolder, num_ranks: int) -> Exception | None:
    """The error that ended the run, naming its rank unless all ranks met it; None when no rank left word.

    A rank that only lost another one is not the cause. Where all are such, one without a word was killed.
    """
    found = read_faults(folder)
    causes = [fault for fault in found if not fault.is_echo]
    if not causes:
        return _silent(folder, found, num_ranks) if found else None
    first = causes[0]
    if not first.kind:
        return RuntimeError(f"rank {first.rank} of {num_ranks} failed:\n{first.trace}")
    is_of_all = first.rank < 0 or sum(fault.faults == first.faults for fault in causes) == num_ranks
    kind: type[MemtrainError] = getattr(memtrain.errors, first.kind)
    prefix = "" if is_of_all else f"rank {first.rank}: "
    return kind([Fault(prefix + what, where, fix) for what, where, fix in first.faults])


def correct_status(folder: RunFolder, error: Exception) -> None:
    """Write the error that ended the run into its folder: a rank that lost another may have written a
    consequence, and a killed rank that the run goes on."""
    status = folder.read_status()
    if status is None or isinstance(error, Interrupted):
        return
    what = error.faults[0].what if isinstance(error, MemtrainError) else str(error).splitlines()[0]
    state = RunState.FAILED if status.state is RunState.RUNNING else status.state
    record_end(folder, state, status.step, what)


def _silent(folder: RunFolder, found: list[RankFault], num_ranks: int) -> LaunchError:
    gone = sorted(set(range(num_ranks)) - {fault.rank for fault in found})
    named = f"rank {', '.join(map(str, gone))}" if gone else "the connection between the ranks"
    return LaunchError(
        f"{named} ended without an error message, and the other ranks lost the connection",
        where=str(folder.path),
        fix="look for a process that was killed (out of memory? `dmesg`), then run the same command again",
    )
