"""What only a GPU can tell, in one folder: `make bench-gpu`, or `python benchmarks/gpu.py --out FOLDER`.

Tasks, each in processes of its own and with a file of its own in FOLDER; what is there is not made again, so
that a call that was ended goes on, and `--limit-s` may cut the work into parts. Models are built from real
configurations (0.6B to 8B) with random weights, on generated rows: nothing is downloaded.

- points: methods, sizes, lengths, adapters and strategies, a plan each: peak beside the prediction, tokens/s.
  Their errors are the planner's (`summary.json`: median, 95th percentile, worst, false "fits").
- waterfalls: from the plain run to the plan, a strategy at a time (`memtrain bench`).
- attention: the same recipe on each back end that runs here; offloading: with and without.
- context: the longest row at a fixed recipe, as the planner says, measured there and a tenth beyond.
- verify: `memtrain verify --shrink` in bfloat16 on this card's kernels.

Not run yet on a GPU: no machine with one was at hand.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SIZES = {"0.6B": "qwen3-0.6b", "1.7B": "qwen3-1.7b", "4B": "qwen3-4b", "8B": "qwen3-8b"}
METHODS = ("sft", "dpo", "grpo")
STEPS, REPEATS = 3, 2
ROWS = 192
LORA = "model.adapter={r: 16, alpha: 32}"
FORMS: dict[str, tuple[str, ...]] = {
    "full": (),
    "lora": (LORA,),
    "short": ("length.max_length=512",),
    "long": ("length.max_length=4096",),
    "checkpointed": ("memory.activation_checkpointing=on",),
}
"""Of a point; every weight is trained but for `lora`."""
TEXT = "the pens trains leave at noon each has more than costs whole half sum of answer is so"
WORDS = tuple(TEXT.split())


@dataclass(frozen=True, slots=True)
class Task:
    """One file of the results."""

    name: str
    kind: str
    """point, waterfall, verify or context."""
    method: str
    size: str
    words: tuple[str, ...] = ()
    """Overrides of the recipe."""


def tasks() -> list[Task]:
    """All of them: small models first, so that little time tells much."""
    made: list[Task] = []
    for size in SIZES:
        made += points(size)
        made += [Task(f"waterfall-{method}-{size}", "waterfall", method, size) for method in METHODS]
        if size == "0.6B":
            made += [Task(f"verify-{method}", "verify", method, size) for method in METHODS]
            made += [
                Task(f"attention-{name}", "point", "sft", size, (f"model.attention={name}",))
                for name in ("flash", "torch_varlen", "flex", "transformers")
            ]
        made.append(Task(f"context-{size}", "context", "sft", size, (LORA, "train.batch_size=1")))
        made += [
            Task(
                f"offloading-{switch}-{size}",
                "point",
                "sft",
                size,
                ("memory.activation_checkpointing=on", f"memory.activation_offloading={switch}"),
            )
            for switch in ("off", "on")
        ]
    return made


def points(size: str) -> list[Task]:
    """Fifteen or more plans of one size, for the planner's error."""
    made = [
        Task(f"point-{method}-{size}-{name}", "point", method, size, words)
        for method in METHODS
        for name, words in FORMS.items()
    ]
    extra = {
        "lora-long": (LORA, "length.max_length=4096"),
        "packed": ("length.packing=bfd",),
        "whole-logits": ("memory.loss=full",),
    }
    made += [Task(f"point-sft-{size}-{name}", "point", "sft", size, words) for name, words in extra.items()]
    return made


def main() -> None:
    """Make what is missing, then the summary."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-gpu"))
    parser.add_argument("--limit-s", type=float, default=600, help="no task is begun after that")
    parser.add_argument("--only", help="tasks whose names contain this")
    asked = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("error: there is no CUDA GPU here\n  try: `make bench` measures on a CPU", file=sys.stderr)
        sys.exit(5)
    asked.out.mkdir(parents=True, exist_ok=True)
    wanted = [task for task in tasks() if asked.only is None or asked.only in task.name]
    left = make(wanted, asked.out, lambda task: done(task, asked.out), asked.limit_s)
    found = [json.loads(path.read_text()) for path in sorted(asked.out.glob("*.json"))]
    (asked.out / "summary.json").write_text(json.dumps(summary(found), indent=1) + "\n")
    print(f"{len(left)} of {len(wanted)} tasks are left; the same command goes on" if left else "all is made")


def make(
    wanted: Sequence[Task], out: Path, act: Callable[[Task], dict[str, Any]], limit_s: float
) -> list[Task]:
    """Make tasks that have no file yet, until the time is over; those that are left."""
    started = time.monotonic()
    left: list[Task] = []
    for task in wanted:
        path = out / f"{task.name}.json"
        if path.is_file():
            continue
        if time.monotonic() - started > limit_s:
            left.append(task)
            continue
        print(task.name, flush=True)
        result = act(task) | {"task": asdict(task), "where": where()}
        # Whole or not there: a call that is ended leaves no half of a file.
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(result, indent=1) + "\n")
        beside.rename(path)
    return left


def done(task: Task, out: Path) -> dict[str, Any]:
    """The result of a task; a fault is a result too."""
    folder = out / "work"
    recipe = write_recipe(task, folder)
    if task.kind == "context":
        return context(task, recipe, folder)
    words = ["--steps", str(STEPS)]
    command = {
        "waterfall": ["bench", "--json", "--repeats", str(REPEATS), *words],
        "verify": ["verify", "--json", "--shrink"],
    }.get(task.kind)
    if command is None:
        return point(recipe, list(task.words), folder)
    verb, *options = command
    ran = subprocess.run(
        [sys.executable, "-m", "memtrain", verb, str(recipe), *task.words, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return {"result": json.loads(ran.stdout)}
    except ValueError:
        return {"fault": (ran.stderr.strip().splitlines() or ["no output"])[0]}


def point(recipe: Path, words: list[str], folder: Path) -> dict[str, Any]:
    """One plan, measured in turns with itself."""
    from memtrain.cli.measure.bench import bench_plan
    from memtrain.errors import MemtrainError

    try:
        return {"row": asdict(bench_plan(str(recipe), words, folder, steps=STEPS, repeats=REPEATS))}
    except MemtrainError as error:
        return {"refused": error.faults[0].what}


def context(task: Task, recipe: Path, folder: Path) -> dict[str, Any]:
    """The longest row that the planner says fits, measured there and a tenth beyond."""
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "memtrain",
            "plan",
            str(recipe),
            *task.words,
            "--solve",
            "max_length",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        longest = longest_of(json.loads(ran.stdout))
    except (ValueError, KeyError):
        return {"fault": (ran.stderr.strip().splitlines() or ["no answer"])[0]}
    made: dict[str, Any] = {"longest": longest}
    for name, length in (("at", longest), ("beyond", longest + longest // 10)):
        rows = write_rows(folder / f"rows-{length}.jsonl", "sft", tokens=length, rows=4)
        words = [*task.words, f"data.train={rows}", f"length.max_length={length}", "memory.oom_recovery=off"]
        made[name] = point(recipe, words, folder)
    return made


def longest_of(solved: dict[str, Any]) -> int:
    """The length in the answer of `memtrain plan --solve max_length --json`."""
    return int(solved["value"])


def write_recipe(task: Task, folder: Path) -> Path:
    """The recipe of a task, with the model's configuration and rows beside it."""
    from memtrain.memory.model_shape.known_models import known_config

    folder.mkdir(parents=True, exist_ok=True)
    config = folder / f"{task.size}.config.json"
    config.write_text(json.dumps(dict(known_config(SIZES[task.size]) or {})))
    rows = write_rows(folder / f"rows-{task.method}.jsonl", task.method, tokens=1600, rows=ROWS)
    lines = [
        f"method: {task.method}",
        f"model: {{config: {config}, tokenizer: builtin:tiny, dtype: bfloat16}}",
        f"data: {{train: {rows}, cache_dir: {folder}/cache}}",
        "length: {max_length: 2048}",
        f"train: {{batch_size: {8 if task.method != 'grpo' else 32}, max_steps: 8}}",
    ]
    if task.method == "grpo":
        lines += [
            "rewards: {functions: [{function: length}]}",
            "generate: {num_generations: 8, max_tokens: 256}",
        ]
    path = folder / f"{task.name}.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_rows(path: Path, method: str, *, tokens: int, rows: int) -> Path:
    """Rows of random words of about so many tokens, the same for the same name."""
    if path.is_file():
        return path
    draw = random.Random(path.name)

    def words(share: float) -> str:
        return " ".join(draw.choices(WORDS, k=max(4, int(tokens * share * draw.uniform(0.3, 1)))))

    made: list[dict[str, str]] = []
    for _ in range(rows):
        row = {"prompt": words(0.5)}
        if method == "sft":
            row["completion"] = f" {words(0.5)}"
        elif method == "dpo":
            row |= {"chosen": f" {words(0.2)}", "rejected": f" {words(0.2)}"}
        made.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def where() -> dict[str, Any]:
    """Device, commit, date and versions."""
    from importlib.metadata import version

    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    is_cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if is_cuda else "no GPU",
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "make bench-gpu",
        "versions": {name: version(name) for name in ("torch", "transformers", "memtrain")},
    }


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The planner's error over all rows: predicted over measured, less 1.

    A false "fits": a plan that was made for this card and ran out of memory.
    """
    rows = [row for one in found for row in rows_of(one)]
    errors = [row["predicted_bytes"] / row["peak_bytes"] - 1 for row in rows if row["peak_bytes"] is not None]
    sizes = sorted(abs(error) for error in errors)
    planned = [one["row"] for one in found if "row" in one]
    return {
        "rows": len(rows),
        "measured": len(errors),
        "median_error": statistics.median(sizes) if sizes else None,
        "p95_error": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))] if sizes else None,
        "worst_error": max(errors, key=abs) if errors else None,
        "false_fits": sum(row["fault"] == "out of memory" for row in planned),
        "refused": sum("refused" in one for one in found),
        "faults": [one["task"]["name"] for one in found if "fault" in one],
    }


def rows_of(one: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured rows in the file of a task."""
    if "row" in one:
        return [one["row"]]
    return list(one["result"]["rows"]) if "rows" in one.get("result", {}) else []


if __name__ == "__main__":
    main()
