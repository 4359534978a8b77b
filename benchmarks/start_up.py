"""How long a person waits: `--help`, a check, a wrong recipe, the first step; ours and TRL's in turns.

    python benchmarks/start_up.py --trl trl-env/bin/trl [--repeats 3] [-o FILE]

Each task is one command of either side, in a new process, with warm file caches (every command runs once
before). The first step: the same tiny model and rows, from the start of the command to the first loss on its
way out. TRL checks no configuration without training, so `check` has no counterpart. Wall and CPU time; above
1 the ratio says that ours needs less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from turns import QUIET, RESULTS, Done, in_turns, medians, ratios, run, where, write

MEMTRAIN = [sys.executable, "-m", "memtrain"]
RECIPE = """\
method: sft
model: {{path: {folder}/model}}
data: {{train: {folder}/rows.jsonl, cache_dir: {folder}/cache}}
length: {{max_length: 256}}
train: {{batch_size: 4, max_steps: 1}}
cluster: {{device: cpu, threads: 1}}
"""
TRL = """\
model_name_or_path: {folder}/model
dataset_name: {folder}/rows
max_length: 256
per_device_train_batch_size: 4
max_steps: 1
use_cpu: true
bf16: false
gradient_checkpointing: false
logging_steps: 1
report_to: none
save_strategy: "no"
output_dir: {folder}/trl-out
"""
WRONG_KEY = {"memtrain": "optim: {learning_rat: 1e-4}\n", "trl": "learning_rat: 1e-4\n"}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trl", required=True, help="the command `trl` of its environment")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", help="some of them; the others' figures stay")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        tasks = commands(folder, asked.trl)
        result = where("python benchmarks/start_up.py --trl TRL")
        path = asked.output or RESULTS / "start_up.json"
        known = json.loads(path.read_text())["tasks"] if asked.tasks and path.is_file() else {}
        result |= {"repeats": asked.repeats, "tasks": known}
        for task, sides in tasks.items():
            if asked.tasks and task not in asked.tasks:
                continue
            for side, command in sides.items():
                ended = run(command, folder=folder)
                assert ended.code == (0 if task not in ("wrong recipe", "wrong value") else ended.code), (
                    ended.out
                )
                print(f"{task}, {side}: warm", flush=True)
            figures = in_turns(
                {side: partial(timed, task, command, folder) for side, command in sides.items()},
                asked.repeats,
            )
            reported = {side: medians(of_side) | {"all": of_side} for side, of_side in figures.items()}
            if len(sides) == 2:
                reported["ratio"] = {
                    key: ratios([f[key] for f in figures["memtrain"]], [f[key] for f in figures["trl"]])
                    for key in ("wall_s", "cpu_s")
                }
            if task == "wrong recipe":
                reported["says"] = {
                    side: last_lines(run(command, folder=folder)) for side, command in sides.items()
                }
            result["tasks"][task] = reported
            print(task, json.dumps(reported.get("ratio", reported["memtrain"])), flush=True)
            write("start_up", result, asked.output)


def prepare(folder: Path) -> None:
    """The model, the rows, and a recipe of each side, right and wrong."""
    from sft_vs_trl import MODELS, save_model

    save_model(folder / "model", MODELS["0.9M"])
    rows = [{"prompt": f"What is {n} + {n + 1}?", "completion": f" It is {2 * n + 1}."} for n in range(64)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines)
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text(lines)
    for side, text in (("memtrain", RECIPE), ("trl", TRL)):
        (folder / f"{side}.yaml").write_text(text.format(folder=folder))
        (folder / f"{side}-wrong.yaml").write_text(text.format(folder=folder) + WRONG_KEY[side])


def commands(folder: Path, trl: str) -> dict[str, dict[str, list[str]]]:
    """By task, the command of each side."""
    ours = [*MEMTRAIN, "sft", str(folder / "memtrain.yaml"), "--run-dir", str(folder / "run"), "--no-resume"]
    return {
        "help": {"memtrain": [*MEMTRAIN, "--help"], "trl": [trl, "--help"]},
        "help of sft": {"memtrain": [*MEMTRAIN, "sft", "--help"], "trl": [trl, "sft", "--help"]},
        "check": {"memtrain": [*MEMTRAIN, "check", str(folder / "memtrain.yaml")]},
        "wrong recipe": {
            "memtrain": [*MEMTRAIN, "sft", str(folder / "memtrain-wrong.yaml")],
            "trl": [trl, "sft", "--config", str(folder / "trl-wrong.yaml")],
        },
        "first step": {"memtrain": ours, "trl": [trl, "sft", "--config", str(folder / "trl.yaml")]},
    }


def timed(task: str, command: list[str], folder: Path) -> dict[str, float]:
    """Wall and CPU time of a command; of the first step, the wall time until its loss is said."""
    if task != "first step":
        ended = run(command, folder=folder)
        return {"wall_s": ended.wall_s, "cpu_s": ended.cpu_s}
    return first_loss(command, folder)


def first_loss(command: list[str], folder: Path) -> dict[str, float]:
    """Seconds until a command says its first loss: a line of metrics, or of its output."""
    import os

    import psutil

    metrics = folder / "run" / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    log = folder / "first.log"
    started = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env={**os.environ, **QUIET}
        )
        watched = psutil.Process(process.pid)
        cpu = 0.0
        while process.poll() is None:
            cpu = cpu_of(watched) or cpu
            said = log.read_text(errors="replace")
            steps = metrics.read_text() if metrics.is_file() else ""
            if '"step"' in steps and '"loss"' in steps or "'loss':" in said:
                break
            time.sleep(0.02)
        wall = time.perf_counter() - started
        process.wait(600)
    assert process.returncode == 0, log.read_text(errors="replace")[-2000:]
    return {"wall_s": wall, "cpu_s": cpu}


def cpu_of(process) -> float:
    """CPU seconds of a process and its children so far; 0 when it is gone."""
    import psutil

    try:
        own = [process, *process.children(recursive=True)]
        return sum(one.cpu_times().user + one.cpu_times().system for one in own)
    except psutil.NoSuchProcess:
        return 0.0


def last_lines(ended: Done) -> dict[str, object]:
    """What a wrong recipe is answered with: how many lines, and the last of them."""
    lines = [line for line in ended.out.splitlines() if line.strip()]
    return {"code": ended.code, "lines": len(lines), "last": lines[-3:]}


if __name__ == "__main__":
    main()
