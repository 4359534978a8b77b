"""Moments at which a process of a run is killed: at a time, or as it enters or leaves a function."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import warm_ranks as warm

OTHERS_S = 3.0
"""Time that the other ranks have to end by themselves; then they are killed, as a launcher does."""

PLACES = {
    "taking the folder": ("memtrain.trainers.checkpoints.checkpoint", "mend_checkpoints", 1),
    "trying the final save": ("memtrain.trainers.loop.worker", "try_final", 1),
    "naming a checkpoint": ("memtrain.trainers.checkpoints.checkpoint", "_finish", 1),
    "removing old checkpoints": ("memtrain.trainers.checkpoints.checkpoint", "_prune", 1),
    "writing the final model": ("memtrain.trainers.loop.finish", "save_final", 1),
    "naming the final model": ("memtrain.trainers.model.loading.save", "_refuse_empty", 2),
    "writing the card": ("memtrain.trainers.loop.finish", "write_card", 1),
    "listing the final model": ("memtrain.trainers.loop.finish", "note_final", 1),
    "writing the report": ("memtrain.trainers.run_folder.report.final_status", "write_report", 1),
    "saying that it is done": ("memtrain.trainers.loop.exit_status", "record_end", 1),
}
"""Moment: module, function, and which of its calls in a process is the last one. `_refuse_empty` is entered
when all files of the model are written and none has its name; first by the save that is tried."""

FINAL = tuple(list(PLACES)[4:8])
"""Those during the final save."""

PLANNING = {
    "keeping the rows": ("memtrain.trainers.data.store.cache", "sync_folder", 1),
    "planning": ("memtrain.cli.plan.make_plan", "make_plan", 1),
    "writing the launch files": ("memtrain.cli.launch.local", "write_files", 1),
}
"""Those of the command before it starts a rank. `sync_folder` is entered when all files of the tokenized
rows are written and their folder has no name."""

BY_TIME = ("any time", "all ranks at once")
BEFORE, BETWEEN, LATER = LAUNCHERS = (
    "before the ranks",
    "between the launcher and the ranks",
    "launcher while ranks start or run",
)
"""Those of the launcher: its ranks are not there, or are there and do not have the folder, or work."""

MOMENTS = (*PLANNING, BEFORE, BETWEEN, *list(PLACES)[:2], *BY_TIME, LATER, *list(PLACES)[2:])
"""In the order in which a run comes to them. Kills of one run keep to it, so that it lives to see
many."""


@dataclass(frozen=True)
class Kill:
    """One kill that was made."""

    moment: str
    after_s: float
    """Since the processes began."""


def killed_ranks(
    run: Path, num_ranks: int, moment: str, draws: random.Random, longest_s: float
) -> Kill | None:
    """Begin or go on, and kill; None when the run had ended before."""
    began = time.monotonic()
    if moment in PLACES:
        ranks = warm.start(run, num_ranks, prepare=_dying(moment, is_before=draws.random() < 0.5))
        codes = _wait_for(ranks, ranks[0].pid)
    else:
        ranks = warm.start(run, num_ranks)
        time.sleep(draws.uniform(0.0, longest_s))
        victims = ranks if moment == "all ranks at once" else [draws.choice(ranks)]
        for one in victims:
            os.kill(one.pid, signal.SIGKILL)
        codes = warm.wait(ranks, timeout_s=OTHERS_S)
    return Kill(moment, round(time.monotonic() - began, 2)) if -signal.SIGKILL in codes else None


def _dying(moment: str, *, is_before: bool) -> Callable[[int], None]:
    """Makes the main rank kill itself at a place."""

    def prepare(rank: int) -> None:
        if not rank:
            _die_at(PLACES[moment], is_before=is_before)

    return prepare


def _die_at(place: tuple[str, str, int], *, is_before: bool) -> None:
    """Let this process kill itself as it enters or leaves a function."""
    module_name, name, nth = place
    module = import_module(module_name)
    plain, calls = getattr(module, name), iter(range(1, 10**6))

    @wraps(plain)
    def dies(*given: Any, **named: Any) -> Any:
        if next(calls) < nth:
            return plain(*given, **named)
        made = None if is_before else plain(*given, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        return made

    setattr(module, name, dies)


def _wait_for(ranks: Sequence[warm.Rank], main: int) -> list[int]:
    """Exit codes: the main rank's when it ends, the others' when they end or their time is up."""
    until = time.monotonic() + warm.TIMEOUT_S
    while time.monotonic() < until:
        if os.waitid(os.P_PID, main, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return warm.wait(ranks, timeout_s=OTHERS_S)
        time.sleep(0.01)
    return warm.wait(ranks, timeout_s=0.0)


def killed_launcher(
    words: Sequence[str], run: Path, num_ranks: int, moment: str, draws: random.Random, longest_s: float
) -> Kill | None:
    """Begin or go on by the command itself, and kill it: before it starts its ranks, or while they work.

    Ranks that lost it must stop by themselves; None when the run had ended before.
    """
    dies_at = PLANNING.get(moment)
    lives_s = draws.uniform(0.0, longest_s) if moment == LATER else 0.0 if moment == BETWEEN else None
    is_before = draws.random() < 0.5
    began = time.monotonic()

    def before() -> None:
        if dies_at is not None:
            _die_at(dies_at, is_before=is_before)

    code = _launched(words, run, num_ranks, before, lives_s)
    return Kill(moment, round(time.monotonic() - began, 2)) if code == -signal.SIGKILL else None


def launched(words: Sequence[str], run: Path, num_ranks: int) -> int:
    """Exit code of the command, which begins or goes on, and ends the run."""
    return _launched(words, run, num_ranks, lambda: None, math.inf)


def said_by_launcher(run: Path) -> str:
    """Last words of the command."""
    return _output_of(run).read_text()[-400:]


def _output_of(run: Path) -> Path:
    return run.with_name(f"{run.name}.launcher.txt")


def _launched(
    words: Sequence[str], run: Path, num_ranks: int, before: Callable[[], None], lives_s: float | None
) -> int:
    """Exit code of the command, when no rank of it is left either."""
    pid = os.fork()
    if not pid:
        _launch(words, run, num_ranks, before, lives_s)
    status = os.waitpid(pid, 0)[1]
    _wait_for_orphans()
    return os.waitstatus_to_exitcode(status)


def _launch(
    words: Sequence[str], run: Path, num_ranks: int, before: Callable[[], None], lives_s: float | None
) -> None:
    """Be the launcher; ranks are forks of this process in place of accelerate's. Never returns.

    `lives_s`: its time with its ranks; None where it has none, infinite where it waits for their end.
    """
    code = 99
    try:
        os.setsid()
        warm.write_into(_output_of(run))
        from memtrain.__main__ import main
        from memtrain.cli.launch import elastic_agent
        from memtrain.trainers.run_folder.folder import RunFolder
        from memtrain.trainers.run_folder.rank_failures import root_fault

        def run_agent(command: Sequence[str], environment: dict[str, str], *given: Any) -> None:
            if lives_s is not None:
                os.environ.update(environment | {"MEMTRAIN_LAUNCHED": "1"})
                ranks = warm.start(run, num_ranks)
                if lives_s == math.inf:
                    codes = warm.wait(ranks)
                    if any(codes):
                        raise SystemExit(f"exit codes {codes}: {root_fault(RunFolder(run), num_ranks)}")
                    return
                time.sleep(lives_s)
            os.kill(os.getpid(), signal.SIGKILL)

        elastic_agent.run_agent = run_agent
        before()
        code = main(list(words))
    except SystemExit as error:
        print(error)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait_for_orphans() -> None:
    """Until no child is left: this process takes the ranks in whose launcher is gone (`adopt_orphans`)."""
    until = time.monotonic() + warm.TIMEOUT_S
    while time.monotonic() < until:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            time.sleep(0.02)
    raise SystemExit("ranks whose launcher was killed did not stop")


def adopt_orphans() -> None:
    """Let grandchildren become children of this process when their parent ends (Linux)."""
    import ctypes

    subreaper = 36
    ctypes.CDLL(None, use_errno=True).prctl(subreaper, 1, 0, 0, 0)
