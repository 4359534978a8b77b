"""Every method beside TRL's trainer of it: the same weights, rows, order, batch and optimizer, in turns.

    python -m venv trl-env && trl-env/bin/pip install trl==1.16.0 torch==2.13.0
    python benchmarks/methods_vs_trl.py --trl trl-env/bin/python [--methods dpo ...] [--models 0.9M 25M]

Each side as it does by default (memtrain: what its plan chooses), but for: float32, activations kept, every
weight trained, the reference of `dpo` and `kto` asked once before training. `grpo` and `rloo` run twice: with
completions of their own, and with made-up ones that are the same on both sides, so that losses compare.
Speed: tokens of a step, counted as each answer with its prompt, over the processor time between the ends of
the first and the last step, of one thread. `whole_s` is the processor time of everything but imports:
preparation, the reference's pass, training, saving. Memory: the peak of the resident set above what the
imports left.
A later call adds its rows to the results, in the place of rows of the same method and model.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_files import write_result
from sft_vs_trl import MODELS, SIDES, environment, largest_gap, run_versions, save_model

HERE = Path(__file__).resolve().parent
FORMS: dict[str, Any] = {
    "sft": "prompt_completion",
    "dpo": "preference",
    "kto": "unpaired",
    "reward": "preference",
}
CASES = ("sft", "dpo", "kto", "reward", "grpo", "grpo, same completions", "rloo", "rloo, same completions")
PROBLEMS, GROUP, MAX_TOKENS = 2, 4, 32
"""Of a step of the methods that write completions: prompts, completions of each, and their longest."""
ROWS = {"sft": 8, "dpo": 4, "kto": 8, "reward": 4, "grpo": PROBLEMS * GROUP, "rloo": PROBLEMS * GROUP}
STEPS = {"0.9M": 10, "25M": 2}


def main() -> None:
    """Compare method by method, model by model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl", required=True, help="Python of the environment with TRL")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "methods_vs_trl.json")
    asked = parser.parse_args()
    pythons = {"memtrain": sys.executable, "trl": asked.trl}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in asked.models:
            save_model(folder / size, MODELS[size])
            save_scorer(folder / size, folder / f"{size}-score")
            for case in asked.methods:
                job = job_of(case, size, folder)
                told = {"case": case, "model": size} | compare(job, pythons, folder, asked.repeats)
                told |= {"environment": environment(), "versions": run_versions(folder)}
                print(json.dumps(told), flush=True)
                keep(asked.output, told)


def job_of(case: str, size: str, folder: Path) -> dict[str, Any]:
    """A job for `method_sides.py`, with its rows written."""
    method = case.split(",")[0]
    steps = STEPS[size]
    data = folder / f"{method}-{size}.jsonl"
    tokens = write_rows(method, data, steps)
    return {
        "method": method,
        "model": str(folder / (f"{size}-score" if method == "reward" else size)),
        "data": str(data),
        "batch_size": ROWS[method],
        "steps": steps,
        "lr": 1e-4,
        "fixed": "same" in case,
        "group": GROUP,
        "max_tokens": MAX_TOKENS,
        "tokens": tokens,
    }


def write_rows(method: str, path: Path, steps: int) -> int:
    """As many made-up word problems as the steps take; their tokens, each answer with its prompt.

    Of the methods that write completions, tokens of the prompts only.
    """
    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.sources.builtin_arithmetic import rows
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))

    def count(*texts: str) -> int:
        return len(tokenizer("".join(texts))["input_ids"])

    if method in FORMS:
        made: list[Any] = list(rows(steps * ROWS[method], 0, FORMS[method]))
        answers = ("chosen", "rejected") if "chosen" in made[0] else ("completion",)
        total = sum(count(row["prompt"], row[answer]) for row in made for answer in answers)
    else:
        made = [{"prompt": row["prompt"]} for row in rows(steps * PROBLEMS, 0, "prompt_completion")]
        total = sum(GROUP * count(row["prompt"]) for row in made)
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return total


def save_scorer(model: Path, folder: Path) -> None:
    """The weights of `model` as a reward model with a random head."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def compare(job: dict[str, Any], pythons: dict[str, str], folder: Path, repeats: int) -> dict[str, Any]:
    """Run both sides in turns; medians of their figures, and the ratios TRL : memtrain of every turn."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for repeat in range(repeats):
        for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
            runs[side].append(run_side(side, pythons[side], job, folder))
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "step_s": step_s,
        "whole_s": lambda run: run["whole_s"],
        "peak_mib": lambda run: run["rss_growth_bytes"] / 2**20,
    }
    told: dict[str, Any] = {key: job[key] for key in ("steps", "batch_size", "fixed")}
    for side in SIDES:
        told[side] = {
            name: round(statistics.median(map(figure, runs[side])), 4) for name, figure in figures.items()
        }
        tokens = job["tokens"] + statistics.median(run["completion_tokens"] for run in runs[side])
        told[side]["tokens_per_s"] = round(tokens / job["steps"] / told[side]["step_s"], 1)
        told[side]["losses"] = runs[side][0]["losses"]
    both = list(zip(runs["memtrain"], runs["trl"], strict=True))
    told["ratio"] = {
        name: [round(figure(theirs) / figure(ours), 3) for ours, theirs in both]
        for name, figure in figures.items()
    }
    if job["fixed"] or job["method"] in FORMS:
        ours, theirs = both[0]
        told["largest_loss_difference"] = largest_gap(ours["losses"], theirs["losses"])
        told["largest_grad_norm_difference"] = largest_gap(ours["grad_norms"], theirs["grad_norms"])
    return told


def step_s(run: dict[str, Any]) -> float:
    """Processor time of a step, all but the first."""
    return (run["cpu_s"][-1] - run["cpu_s"][0]) / (len(run["cpu_s"]) - 1)


def run_side(side: str, python: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run of one side in a process of its own."""
    mine = folder / side
    mine.mkdir(exist_ok=True)
    (mine / "job.json").write_text(json.dumps(job | {"folder": str(mine)}))
    words = [python, str(HERE / "method_sides.py"), side, str(mine / "job.json"), str(mine / "result.json")]
    given = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    given |= {"HF_HOME": str(folder / "hub"), "PYTHONHASHSEED": "0"}
    given |= {"PYTHONPATH": str(HERE.parent)} if side == "memtrain" else {}
    ended = subprocess.run(words, env=os.environ | given, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{ended.stderr[-4000:]}")
    return json.loads((mine / "result.json").read_text())


def keep(out: Path, told: dict[str, Any]) -> None:
    """Put one row into the results, in the place of the one of the same case and model."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = [row for row in rows if (row["case"], row["model"]) != (told["case"], told["model"])] + [told]
    rows.sort(key=lambda row: (list(MODELS).index(row["model"]), CASES.index(row["case"])))
    write_result(out, {"environment": told["environment"], "rows": rows})


if __name__ == "__main__":
    main()
