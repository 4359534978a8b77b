"""Method x engine x ranks on a CPU: losses against one process, peak of each rank, and going on after a kill.

`python benchmarks/many_ranks.py -o benchmarks/results/many_ranks.json [--only sft,dpo] [--ranks 2]`. Ranks
are started one process each, without accelerate's agent. What cannot run here is in the table with the
reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPE = """\
method: {method}
model:
  config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, tie_word_embeddings: true}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 100}}, held_out: 0.1}}
length: {{max_length: 128}}
optim: {{lr: 3e-3}}
train: {{batch_rows: 16, max_steps: 4}}
save: {{every_steps: 1, keep: 9}}
cluster: {{device: cpu, threads: 1}}
"""
ONLINE = """\
generate: {{completions: 4, max_tokens: 8}}
rewards: {{functions: ["{rewards}:has_k"]}}
"""
METHODS = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
TIMEOUT_S = 600


def command(recipe: Path, method: str, run: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "memtrain", method, str(recipe), "--run-dir", str(run), *overrides]


def start_ranks(run: Path, num_ranks: int) -> list[subprocess.Popen[str]]:
    """The workers of a planned run, as a launcher starts them."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    shared = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, "-m", "memtrain.trainers.worker", str(run / "plan.json")]
    given = os.environ | shared | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            words,
            env=given | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def wait_all(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """What each said on stderr; the others are ended where one is over time."""
    said = []
    try:
        said = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    return said


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    told = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in told if line.endswith("}")]
    return [line for line in found if line["kind"] == kind]


def curve(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in lines(run, "step")]


def furthest(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """Largest relative difference of a loss or a norm."""
    assert len(found) == len(expected), "Both made as many steps."
    pairs = [
        (a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
    ]
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def measured(recipe: Path, method: str, engine: str, num_ranks: int, folder: Path) -> dict[str, Any]:
    """One cell of the table, without what is compared with one process."""
    run = folder / f"{method}-{engine}-{num_ranks}"
    asked = [f"cluster.processes={num_ranks}"] + ([f"cluster.engine={engine}"] if num_ranks > 1 else [])
    planned = subprocess.run(
        command(recipe, method, run, *asked, "--dry-run"), capture_output=True, text=True, check=False
    )
    if planned.returncode:
        return {"refused": planned.stderr.splitlines()[0].removeprefix("error: ")}
    started = time.monotonic()
    ranks = start_ranks(run, num_ranks)
    said = wait_all(ranks)
    if any(rank.returncode for rank in ranks):
        return {"failed": [text[-400:] for text in said]}
    peaks = {event["phase"]: event["allocated"] for event in lines(run, "memory")}
    plan = json.loads((run / "plan.json").read_text())
    predicted = {phase["phase"]: phase["num_bytes"] for phase in plan["prediction"]["phases"]}
    cell = {
        "curve": curve(run),
        "wall_s": round(time.monotonic() - started, 1),
        "peak_bytes_of_the_largest_rank": peaks.get("steady step"),
        "predicted_bytes": predicted["steady step"],
    }
    return cell | {"resume": resumed(recipe, method, asked, num_ranks, run)}


def resumed(recipe: Path, method: str, asked: list[str], num_ranks: int, whole: Path) -> str:
    """Kill the last rank after the second step, go on, and compare every bit of the curve."""
    run = whole.with_name(whole.name + "-killed")
    subprocess.run(command(recipe, method, run, *asked, "--dry-run"), capture_output=True, check=True)
    ranks = start_ranks(run, num_ranks)
    until = time.monotonic() + TIMEOUT_S
    while len(lines(run, "step")) < 2 and time.monotonic() < until and ranks[-1].poll() is None:
        time.sleep(0.005)
    ranks[-1].send_signal(signal.SIGKILL)
    wait_all(ranks)
    again = start_ranks(run, num_ranks)
    said = wait_all(again)
    if any(rank.returncode for rank in again):
        return "failed: " + " | ".join(text[-200:] for text in said)
    return (
        "same bits" if curve(run) == curve(whole) else f"differs by {furthest(curve(run), curve(whole)):.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", default=",".join(METHODS))
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--ranks", default="2,4")
    asked = parser.parse_args()
    table: dict[str, Any] = json.loads(asked.output.read_text()) if asked.output.exists() else {"cells": {}}
    import torch

    table["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo"
    table["command"] = "python benchmarks/many_ranks.py"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rewards = folder / "rewards.py"
        rewards.write_text("def has_k(completion):\n    return float('k' in completion)\n")
        for method in asked.only.split(","):
            recipe = folder / f"{method}.yaml"
            text = RECIPE + (ONLINE if method in ("grpo", "rloo") else "")
            recipe.write_text(text.format(method=method, rewards=rewards))
            one = measured(recipe, method, "one", 1, folder)
            table["cells"][f"{method} one 1"] = {k: v for k, v in one.items() if k != "curve"}
            for engine in asked.engines.split(","):
                for num_ranks in map(int, asked.ranks.split(",")):
                    cell = measured(recipe, method, engine, num_ranks, folder)
                    found = cell.pop("curve", None)
                    if found is not None and "curve" in one:
                        cell["furthest_from_one_process"] = furthest(found, one["curve"])
                    table["cells"][f"{method} {engine} {num_ranks}"] = cell
                    print(method, engine, num_ranks, cell, flush=True)
                    asked.output.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
