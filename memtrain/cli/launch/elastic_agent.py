"""The agent that starts the processes of a run: stopped with care, watched, and explained when it fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import IO

import psutil

from memtrain.cli.launch.hang import LOOK_S, HangWatch
from memtrain.errors import Interrupted, LaunchError, printable
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.lock import ticks_of
from memtrain.trainers.run_folder.progress import write_log
from memtrain.trainers.run_folder.pulse import WATCHED
from memtrain.trainers.run_folder.rank_failures import LAUNCHED, clear_faults, correct_status, root_fault
from memtrain.trainers.runtime.launcher_words import drop_launcher_words
from memtrain.trainers.runtime.signals import HUNG_UP, asking, is_hung_up

AGENT_SPEAKS = "torch/distributed/elastic/"
"""In the line with which the agent begins to tell that a process failed: from there on nobody else speaks."""

LONGEST_LINE = 2**16
"""Characters of stderr that are passed on at once, where no line ends before."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")

LAST_WORDS_S = 5.0
"""Time to read the last output of ended processes. A grandchild that lives on may keep the pipe
open for ever."""


def run_agent(
    words: Sequence[str], environment: Mapping[str, str], folder: RunFolder, num_ranks: int, grace_s: float
) -> None:
    """Run the agent's command to its end.

    Signals that ask to stop are passed on to the ranks and not to the agent, which would kill them after 30 s
    whether they have saved or not. A second SIGINT kills them at once; so does silence of all ranks for
    `grace_s` after they were asked. Ranks whose agent was killed are asked to stop.

    Raises: the error of the rank that failed first, with its own kind and exit code; LaunchError when no rank
    left word, or they hang; RuntimeError for an error that is not the user's.
    """
    clear_faults(folder)
    began = time.time()
    drop_launcher_words(os.environ)
    given = os.environ | environment | {LAUNCHED: "1", WATCHED: "1"}
    process = subprocess.Popen(
        words, env=given, start_new_session=True, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    asked = _Asked(process)
    before = {one: signal.signal(one, asked.pass_on) for one in asking()}
    assert process.stderr is not None, "The agent was given a pipe."
    listener = _Listener(process.stderr)
    listener.start()
    watch = HangWatch(folder, num_ranks, grace_s)
    try:
        code = _wait(process, asked, watch, folder)
        listener.join(LAST_WORDS_S)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if asked.wants_no_more:
        raise KeyboardInterrupt
    if code:
        is_early = bool(asked.signals) and not _has_begun(folder, began)
        raise watch.hung or _fault(folder, num_ranks, code, is_early=is_early, output=listener.output)
    clear_faults(folder)
    status = folder.read_status()
    if status is None or status.state is not RunState.DONE:
        error = LaunchError(
            "the processes ended with exit code 0 before the run was over",
            str(folder.path),
            "look for code of a reward, an environment or a metric that ends its process (os._exit); the "
            "same command resumes from the last checkpoint",
        )
        correct_status(folder, error)
        raise error


def _has_begun(folder: RunFolder, since: float) -> bool:
    """Whether a rank has said, since then, that the run runs."""
    status = folder.read_status()
    return status is not None and status.time >= since


class _Asked:
    """The signals that asked this launcher to stop, passed on to the ranks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._ranks: dict[int, int] = {}
        """Every rank that was seen, with the ticks at which it started: known when the agent is gone, too."""
        self.signals: list[int] = []

    @property
    def wants_no_more(self) -> bool:
        """Whether Ctrl-C came a second time."""
        return self.signals.count(signal.SIGINT) > 1

    @property
    def living(self) -> list[int]:
        """The ranks that still run."""
        return [pid for pid, ticks in self._ranks.items() if ticks_of(pid) == ticks]

    def look(self) -> None:
        """See which ranks there are."""
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self._process.pid).children():
                ticks = ticks_of(one.pid)
                if ticks is not None:
                    self._ranks.setdefault(one.pid, ticks)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Take a signal, as a handler."""
        self.signals.append(number)
        self.look()
        if not self.send(number) and self._process.poll() is None:
            self._process.send_signal(number)

    def send(self, number: int) -> bool:
        """Send a signal to every rank; whether there is one."""
        living = self.living
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(living)


def _wait(process: subprocess.Popen[str], asked: _Asked, watch: HangWatch, folder: RunFolder) -> int:
    """The agent's exit code, when no rank is left either."""
    is_told = False
    while True:
        try:
            code = process.wait(LOOK_S)
            break
        except subprocess.TimeoutExpired:
            asked.look()
            if is_hung_up() and not is_told:
                is_told = True
                with suppress(OSError):
                    write_log(folder.log, HUNG_UP.format(pid=os.getpid()))
            if asked.wants_no_more or watch.is_hung(is_asked=bool(asked.signals)):
                asked.send(signal.SIGKILL)
                process.kill()
    # An agent that was killed leaves its ranks: they save and stop.
    is_reported = code < 0 and asked.send(signal.SIGTERM)
    while is_reported and asked.living:
        time.sleep(LOOK_S)
        if asked.wants_no_more or watch.is_hung(is_asked=True):
            asked.send(signal.SIGKILL)
    return code


def plain_line(text: str) -> str:
    """Output of a rank or of one of its libraries, without colours; overwritten progress goes on separate
    lines."""
    return printable(COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))


class _Listener(threading.Thread):
    """Passes the processes' stderr on, and holds back the agent's text on their end.

    It reads on whatever happens: ranks whose pipe is full wait for ever.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self._held: list[str] = []

    @property
    def output(self) -> str:
        """Text that the agent wrote."""
        return "".join(self._held)

    def run(self) -> None:
        while line := self.stream.readline(LONGEST_LINE):
            if self._held or AGENT_SPEAKS in line:
                self._held.append(line)
                continue
            # Who should read it may be gone, or its terminal know other letters only.
            with suppress(OSError, ValueError):
                sys.stderr.write(plain_line(line))
                sys.stderr.flush()


def _fault(folder: RunFolder, num_ranks: int, code: int, *, is_early: bool, output: str) -> Exception:
    """The error that ended the processes, recorded in the run folder too; the agent's own words only where no
    rank left any."""
    error = root_fault(folder, num_ranks)
    if error is None and is_early:
        return Interrupted(
            "stopped before the first step",
            str(folder.path),
            "run the same command again to resume from here",
        )
    if error is None:
        sys.stderr.write(plain_line(output))
        error = LaunchError(
            f"the processes ended with exit code {code} and no error message",
            str(folder.path),
            "the launcher's messages above" if output else "look for a process that was killed",
        )
    correct_status(folder, error)
    return error
