"""The supervisor: one process with the device works the ladder down; what hangs or dies ends alone.

It loads neither torch nor memtrain's trainers, so that nothing of the device is held here. A stage that goes
past its limit, or takes the process with it, is a result too; the next one begins in a new process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from first_light import results
from first_light.ladder import Stage

MARGIN_S = 12.0
"""Kept of the whole limit for the summary and the end of the processes."""
WORTH_S = 5.0
"""No stage is begun with less time than that."""
LEFT_BYTES = 256 * 2**20
"""Memory that a stage may leave behind on the device; with more, the next one gets a new process."""

Traces = Callable[[str, str], None]
"""Takes the name of a stage and the path of its trace job."""


@dataclass(slots=True)
class Worker:
    """The process with the device, and the pipe to it."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    _rest: bytes = b""
    _variables: Mapping[str, str] = field(default_factory=dict[str, str])

    def ask(
        self, question: Mapping[str, Any], limit_s: float, variables: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """The answer; or a `fault` that says how the process ended, which is then ended for good.

        variables: of the environment, beside those of all; a process that was started with others ends.
        """
        process = self._running(variables or {})
        assert process.stdin is not None, "The pipe was asked for."
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return self._ended()
        deadline = time.monotonic() + limit_s
        while (line := self._line(deadline)) is None:
            if time.monotonic() >= deadline:
                self.end()
                return {"fault": f"not done after {limit_s:.0f} s", "is_late": True}
            return self._ended()
        return json.loads(line)

    def end(self) -> None:
        """End the process and all that it started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process, self._rest = None, b""

    def _running(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if variables != self._variables:
            self.end()
        if self.process is None:
            self._variables = variables
            with self.log.open("ab") as log:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**self.environment, **variables},
                    start_new_session=True,
                )
        return self.process

    def _line(self, deadline: float) -> bytes | None:
        """The next line; None when there is none before the deadline, or the process has ended."""
        assert self.process is not None, "It runs."
        assert self.process.stdout is not None, "The pipe was asked for."
        while b"\n" not in self._rest:
            wait = deadline - time.monotonic()
            if wait <= 0 or not select.select([self.process.stdout], [], [], wait)[0]:
                return None
            read = os.read(self.process.stdout.fileno(), 1 << 16)
            if not read:
                return None
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _ended(self) -> dict[str, Any]:
        process = self.process
        assert process is not None, "It ran."
        code = process.wait()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        self.end()
        last = lines[-1][:300] if lines else "it said nothing"
        return {"fault": f"the process ended with code {code}: {last}"}


@dataclass(slots=True)
class Run:
    """One call of the ladder."""

    out: Path
    worker: Worker
    limit_s: float
    traces: Traces = lambda name, job: None
    say: Callable[[str], None] = print
    started: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds of the limit that stages may still use."""
        return self.limit_s - MARGIN_S - (time.monotonic() - self.started)

    def down(self, wanted: Sequence[Stage], where: Mapping[str, Any]) -> list[Stage]:
        """Make what has no result yet until the time is over, then once more what had a fault in a call
        before this one; the stages that are left."""
        results.mend(self.out)
        known = results.read(self.out)
        done, faulted = results.by_stage(known), results.to_make_again(known)
        todo = [stage for stage in wanted if stage.name not in done]
        todo += [stage for stage in wanted if stage.name in faulted]
        for number, stage in enumerate(todo):
            if self.left_s < WORTH_S or not self._make(stage, where):
                self.worker.end()
                return todo[number:]
        self.worker.end()
        return []

    def _make(self, stage: Stage, where: Mapping[str, Any]) -> bool:
        """Make one stage; False when the time of the call ended it, and not its own limit."""
        begun = time.monotonic()
        limit = min(stage.limit_s, self.left_s)
        question = {"stage": stage.name, "run": stage.run, "given": dict(stage.given)}
        answer = self.worker.ask(question, limit, stage.environment)
        took = time.monotonic() - begun
        if answer.pop("is_late", False) and limit < stage.limit_s:
            self.say(f"{stage.name}: cut off after {took:.0f} s, for the time of this call is over")
            return False
        left = answer.pop("left_bytes", 0)
        if left > LEFT_BYTES or answer.pop("is_spoilt", False):
            self.worker.end()
        record = {"stage": stage.name, "seconds": round(took, 2), **answer, "where": dict(where)}
        results.append(self.out, record)
        self.say(f"{stage.name}: {words_of(answer)} ({took:.0f} s)")
        if answer.get("trace_job"):
            self.traces(stage.name, answer["trace_job"])
        return True


def words_of(answer: Mapping[str, Any]) -> str:
    """A result in a few words, for the screen."""
    for key in ("fault", "refused", "skipped"):
        if key in answer:
            return f"{key}: {str(answer[key])[:200]}"
    return str(answer.get("words") or "done")


def worker_command(work: Path, words: Sequence[str] = ()) -> list[str]:
    """The process that works the stages."""
    return [sys.executable, "-m", "first_light.worker", str(work), *words]
