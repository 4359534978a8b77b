"""The agent that starts the processes of a run: stopped with care, and explained when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

import psutil

from memtrain.errors import Interrupted, LaunchError
from memtrain.trainers.loop.rank_failures import LAUNCHED, clear_faults, correct_status, root_fault
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.runtime.signals import ASKED

AGENT_SPEAKS = "torch/distributed/elastic/"
"""In the line with which the agent begins to tell that a process failed: from there on nobody else speaks."""


def run_agent(
    words: Sequence[str], environment: Mapping[str, str], folder: RunFolder, num_ranks: int
) -> None:
    """Run the agent's command to its end.

    Signals that ask to stop are passed on to the ranks and not to the agent, which would kill them after 30 s
    whether they have saved or not.

    Raises: the error of the rank that failed first, with its own kind and exit code; LaunchError when no rank
    left word; RuntimeError for an error that is not the user's.
    """
    clear_faults(folder)
    given = os.environ | environment | {LAUNCHED: "1"}
    process = subprocess.Popen(words, env=given, start_new_session=True, stderr=subprocess.PIPE, text=True)
    asked: list[int] = []
    before = {one: signal.signal(one, _pass_on(process, asked)) for one in ASKED}
    assert process.stderr is not None, "The agent was given a pipe."
    listener = _Listener(process.stderr)
    listener.start()
    try:
        code = process.wait()
        listener.join()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if code:
        raise _fault(folder, num_ranks, code, is_asked=bool(asked), said="".join(listener.held))


class _Listener(threading.Thread):
    """Passes the processes' stderr on, and holds back what the agent says of their end."""

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self.held: list[str] = []

    def run(self) -> None:
        for line in self.stream:
            if self.held or AGENT_SPEAKS in line:
                self.held.append(line)
            else:
                sys.stderr.write(line)
                sys.stderr.flush()


def _pass_on(process: subprocess.Popen[str], asked: list[int]):
    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        ranks = psutil.Process(process.pid).children() if process.poll() is None else []
        for one in ranks or ([psutil.Process(process.pid)] if process.poll() is None else []):
            one.send_signal(number)

    return pass_on


def _fault(folder: RunFolder, num_ranks: int, code: int, *, is_asked: bool, said: str) -> Exception:
    """What ended the processes, told in the run folder too; the agent's own words only where no rank has
    any."""
    error = root_fault(folder, num_ranks)
    if error is None and is_asked:
        return Interrupted(
            "stopped before a step was made",
            str(folder.path),
            "run the same command again to go on from here",
        )
    if error is None:
        sys.stderr.write(said)
        error = LaunchError(
            f"the processes ended with code {code} and left no word",
            str(folder.path),
            "the launcher's own words are above",
        )
    correct_status(folder, error)
    return error
