"""Runs through the real command line: in this process, or in a fork of it, which saves the imports."""

from __future__ import annotations

import faulthandler
import gc
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RECIPE = """\
method: sft
model:
  config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, tie_word_embeddings: true}
  tokenizer: builtin:tiny
data:
  train: {source: builtin:arithmetic, limit: 100}
  eval_fraction: 0.1
length: {max_length: 128}
memory: {measure_peaks: false}
optim: {lr: 3e-3}
train: {batch_size: 8, max_steps: 6}
cluster: {device: cpu, processes: 1, threads: 1}
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Forked:
    """A command in a process of its own."""

    pid: int
    output: Path

    def wait(self, timeout_s: float = 250.0) -> int:
        """Its exit code, or minus the signal that ended it."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"still running after {timeout_s} s:\n{self.said}")

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def said(self) -> str:
        return self.output.read_text()


class Runs:
    """The command line of a test: one recipe, and run folders below one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE)
        self._num_forked = 0

    def arguments(self, name: str, *overrides: str, verb: str = "sft", recipe: str = "") -> list[str]:
        return [verb, recipe or str(self.recipe), "--run-dir", str(self.folder / name), *overrides]

    def run(self, name: str, *overrides: str, verb: str = "sft", recipe: str = "") -> Ended:
        """Train in this process into the run folder `name`."""
        from memtrain.__main__ import main

        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(self.arguments(name, *overrides, verb=verb, recipe=recipe))
        return Ended(code, out.getvalue(), err.getvalue())

    def done(self, name: str, *overrides: str, verb: str = "sft", recipe: str = "") -> Path:
        """Train to the end; the run folder."""
        ended = self.run(name, *overrides, verb=verb, recipe=recipe)
        assert ended.code == 0, ended.err
        return self.folder / name

    def fork(self, name: str, *overrides: str) -> Forked:
        """Begin to train in a fork of this process."""
        from memtrain.__main__ import main

        arguments = self.arguments(name, *overrides)
        return self._fork(lambda: main(arguments))

    def fork_ranks(
        self,
        name: str,
        num_ranks: int,
        *overrides: str,
        num_started: int | None = None,
        verb: str = "sft",
        recipe: str = "",
    ) -> list[Forked]:
        """Plan here, then begin the ranks as a launcher would, each in a fork of this process.

        `num_started` begins fewer, which is all that they are asked for.
        """
        from memtrain.trainers.loop import worker

        said = (f"cluster.processes={num_ranks}", "--dry-run", *overrides)
        planned = self.run(name, *said, verb=verb, recipe=recipe)
        assert planned.code == 0, planned.err
        plan = self.folder / name / "plan.json"
        port, world = free_port(), num_started or num_ranks

        def rank(number: int) -> Callable[[], int]:
            def begin() -> int:
                from accelerate.state import AcceleratorState

                AcceleratorState._reset_state(True)
                given = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world, "MASTER_PORT": port}
                os.environ.update({key: str(value) for key, value in given.items()})
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
                sys.argv = ["worker", str(plan)]
                return worker.main()

            return begin

        return [self._fork(rank(number)) for number in range(world)]

    def _fork(self, act: Callable[[], int]) -> Forked:
        self._num_forked += 1
        output = self.folder / f"output-{self._num_forked}.txt"
        pid = os.fork()
        if pid:
            return Forked(pid, output)
        code = 99
        try:
            os.setsid()
            faulthandler.dump_traceback_later(240, exit=True, file=2)
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            # Tensors that earlier runs of this process left are not this run's, and are not counted.
            gc.collect()
            gc.freeze()
            code = act()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind of a run's metrics, read without memtrain."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in whole if line["kind"] == kind]


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """What must not move: step, loss, gradient norm, rate, tokens and loss tokens of every step."""
    names = ("step", "loss", "grad_norm", "lr", "tokens", "loss_tokens")
    return [tuple(line[name] for name in names) for line in events(folder, "step")]


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Everything that a run imports, imported once; tokenized rows kept for the session."""
    before = dict(os.environ)
    os.environ["MEMTRAIN_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    import memtrain.trainers.loop.worker  # noqa: F401
    import memtrain.trainers.methods.sft  # noqa: F401

    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def runs(warm: None, tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture(scope="module")
def shared_runs(warm: None, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that the tests of one file look at together, and do not change."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def metrics() -> Callable[[Path, str], Sequence[dict[str, Any]]]:
    """`metrics(folder, kind)`: the lines of one kind."""
    return events


@pytest.fixture(scope="session")
def curve_of() -> Callable[[Path], list[tuple[Any, ...]]]:
    """`curve_of(folder)`: what must not move of every step."""
    return curve
