"""A process with the vLLM engine: started, asked, watched for progress, and ended with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # They bring torch, which a process needs none of to be started and asked.
    from memtrain.trainers.online.vllm.weight_sync import Bucket, Transport

WORKER = Path(__file__).with_name("worker.py")

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of a process that asks nothing of the network: the model's configuration is in the run
folder."""

OWN_VARIABLES = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Of the trainer alone: its packages are not the worker's, nor is its process group. Memory that vLLM gives
back while it sleeps cannot lie in expandable segments (pytorch#147851)."""

OWN_PREFIX = "TORCHELASTIC_"
"""Variables of the launcher of several processes. TORCHELASTIC_USE_AGENT_STORE makes torch look for the
trainer's store at the address of vLLM's own process group, for ten minutes (pytorch#192113)."""

ENDING_S = 5.0
"""Time for a process whose connection has ended to end itself."""

MOST_FRAME_BYTES = 2**30
"""Bytes of one frame: the completions of one group are a few MiB. Taste."""

Frame = dict[str, Any]


class Faulty(Exception):
    """The process died, said nothing for too long, or said that it failed. It is of no use any more."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Start of the process."""

    python: str
    """The interpreter: one with vLLM."""
    engine: Mapping[str, Any]
    """Arguments of `vllm.LLM`."""
    log: Path
    """Takes the engine's output."""
    deadline_s: float
    """Silence after which it counts as hung."""
    start_deadline_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


class Process:
    """An engine process, ready."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        ours, theirs = socket.socketpair()
        with launch.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [launch.python, str(WORKER), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_of({**ENVIRONMENT, **launch.environment}),
                start_new_session=True,
            )
        theirs.close()
        self.socket = ours
        self.is_alive = True
        try:
            self.send({"engine": dict(launch.engine)})
            self.about = self.expect("ready", launch.start_deadline_s)
        except Faulty:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process, which leads a group of its own."""
        return self.popen.pid

    def sync(self, buckets: Iterable[Bucket], transport: Transport, version: int, *, is_cpu: bool) -> None:
        """Send all weights, a bucket whenever one is wanted.

        Raises: Faulty; then some weights are new and some old, and the process must not be asked again.
        """
        self.send({"op": "sync", "version": version, "is_cpu": is_cpu, "handle": transport.handle})
        for bucket in buckets:
            self.expect("want")
            self.send({"op": "bucket", **transport.put(bucket)})
        self.expect("want")
        self.send({"op": "end"})
        self.expect("ok")

    def ask(self, frame: Frame) -> None:
        """Have something done. Raises: Faulty."""
        self.send(frame)
        self.expect("ok")

    def expect(self, event: str, deadline_s: float | None = None) -> Frame:
        """The next frame, which must be `event`. Raises: Faulty."""
        frame = self.receive(deadline_s)
        if frame["ev"] != event:
            raise Faulty(f"{frame['ev']} came in place of {event}")
        return frame

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises: Faulty."""
        data = json.dumps(frame).encode()
        try:
            self.socket.settimeout(self.launch.deadline_s)
            self.socket.sendall(struct.pack("<I", len(data)) + data)
        except OSError as error:
            raise Faulty(f"it accepts no more requests ({error}){self._last_words()}") from None

    def receive(self, deadline_s: float | None = None) -> Frame:
        """The next frame. Raises: Faulty, also where the frame says that something failed."""
        until = time.monotonic() + (deadline_s if deadline_s is not None else self.launch.deadline_s)
        size = struct.unpack("<I", self._take(4, until))[0]
        if size > MOST_FRAME_BYTES:
            raise Faulty(f"a frame of {size:,} bytes came")
        try:
            frame = json.loads(self._take(size, until))
        except (ValueError, RecursionError):
            raise Faulty("a frame came that is not JSON") from None
        if not isinstance(frame, dict) or not isinstance(frame.get("ev"), str):
            raise Faulty("a frame came that says no event")
        if frame["ev"] == "error":
            raise Faulty(str(frame.get("text")))
        return frame

    def kill(self) -> None:
        """End the process and whatever it started, at once."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.socket.close()
        # The whole group may have ended by itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def _take(self, count: int, until: float) -> bytes:
        parts: list[bytes] = []
        while count:
            left = until - time.monotonic()
            if left <= 0 or not _is_readable(self.socket, left):
                raise Faulty("no answer before the deadline")
            try:
                part = self.socket.recv(count)
            except OSError as error:
                raise Faulty(f"the connection broke: {error}") from None
            if not part:
                raise Faulty(f"it died{self._ending()}")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _ending(self) -> str:
        """The signal that ended the process, or its last line."""
        try:
            code = self.popen.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            code = 0  # The process closed its connection and goes on.
        return f" by {signal.Signals(-code).name}" if code < 0 else self._last_words()

    def _last_words(self) -> str:
        """End of the process's log."""
        lines = self.launch.log.read_text(errors="replace").strip().splitlines()
        return f"; last line of its log: {lines[-1].strip()}" if lines else ""


def environment_of(given: Mapping[str, str]) -> dict[str, str]:
    """Environment of an engine's process: the trainer's variables except its own, and those `given`."""
    is_own = lambda name: name in OWN_VARIABLES or name.startswith(OWN_PREFIX)  # noqa: E731
    return {name: value for name, value in os.environ.items() if not is_own(name)} | dict(given)


def _is_readable(connection: socket.socket, seconds: float) -> bool:
    """Whether something can be read within the time. By poll: `select` ends at 1,024 open files."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
