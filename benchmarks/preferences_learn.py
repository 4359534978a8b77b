"""Whether DPO, KTO and a reward model learn held-out preferences of real solutions, after minutes of `sft`.

python benchmarks/preferences_learn.py DATA -o benchmarks/results/preferences_learn.json

DATA holds `gsm8k/train.jsonl` (question, answer) and `gsm8k_solutions/{preference,unpaired}.jsonl` (right and
wrong solutions that models wrote). One small random model is fine-tuned on the worked solutions; then every
method trains from it with every seed, which also draws the rows, what is held out (rows of one question
together), and the head of the reward model. Everything goes through the command line's own functions.
With `--work FOLDER` the runs are kept, and a call that was ended goes on with the next of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from result_files import write_result

from memtrain.cli.commands.train import run_recipe

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 160,
    "intermediate_size": 480,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
SHARED: dict[str, Any] = {
    "length": {"max_length": 512},
    "memory": {"activation_checkpointing": "off", "measure_peaks": False},
    "cluster": {"device": "cpu", "threads": 1},
}
LEARNING_RATES = {"dpo": 3e-4, "kto": 5e-5, "reward": 3e-4}
STEPS = {"sft": 160, "dpo": 30, "kto": 30, "reward": 60}
FORMS = {"dpo": "preference", "kto": "unpaired", "reward": "preference"}


def main() -> None:
    """Run everything and write the curves."""
    words = argparse.ArgumentParser()
    words.add_argument("data", type=Path)
    words.add_argument("-o", "--output", type=Path)
    words.add_argument("--work", type=Path, help="keep the runs here, and read those that have ended before")
    words.add_argument("--methods", nargs="+", default=list(FORMS), choices=list(FORMS))
    words.add_argument("--seeds", type=int, default=3)
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = asked.work or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        tuned = run(folder, "sft", sft_recipe(asked.data))
        start = folder / "sft" / "final"
        found = {
            method: [
                run(folder, f"{method}-{seed}", recipe_of(method, seed, start, asked.data))
                for seed in range(asked.seeds)
            ]
            for method in asked.methods
        }
        example = recipe_of("dpo", 0, Path("SFT/final"), Path("DATA"))
    for method, curves in found.items():
        print(method, summary(curves))
    if asked.output:
        reported = {
            "what": "held-out metrics before, during and after; losses of every step",
            "device": f"CPU, {platform.machine()}, one thread",
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "command": "python benchmarks/preferences_learn.py DATA -o FILE",
            "versions": {one: version(one) for one in ("torch", "transformers")},
            "cpu_s": tuned["cpu_s"] + sum(curve["cpu_s"] for curves in found.values() for curve in curves),
            "model": MODEL,
            "recipe": example,
            "learning_rates": LEARNING_RATES,
            "steps": STEPS,
            "summary": {method: summary(curves) for method, curves in found.items()},
            "sft": tuned,
            "methods": found,
        }
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        write_result(asked.output, reported)


def commit() -> str:
    """The commit that is measured."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


def sft_recipe(data: Path) -> dict[str, Any]:
    """Worked solutions, packed."""
    own = {
        "method": "sft",
        "model": {"config": MODEL, "tokenizer": "builtin:tiny"},
        "data": {
            "train": {"source": str(data / "gsm8k" / "train.jsonl"), "limit": 3000},
            "columns": {"prompt": "question", "completion": "answer"},
            "eval_fraction": 0.02,
        },
        "optim": {"lr": 2e-3},
        "train": {"batch_size": 8, "max_steps": STEPS["sft"]},
        "eval": {"at_start": True, "every_steps": STEPS["sft"]},
    }
    return SHARED | own


def recipe_of(method: str, seed: int, start: Path, data: Path) -> dict[str, Any]:
    """The recipe of one run of a method."""
    source = data / "gsm8k_solutions" / f"{FORMS[method]}.jsonl"
    own = {
        "method": method,
        "model": {"path": str(start)},
        "data": {"train": {"source": str(source), "limit": 1400}, "eval_fraction": 0.15},
        "optim": {"lr": LEARNING_RATES[method]},
        "train": {"batch_size": 16, "max_steps": STEPS[method], "seed": seed},
        "eval": {"at_start": True, "every_steps": STEPS[method] // 3},
    }
    return SHARED | own


def run(folder: Path, name: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Losses of the steps, what evaluation reported, by step, and the processor time of it all."""
    path = folder / f"{name}.yaml"
    recipe = recipe | {"data": recipe["data"] | {"cache_dir": str(folder / "cache")}}
    path.write_text(json.dumps(recipe))
    spent = folder / name / "cpu_s.txt"
    if not spent.exists():
        begun = time.process_time()
        run_recipe(recipe["method"], str(path), [], run_dir=str(folder / name), resume=False)
        spent.write_text(f"{time.process_time() - begun:.0f}")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "calibration")
    return {
        "cpu_s": int(spent.read_text()),
        "losses": [line["loss"] for line in lines if line["kind"] == "step"],
        "held_out": [
            {key: value for key, value in line.items() if key in kept or key.startswith("rewards/")}
            for line in lines
            if line["kind"] == "eval"
        ],
    }


def summary(curves: list[dict[str, Any]]) -> dict[str, Any]:
    """First and last of every held-out metric: of each seed, their mean and standard deviation."""
    names = [name for name in curves[0]["held_out"][-1] if name != "step"]
    reported: dict[str, Any] = {}
    for name in names:
        ends = [[round(curve["held_out"][at].get(name, 0.0), 4) for curve in curves] for at in (0, -1)]
        reported[name] = {
            "before": ends[0],
            "after": ends[1],
            "mean": [round(statistics.mean(end), 4) for end in ends],
            "deviation": [round(statistics.stdev(end), 4) if len(end) > 1 else 0.0 for end in ends],
        }
    return reported


if __name__ == "__main__":
    main()
