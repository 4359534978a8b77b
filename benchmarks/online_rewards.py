"""Whether GRPO and RLOO raise the held-out reward of a model that was fine-tuned for some minutes before.

python benchmarks/online_rewards.py SFT_MODEL -o benchmarks/results/online_rewards.json

SFT_MODEL is the `final/` folder of a run of `sft` on builtin:arithmetic. Every method and seed trains from it
on the same problems; the reward is 1 for a right answer and 0 for any other, before, during and after on
problems that none of them has seen, one likeliest completion each.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memtrain.cli.commands.train import run_recipe

METHODS: dict[str, dict[str, Any]] = {"grpo": {"grpo": {}}, "rloo": {"rloo": {"beta": 0.0}}}


def main() -> None:
    """Run every method with every seed and write the curves."""
    words = argparse.ArgumentParser()
    words.add_argument("model", type=Path)
    words.add_argument("-o", "--output", type=Path)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--steps", type=int, default=60)
    asked = words.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for method in METHODS:
            found[method] = [
                one_run(Path(name) / f"{method}-{seed}", method, seed, asked.model, asked.steps)
                for seed in range(asked.seeds)
            ]
    if asked.output:
        told = {
            "what": "held-out reward (share of right answers, greedy) by optimizer step",
            "device": f"CPU, {platform.machine()}, one thread",
            "command": f"python benchmarks/online_rewards.py SFT_MODEL --steps {asked.steps} -o FILE",
            "versions": {one: version(one) for one in ("torch", "transformers")},
            "recipe": recipe_of("grpo", 0, Path("SFT_MODEL"), asked.steps),
            "methods": found,
        }
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text(json.dumps(told, indent=1) + "\n")


def recipe_of(method: str, seed: int, model: Path, steps: int) -> dict[str, Any]:
    """The recipe of one run."""
    return {
        "method": method,
        "model": {"path": str(model)},
        "data": {"train": "builtin:arithmetic", "held_out": 0.03},
        "length": {"max_length": 64, "truncation": "drop"},
        "generate": {"completions": 8, "max_tokens": 24},
        "rewards": {"functions": "exact_answer"},
        "optim": {"lr": 3e-4, "warmup_steps": 5, "schedule": "constant"},
        "train": {"batch_rows": 64, "max_steps": steps, "seed": seed},
        "eval": {"at_start": True, "every_steps": max(1, steps // 6)},
        "save": {"every_steps": steps},
        "memory": {"watch": False},
        "log": {"every_steps": 10},
        "cluster": {"device": "cpu", "threads": 1},
        **METHODS[method],
    }


def one_run(folder: Path, method: str, seed: int, model: Path, steps: int) -> dict[str, Any]:
    """The curve of one run: (step, held-out reward), the training reward at both ends, and its time."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(json.dumps(recipe_of(method, seed, model.resolve(), steps)))
    begun = time.process_time()
    run_recipe(method, str(folder / "recipe.yaml"), [], run_dir=str(folder / "run"))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in lines if line["kind"] == "step"]
    made = {
        "seed": seed,
        "held_out": [(line["step"], round(line["reward"], 4)) for line in lines if line["kind"] == "eval"],
        "train_first_five": round(sum(rewards[:5]) / 5, 4),
        "train_last_five": round(sum(rewards[-5:]) / 5, 4),
        "processor_seconds": round(time.process_time() - begun, 1),
    }
    print(method, made, flush=True)
    return made


if __name__ == "__main__":
    main()
