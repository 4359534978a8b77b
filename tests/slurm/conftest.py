"""A SLURM of four virtual nodes on this machine, and runs submitted to it through the real command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("cluster.sh")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch")
NODES = 4

RECIPE = """\
method: sft
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 1, head_dim: 32, tie_word_embeddings: true}
  tokenizer: builtin:tiny
data: {train: {source: builtin:arithmetic, limit: 100}}
length: {max_length: 128}
memory: {measure_peaks: false}
optim: {lr: 3e-3}
# A job of one core may be planned otherwise than this machine: pinned, for equal bits.
train: {batch_size: 16, micro_tokens: 1024, max_steps: 200}
save: {every_steps: 40}
cluster:
  device: cpu
  threads: 1
  slurm: {nodes: 2, time: 0:30:00}
"""


@dataclass(frozen=True)
class Submitted:
    """A run that was given to SLURM."""

    folder: Path
    job: str

    def show(self) -> dict[str, str]:
        """What SLURM says of the job."""
        words = said("scontrol", "show", "job", self.job, "--oneliner").split()
        return dict(word.partition("=")[::2] for word in words)

    @property
    def state(self) -> str:
        return self.show()["JobState"]

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "slurm").glob("*.log")))

    def until_step(self, step: int) -> None:
        self._until(lambda: len(steps(self.folder)) >= step, f"step {step}")

    def until_restarted(self, times: int = 1) -> None:
        self._until(lambda: f"restart {times} of" in self.log, f"restart {times}")

    def end(self, timeout_s: float = 240.0) -> dict[str, str]:
        """What SLURM says of the job when it is over."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self._until(lambda: self.state in over, "the end", timeout_s)
        return self.show()

    def _until(self, holds: Callable[[], bool], what: str, timeout_s: float = 180.0) -> None:
        until = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < until, f"waited in vain for {what}: {self.show()}\n{self.log}"
            time.sleep(0.2)


class Cluster:
    """Submits runs, below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(RECIPE)

    def memtrain(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "memtrain", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)

    def submit(self, name: str, *words: str) -> Submitted:
        run = self.folder / name
        done = self.memtrain("slurm", str(self.recipe), "--run-dir", str(run), "--submit", *words)
        assert done.returncode == 0, done.stderr
        job = done.stdout.partition("Submitted as job ")[2].partition(".")[0]
        return Submitted(run, job)


def said(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(folder: Path) -> list[dict[str, Any]]:
    """The step lines of a run's metrics, read without memtrain."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in events if event["kind"] == "step"]


def curve(folder: Path) -> list[tuple[Any, ...]]:
    """What must not move: step, loss, gradient norm, rate and tokens of every step."""
    return [
        tuple(line[name] for name in ("step", "loss", "grad_norm", "lr", "tokens")) for line in steps(folder)
    ]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} not installed" if missing else "its daemons need root"
        pytest.skip(f"SLURM cannot run here: {why}; `tests/slurm/cluster.sh install` as root, on Debian")
    daemons = tmp_path_factory.mktemp("daemons")
    before = dict(os.environ)
    subprocess.run([SCRIPT, "start", daemons, str(NODES)], check=True)
    os.environ |= {
        "SLURM_CONF": str(daemons / "slurm.conf"),
        "MEMTRAIN_CACHE": str(tmp_path_factory.mktemp("cache")),
        "OMP_NUM_THREADS": "1",
    }
    try:
        yield Cluster(tmp_path_factory.mktemp("runs"))
        subprocess.run(["scancel", "--user", "root"], check=False)
    finally:
        subprocess.run([SCRIPT, "stop", daemons], check=True)
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def whole(cluster: Cluster) -> Submitted:
    """The undisturbed run."""
    run = cluster.submit("whole")
    assert run.end()["JobState"] == "COMPLETED", run.log
    return run


@pytest.fixture(scope="session")
def curve_of() -> Callable[[Path], list[tuple[Any, ...]]]:
    return curve


@pytest.fixture(scope="session")
def ask() -> Callable[..., str]:
    return said
