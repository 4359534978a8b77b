"""Every method beside TRL's trainer of it: the same weights, rows, order, batch and optimizer, in turns.

    python -m venv trl-env && trl-env/bin/pip install trl==1.16.0 torch==2.13.0
    python benchmarks/methods_vs_trl.py --trl trl-env/bin/python [--methods dpo ...] [--models 0.9M 25M] \\
        [--real FOLDER]

Each side as it does by default (memtrain: what its plan chooses), but for: float32, activations kept, every
weight trained, the reference of `dpo` and `kto` asked once before training. `grpo` and `rloo` run twice: with
completions of their own, and with made-up ones that are the same on both sides, so that losses compare.
Speed: tokens of a step, counted as each answer with its prompt, over the processor time between the ends of
the first and the last step, of one thread. `whole_s` is the processor time of everything but imports:
preparation, the reference's pass, training, saving. Memory: the peak of the resident set above what the
imports left.

TRL is measured twice: as it stands, and with the one flag patched by which it sends only trained positions
through the head (`trainer/utils.py` does so where Triton runs, which is never on a CPU). Both sides save the
same: a checkpoint with the optimizer's states after the last step, and the model. `--real FOLDER` takes rows
of GSM8K (train.jsonl) and of its judged solutions (preference.jsonl, unpaired.jsonl), others for every seed.
A later call adds its rows to the results, in the place of rows of the same method and model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_files import write_result
from sft_vs_trl import MODELS, environment, largest_gap, run_versions, save_model

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
STEPS = {"0.9M": 10, "11M, 32k words": 6, "25M": 6}
TRL_SIDES = ("trl", "trl, compacting")
REAL = {
    "sft": "train.jsonl",
    "dpo": "preference.jsonl",
    "kto": "unpaired.jsonl",
    "reward": "preference.jsonl",
}


def main() -> None:
    """Compare method by method, model by model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl", required=True, help="Python of the environment with TRL")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--real", type=Path, help="folder with rows of GSM8K")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "results" / "methods_vs_trl.json")
    asked = parser.parse_args()
    pythons = {"memtrain": sys.executable} | dict.fromkeys(TRL_SIDES, asked.trl)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in asked.models:
            save_model(folder / size, MODELS[size])
            save_scorer(folder / size, folder / f"{size}-score")
            for case in asked.methods:
                jobs = [job_of(case, size, folder, seed, asked.real) for seed in range(asked.repeats)]
                reported = {"case": case, "model": size} | compare(jobs, pythons, folder)
                reported["rows"] = "GSM8K" if asked.real and case in REAL else "made up"
                reported |= {"environment": environment(), "versions": run_versions(folder)}
                print(json.dumps(reported), flush=True)
                keep(asked.output, reported)


def job_of(case: str, size: str, folder: Path, seed: int, real: Path | None) -> dict[str, Any]:
    """A job for `method_sides.py`, with its rows of one seed written."""
    method = case.split(",")[0]
    steps = STEPS[size]
    # Real rows are three times as long as made-up ones.
    num_rows = ROWS[method] // 2 if real and method in REAL else ROWS[method]
    data = folder / f"{method}-{size}-{seed}.jsonl"
    tokens = write_rows(method, data, steps * num_rows, seed, real)
    return {
        "method": method,
        "model": str(folder / (f"{size}-score" if method == "reward" else size)),
        "data": str(data),
        "batch_size": num_rows,
        "steps": steps,
        "lr": 1e-4,
        "fixed": "same" in case,
        "group": GROUP,
        "max_tokens": MAX_TOKENS,
        "tokens": tokens,
        "seed": seed,
    }


def real_rows(path: Path, count: int, seed: int) -> list[Any]:
    """Rows of a file, drawn by the seed, in their order; GSM8K's question is the prompt."""
    lines = path.read_text().splitlines()
    drawn = [json.loads(lines[at]) for at in sorted(random.Random(seed).sample(range(len(lines)), count))]
    return [
        {"prompt": f"{row['question']}\n", "completion": row["answer"]} if "question" in row else row
        for row in drawn
    ]


def write_rows(method: str, path: Path, num_rows: int, seed: int, real: Path | None) -> int:
    """The word problems of all steps, made up or `real`; their tokens, each answer with its prompt.

    Of the methods that write completions, tokens of the prompts only.
    """
    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.sources.builtin_arithmetic import rows
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))

    def count(*texts: str) -> int:
        return len(tokenizer("".join(texts))["input_ids"])

    if method in FORMS:
        made: list[Any] = (
            real_rows(real / REAL[method], num_rows, seed)
            if real
            else list(rows(num_rows, seed, FORMS[method]))
        )
        answers = ("chosen", "rejected") if "chosen" in made[0] else ("completion",)
        total = sum(count(row["prompt"], row[answer]) for row in made for answer in answers)
    else:
        made = [{"prompt": row["prompt"]} for row in rows(num_rows // GROUP, seed, "prompt_completion")]
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


def compare(jobs: list[dict[str, Any]], pythons: dict[str, str], folder: Path) -> dict[str, Any]:
    """Run all sides in turns, a job for each repeat; medians of their figures, and ratios TRL : memtrain."""
    sides = list(pythons)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for repeat, job in enumerate(jobs):
        for side in sides if repeat % 2 == 0 else reversed(sides):
            runs[side].append(run_side(side, pythons[side], job, folder))
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        "step_s": step_s,
        "whole_s": lambda run: run["whole_s"],
        "peak_mib": lambda run: run["rss_growth_bytes"] / 2**20,
    }
    reported: dict[str, Any] = {key: jobs[0][key] for key in ("steps", "batch_size", "fixed")}
    for side in sides:
        reported[side] = {
            name: round(statistics.median(map(figure, runs[side])), 4) for name, figure in figures.items()
        }
        tokens = statistics.median(
            job["tokens"] + run["completion_tokens"] for job, run in zip(jobs, runs[side], strict=True)
        )
        reported[side]["tokens_per_s"] = round(tokens / jobs[0]["steps"] / reported[side]["step_s"], 1)
        reported[side]["losses"] = runs[side][0]["losses"]
    for side, name in zip(TRL_SIDES, ("ratio", "ratio_compacting"), strict=True):
        both = list(zip(runs["memtrain"], runs[side], strict=True))
        reported[name] = {
            key: [round(figure(theirs) / figure(ours), 3) for ours, theirs in both]
            for key, figure in figures.items()
        }
    if jobs[0]["fixed"] or jobs[0]["method"] in FORMS:
        both = list(zip(runs["memtrain"], runs["trl"], strict=True))
        for key in ("losses", "grad_norms"):
            name = f"largest_{'loss' if key == 'losses' else 'grad_norm'}_difference"
            reported[name] = max(largest_gap(ours[key], theirs[key]) for ours, theirs in both)
    return reported


def step_s(run: dict[str, Any]) -> float:
    """Processor time of a step, all but the first."""
    return (run["cpu_s"][-1] - run["cpu_s"][0]) / (len(run["cpu_s"]) - 1)


def run_side(side: str, python: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run of one side in a process of its own, in a folder that is new."""
    mine = folder / side.split(",")[0]
    shutil.rmtree(mine, ignore_errors=True)
    mine.mkdir()
    job = job | {"folder": str(mine), "compacts": "," in side}
    (mine / "job.json").write_text(json.dumps(job))
    words = [
        python,
        str(HERE / "method_sides.py"),
        mine.name,
        str(mine / "job.json"),
        str(mine / "result.json"),
    ]
    given = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    given |= {"HF_HOME": str(folder / "hub"), "PYTHONHASHSEED": "0"}
    given |= {"PYTHONPATH": str(HERE.parent)} if side == "memtrain" else {}
    ended = subprocess.run(words, env=os.environ | given, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{ended.stderr[-4000:]}")
    return json.loads((mine / "result.json").read_text())


def keep(out: Path, reported: dict[str, Any]) -> None:
    """Put one row into the results, in the place of the one of the same case and model."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    rows = [row for row in rows if (row["case"], row["model"]) != (reported["case"], reported["model"])] + [
        reported
    ]
    rows.sort(key=lambda row: (list(MODELS).index(row["model"]), CASES.index(row["case"])))
    write_result(out, {"environment": reported["environment"], "rows": rows})


if __name__ == "__main__":
    main()
