"""What a prompt computed once saves a DPO step: peak of live tensors and processor time, by prompt : answer.

python benchmarks/shared_prompts.py -o benchmarks/results/shared_prompts.json

The same step of the same random model in three forms: prompt once, prompt for each answer end to end, and
padded rows (the usual form). The reference is precomputed in all three, activations are kept. Processor time
of one thread, so that other work on the machine counts little; the peak does not depend on the machine.
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
from typing import Any

import torch
from result_files import write_result

from memtrain.cli.plan.make_plan import make_plan
from memtrain.recipes.reading.load import load_recipe
from memtrain.trainers.build.components import build
from memtrain.trainers.build.step import OptimizerStep
from memtrain.trainers.memory_meter.live_tensors import TensorPeak
from memtrain.trainers.protocols.feed import Steps

TOTAL = 640
"""Tokens of a prompt with one answer."""
SHARES = {"4:1": 0.8, "1:1": 0.5, "1:4": 0.2}
FORMS = {
    "prompt once": [],
    "end to end": ["length.shared_prompts=false"],
    "padded": ["length.shared_prompts=false", "length.padding_free=false"],
}
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
WORDS = (" apples", " books", " coins", " eggs", " pens", " plums", " shells", " stamps")


def main() -> None:
    """Measure every form at every share and write the figures."""
    words = argparse.ArgumentParser()
    words.add_argument("-o", "--output", type=Path)
    asked = words.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        found = {
            share: measured(Path(name) / share.replace(":", "-"), part) for share, part in SHARES.items()
        }
    for share, forms in found.items():
        for form, figures in forms.items():
            print(f"{share}  {form:12} {figures['activations_mib']:8.1f} MiB {figures['seconds']:7.2f} s")
    if asked.output:
        reported = {
            "what": "one DPO step of two pairs: forward and backward, float32, no checkpointing",
            "device": f"CPU, {platform.machine()}, one thread",
            "command": "python benchmarks/shared_prompts.py -o FILE",
            "versions": {one: version(one) for one in ("torch", "transformers")},
            "tokens_of_a_prompt_with_one_answer": TOTAL,
            "model": MODEL,
            "prompt:answer": found,
        }
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        write_result(asked.output, reported)


def measured(folder: Path, prompt_share: float) -> dict[str, dict[str, float]]:
    """Figures of the three forms; answers differ in length by a tenth, as padding has to pay for."""
    folder.mkdir()
    draw = random.Random(0)
    prompt, answer = round(TOTAL * prompt_share), round(TOTAL * (1 - prompt_share))
    rows = [
        {
            "prompt": "Ana has" + text(draw, prompt),
            "chosen": "\n" + text(draw, answer),
            "rejected": "\n" + text(draw, round(answer * 0.9)),
        }
        for _ in range(2)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    recipe: dict[str, Any] = {
        "method": "dpo",
        "model": {"config": MODEL, "tokenizer": "builtin:tiny"},
        "data": {"train": str(folder / "pairs.jsonl"), "cache_dir": str(folder / "cache")},
        "length": {"max_length": 4096},
        "memory": {"activation_checkpointing": "off"},
        "train": {"batch_size": 2, "micro_batch_size": 2, "max_steps": 1},
        "cluster": {"device": "cpu", "threads": 1},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return {form: one_form(folder, overrides) for form, overrides in FORMS.items()}


def text(draw: random.Random, count: int) -> str:
    """About `count` tokens."""
    return "".join(draw.choice(WORDS) for _ in range(count))


def one_form(folder: Path, overrides: list[str]) -> dict[str, float]:
    """Tokens of the step, the peak above the weights, and the faster of two passes."""
    plan = make_plan(load_recipe(str(folder / "recipe.yaml"), overrides), run_dir=str(folder / "run")).plan
    built = build(plan)
    work = Steps(built.train, plan.settings, 0, False).work(0, rank=0, num_ranks=1)
    batch = built.train.micro_batch(work.sequences)

    def step() -> float:
        begun = time.process_time()
        one_step = OptimizerStep(built.scorer, built.method, built.optimizer, ())
        one_step.passes([batch], denominator=work.denominator, num_micro_batches=1, want_stats=False)
        built.scorer.zero_grad()
        return time.process_time() - begun

    with TensorPeak() as counted:
        step()
    return {
        "tokens": work.num_tokens,
        "activations_mib": round(counted.peak_bytes / 2**20, 1),
        "seconds": round(min(step() for _ in range(2)), 2),
    }


if __name__ == "__main__":
    main()
