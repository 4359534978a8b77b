"""Ranks of CPU runs as forks of this process, which has imported everything: seconds less for each run.

More ranks than cores may be asked for here: it is about numbers and memory, not about speed.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = """\
method: {method}
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: true}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 100}}, eval_fraction: 0.1}}
length: {{max_length: 128}}
optim: {{lr: 3e-3}}
train: {{batch_size: 16, max_steps: 4}}
save: {{every_steps: 1, keep: 9}}
cluster: {{device: cpu, threads: 1}}
"""
ONLINE = """\
generate: {{num_generations: {completions}, max_tokens: 8}}
rewards: {{functions: ["{rewards}:has_k"]}}
"""
COMPLETIONS = {"grpo": 4, "rloo": 4, "online_dpo": 4, "ppo": 1}
"""Of one prompt, of the methods that write them."""
METHODS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo", "ppo")
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "context parallel")
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Planned:
    """What the command said of a plan."""

    code: int
    said: str


@dataclass(frozen=True)
class Rank:
    """A rank of a run that has begun."""

    pid: int
    output: Path

    @property
    def said(self) -> str:
        """What it wrote."""
        return self.output.read_text()


def warm_up() -> None:
    """Import what every rank needs, before any is forked."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_USE_CPU": "true",
        "DS_ACCELERATOR": "cpu",
    }
    vars(os)["sched_getaffinity"] = lambda pid: set(range(8))
    import torch

    import memtrain.trainers.loop.worker

    torch.set_num_threads(1)
    assert memtrain.trainers.loop.worker is not None
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        print("deepspeed is not installed: its cells will say so")


def write_recipe(folder: Path, method: str) -> Path:
    """The recipe of a method."""
    rewards = folder / "rewards.py"
    rewards.write_text("def has_k(completion):\n    return float('k' in completion)\n")
    recipe = folder / f"{method}.yaml"
    text = RECIPE + (ONLINE if method in COMPLETIONS else "")
    recipe.write_text(text.format(method=method, rewards=rewards, completions=COMPLETIONS.get(method)))
    return recipe


def asked_for(engine: str, num_ranks: int) -> list[str]:
    """Overrides of the recipe."""
    if num_ranks == 1:
        return ["cluster.processes=1"]
    if engine == "context parallel":
        return [f"cluster.processes={num_ranks}", f"cluster.context_parallel={num_ranks}"]
    return [f"cluster.processes={num_ranks}", f"cluster.engine={engine}"]


def words(recipe: Path, method: str, run: Path, overrides: Sequence[str]) -> list[str]:
    """The command that trains."""
    return [method.replace("_", "-"), str(recipe), "--run-dir", str(run), *overrides]


def plan(recipe: Path, method: str, run: Path, overrides: Sequence[str]) -> Planned:
    """Plan a run, as `memtrain METHOD RECIPE --dry-run` does."""
    return planned(words(recipe, method, run, overrides))


def planned(command: Sequence[str]) -> Planned:
    """Plan what a command trains."""
    from memtrain.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([*command, "--dry-run"])
    return Planned(code, err.getvalue())


def start(run: Path, num_ranks: int, prepare: Callable[[int], None] | None = None) -> list[Rank]:
    """The workers of a planned run; each does `prepare` with its number first."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    return [_fork(run, number, num_ranks, port, prepare) for number in range(num_ranks)]


def write_into(output: Path) -> None:
    """Let what this process says go into a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # Files that own their descriptor close it when they are collected: a second call would lose its own.
    sys.stdout, sys.stderr = (os.fdopen(one, "w", closefd=False) for one in (1, 2))


def _fork(run: Path, number: int, num_ranks: int, port: int, prepare: Callable[[int], None] | None) -> Rank:
    output = run / f"rank-{number}.txt"
    pid = os.fork()
    if pid:
        return Rank(pid, output)
    code = 99
    try:
        os.setsid()
        write_into(output)
        from accelerate.state import AcceleratorState

        from memtrain.trainers.loop import worker
        from memtrain.trainers.run_folder.folder import RunFolder

        AcceleratorState._reset_state(True)
        if num_ranks > 1:
            given = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in given.items()})
            os.environ["MASTER_ADDR"] = "127.0.0.1"
        sys.argv = ["worker", str(run / "plan.json")]
        tell = worker._report_fault

        def reported(folder: RunFolder, rank: int, error: Exception) -> int:
            traceback.print_exception(error)
            return tell(folder, rank, error)

        # Under a launcher a rank leaves its error in the run folder; here it stands in its output too.
        worker._report_fault = reported
        if prepare is not None:
            prepare(number)
        code = worker.main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(ranks: Sequence[Rank], timeout_s: float = TIMEOUT_S) -> list[int]:
    """Their exit codes; those that are over time are killed, and say 124."""
    until = time.monotonic() + timeout_s
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        for rank in ranks:
            if rank.pid in codes:
                continue
            ended, status = os.waitpid(rank.pid, os.WNOHANG)
            if ended:
                codes[rank.pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(rank.pid, signal.SIGKILL)
                os.waitpid(rank.pid, 0)
                codes[rank.pid] = 124
        time.sleep(0.005)
    return [codes[rank.pid] for rank in ranks]


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of one kind of a run's metrics, whole ones."""
    path = run / "metrics.jsonl"
    reported = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in reported if line.endswith("\n")]
    return [line for line in found if line["kind"] == kind]


def curve(run: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    return [(line["loss"], line["grad_norm"]) for line in lines(run, "step")]
