"""What a prompt computed once saves an update from k completions: peak of live tensors, processor time.

python benchmarks/policy_peak.py -o benchmarks/results/policy_peak.json

The GRPO update of one group on the same random model: the group's prompt once, or once for each completion
(end to end, without padding: the best duplicated form), both with the log-probs in tiles. One micro-batch
holds the group. Processor time of one thread, so that other work on the machine counts little; the peak does
not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np

from memtrain.cli.planning import make_plan
from memtrain.recipes.load import load_recipe
from memtrain.trainers.build import build
from memtrain.trainers.losses.policy import Norms
from memtrain.trainers.policy_feed import PolicyFeed
from memtrain.trainers.prompt_feed import PromptFeed
from memtrain.trainers.rollout.protocol import Sample
from memtrain.trainers.rollout.window import Window, new_window
from memtrain.trainers.step import Engine, forward_backward
from memtrain.trainers.trace.recorder import TensorPeak

PROMPT, COMPLETION = 3100, 256
COUNTS = (2, 4, 8, 16)
FORMS = {"prompt once": [], "prompt for each": ["length.shared_prompts=false"]}
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
WORDS = (" apples", " books", " coins", " eggs", " pens", " plums", " shells", " stamps")


def main() -> None:
    """Measure every form at every k and write the figures."""
    words = argparse.ArgumentParser()
    words.add_argument("-o", "--output", type=Path)
    words.add_argument("--checkpointing", choices=("on", "off"), default="on")
    asked = words.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = {
            str(count): measured(Path(name) / str(count), count, asked.checkpointing) for count in COUNTS
        }
    if asked.output:
        told = {
            "what": "GRPO update of one group: forward and backward, float32, log-probs in tiles",
            "device": f"CPU, {platform.machine()}, one thread",
            "command": f"python benchmarks/policy_peak.py --checkpointing {asked.checkpointing} -o FILE",
            "versions": {one: version(one) for one in ("torch", "transformers")},
            "prompt_tokens": PROMPT,
            "completion_tokens": COMPLETION,
            "activation_checkpointing": asked.checkpointing,
            "model": MODEL,
            "completions": found,
        }
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text(json.dumps(told, indent=1) + "\n")


def measured(folder: Path, count: int, checkpointing: str) -> dict[str, dict[str, float]]:
    """Figures of both forms for one group of `count` completions."""
    folder.mkdir()
    draw = random.Random(0)
    prompt = "Ana has" + "".join(draw.choice(WORDS) for _ in range(PROMPT + 50))
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "1"}) + "\n")
    recipe: dict[str, Any] = {
        "method": "grpo",
        "model": {"config": MODEL, "tokenizer": "builtin:tiny"},
        "data": {"train": str(folder / "prompts.jsonl"), "cache_dir": str(folder / "cache")},
        "length": {"max_length": 4096, "max_prompt": PROMPT},
        "generate": {"completions": count, "max_tokens": COMPLETION},
        "rewards": {"functions": "exact_answer"},
        "memory": {"activation_checkpointing": checkpointing},
        "train": {"batch_rows": count, "micro_rows": count, "max_steps": 1},
        "cluster": {"device": "cpu", "threads": 1},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    figures = {form: one_form(folder, count, overrides) for form, overrides in FORMS.items()}
    for form, one in figures.items():
        print(f"k={count:2}  {form:16} {one['activations_mib']:8.1f} MiB {one['seconds']:7.2f} s", flush=True)
    return figures


def one_form(folder: Path, count: int, overrides: list[str]) -> dict[str, float]:
    """Tokens of the update, its peak above the weights (gradients included), and its time."""
    plan = make_plan(load_recipe(str(folder / "recipe.yaml"), overrides), run_dir=str(folder / "run")).plan
    built = build(plan)
    prompts = cast(PromptFeed, built.train)
    tokens = count * COMPLETION
    feed = PolicyFeed(prompts, plan.settings, Norms(count, tokens, tokens, COMPLETION))
    feed.window = one_group(prompts, count)
    (answers,) = feed.deal(np.arange(count), micro_rows=count, micro_tokens=None)
    begun = time.process_time()
    with TensorPeak() as counted:
        forward_backward(
            built.scorer,
            built.method,
            [feed.micro_batch(answers)],
            denominator=float(tokens),
            engine=Engine(),
            num_micros=1,
            want_stats=False,
        )
    return {
        "tokens": int(feed.tokens.sum()),
        "activations_mib": round(counted.peak_bytes / 2**20, 1),
        "seconds": round(time.process_time() - begun, 2),
    }


def one_group(prompts: PromptFeed, count: int) -> Window:
    """Random completions of the prompt, with advantages that sum to zero."""
    draw = np.random.default_rng(0)

    def sample() -> Sample:
        return Sample(tuple(draw.integers(0, 500, COMPLETION).tolist()), (-1.0,) * COMPLETION, "length")

    window = new_window(0, [0], [0], [prompts.ids(0)], [[sample() for _ in range(count)]], 1)
    window.advantage_A = np.resize(np.array([1.0, -1.0], np.float32), count)
    return window


if __name__ == "__main__":
    main()
