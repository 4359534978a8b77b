"""Whether the online methods raise the held-out reward of a model that was fine-tuned for minutes before.

python benchmarks/online_rewards.py sft --work /tmp/online
python benchmarks/online_rewards.py run --work /tmp/online --method grpo --seed 0    (each method, each seed)
python benchmarks/online_rewards.py collect --work /tmp/online -o benchmarks/results/online_rewards.json

`sft` teaches a tiny model the problems of one step of builtin:arithmetic. Every method and seed trains
from it on the same problems; the reward is 1 for a right answer and 0 for any other: before, during and after
on problems that neither has seen, one completion each, sampled as in training. `all` does everything, one
after another.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from result_files import write_result

from memtrain.cli.commands.train import run_recipe

METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"grpo": {}},
    "rloo": {"rloo": {"beta": 0.0}},
    "online_dpo": {"online_dpo": {"beta": 0.1}},
    "ppo": {"ppo": {"beta": 0.0, "updates_per_rollout": 1}},
}
"""What each method's recipe says beside what all have in common."""

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
COMMON: dict[str, Any] = {
    "length": {"max_length": 40, "truncation": "drop"},
    "memory": {"measure_peaks": False},
    "cluster": {"device": "cpu", "threads": 1},
}
SFT_STEPS, STEPS, SEEDS = 300, 300, 3


def main() -> None:
    """Do the part that the command line names."""
    words = argparse.ArgumentParser()
    words.add_argument("part", choices=("sft", "run", "collect", "all"))
    words.add_argument("--work", type=Path, required=True)
    words.add_argument("--method", choices=tuple(METHODS))
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("-o", "--output", type=Path)
    asked = words.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    if asked.part in ("sft", "all"):
        fine_tuned(asked.work)
    for method in METHODS if asked.part == "all" else [asked.method] if asked.part == "run" else []:
        for seed in range(SEEDS) if asked.part == "all" else [asked.seed]:
            one_run(asked.work, method, seed)
    if asked.part in ("collect", "all"):
        assert asked.output is not None, "collect writes the file that -o names."
        collect(asked.work, asked.output)


def fine_tuned(work: Path) -> None:
    """Train the model that every run begins with."""
    recipe = {
        "method": "sft",
        "model": {"config": MODEL, "tokenizer": "builtin:tiny"},
        "data": {"train": "builtin:arithmetic"},
        "optim": {"lr": 3e-3, "warmup_steps": 20},
        "train": {"batch_size": 32, "max_steps": SFT_STEPS},
        "save": {"every_steps": SFT_STEPS},
        "log": {"every_steps": 100},
        **COMMON,
    }
    train(work, "sft", recipe)


def recipe_of(method: str, seed: int, model: Path) -> dict[str, Any]:
    """The recipe of one online run."""
    own = dict(METHODS[method])
    optim = {"lr": 1e-4, "warmup_steps": 5, "schedule": "constant"} | own.pop("optim", {})
    return {
        "method": method,
        "model": {"path": str(model)},
        "data": {"train": "builtin:arithmetic", "eval": {"source": "builtin:arithmetic", "split": "test"}},
        "generate": {"num_generations": 8, "max_tokens": 16, "eval_temperature": 1.0},
        "rewards": {"functions": "exact_answer"},
        "optim": optim,
        "train": {"batch_size": 128, "max_steps": STEPS, "seed": seed},
        "eval": {"at_start": True, "every_steps": STEPS // 6, "max_rows": 400},
        "save": {"every_steps": STEPS},
        "log": {"every_steps": 10},
        **own,
        **COMMON,
    }


def one_run(work: Path, method: str, seed: int) -> None:
    """Train once and keep the curve: (step, held-out reward), training reward, lengths, time."""
    begun = time.process_time()
    name = f"{method}-{seed}"
    lines = train(work, name, recipe_of(method, seed, (work / "sft" / "run" / "final").resolve()))
    held_out = [(line["step"], round(line["reward"], 4)) for line in lines if line["kind"] == "eval"]
    steps = [line for line in lines if line["kind"] == "step"]
    reported = {
        "seed": seed,
        "held_out": held_out,
        "train_reward": [round(line["reward"], 4) for line in steps],
        "completion_tokens": [round(line["completion_tokens"], 2) for line in steps],
        "groups_without_signal": [round(line["zero_std_groups"], 3) for line in steps],
        "cpu_seconds": round(time.process_time() - begun, 1),
    }
    (work / f"{name}.json").write_text(json.dumps(reported))
    print(f"{name}: held-out reward {held_out[0][1]:.3f} -> {held_out[-1][1]:.3f}", flush=True)


def train(work: Path, name: str, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a recipe, or go on with a run that was stopped; the lines of its metrics."""
    folder = work / name
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    run_recipe(recipe["method"], str(folder / "recipe.yaml"), [], run_dir=str(folder / "run"))
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def collect(work: Path, output: Path) -> None:
    """Put the curves of all runs into one file."""
    found = {
        method: [json.loads((work / f"{method}-{seed}.json").read_text()) for seed in range(SEEDS)]
        for method in METHODS
    }
    reported = {
        "what": "held-out reward (share of right answers, one sampled completion each) by optimizer step",
        "device": f"CPU, {platform.machine()}, one thread",
        "command": "python benchmarks/online_rewards.py all --work FOLDER -o FILE",
        "versions": {one: version(one) for one in ("torch", "transformers")},
        "model": MODEL,
        "sft_steps": SFT_STEPS,
        "recipes": {method: recipe_of(method, 0, Path("SFT_MODEL")) for method in METHODS},
        "methods": found,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_result(output, reported)


if __name__ == "__main__":
    main()
