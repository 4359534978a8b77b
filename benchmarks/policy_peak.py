"""Peak memory of a GRPO update on one long prompt with k completions, against the duplicated form and TRL's.

    python benchmarks/policy_peak.py --trl TRL_PYTHON -o benchmarks/results/policy_peak.json

The same prompt, completions, advantages and weights for all, log-probs of the completions and their gradients
in one micro-batch, float32, a tiny model. Each figure is made in a process of its own: the most bytes of live
tensors above the weights, gradients included (TensorPeak), and the CPU time of the update.
`short` is ours with a prompt of 8 tokens: what is left when it is taken off is the prompt's share.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from result_files import write_result

PROMPT, COMPLETION, SHORT = 3100, 128, 8
COUNTS = (2, 4, 8, 16)
SIDES = ("ours", "duplicated", "short", "trl")
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def commit() -> str:
    """The commit that is measured."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Measure every side at every k and write the figures; or, as a child, one of them."""
    words = argparse.ArgumentParser()
    words.add_argument("--trl", type=Path, help="the Python of an environment with TRL 1.16")
    words.add_argument("-o", "--output", type=Path)
    words.add_argument("--checkpointing", choices=("on", "off"), default="off")
    words.add_argument("--one", nargs=2, metavar=("SIDE", "JOB"))
    asked = words.parse_args()
    if asked.one:
        print(json.dumps(one_side(asked.one[0], json.loads(Path(asked.one[1]).read_text()))))
        return
    assert asked.trl is not None, "The other side needs its Python."
    with tempfile.TemporaryDirectory() as name:
        found = {str(count): at(Path(name), count, asked.trl, asked.checkpointing) for count in COUNTS}
    reported = {
        "what": "GRPO update of one group: MiB of live tensors above the weights, gradients included",
        "device": f"CPU, {platform.machine()}, one thread",
        "command": "python benchmarks/policy_peak.py --trl TRL_PYTHON -o FILE"
        + (" --checkpointing on" if asked.checkpointing == "on" else ""),
        "commit": commit(),
        "versions": {one: version(one) for one in ("torch", "transformers")} | {"trl": "1.16.0"},
        "prompt_tokens": PROMPT,
        "completion_tokens": COMPLETION,
        "activation_checkpointing": asked.checkpointing,
        "model": MODEL,
        "completions": found,
        "prompt_share_mib": {
            k: round(one["ours"]["peak_mib"] - one["short"]["peak_mib"], 1) for k, one in found.items()
        },
    }
    if asked.output:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        write_result(asked.output, reported)


def at(folder: Path, count: int, trl: Path, checkpointing: str) -> dict[str, dict[str, float]]:
    """Figures of all sides for one group of `count` completions."""
    draw = random.Random(0)
    prompt = [draw.randrange(5, 500) for _ in range(PROMPT)]
    job = {
        "prompt": prompt,
        "completions": [[draw.randrange(5, 500) for _ in range(COMPLETION)] for _ in range(count)],
        "checkpointing": checkpointing,
        "folder": str(folder),
        "model": str(folder / "model"),
    }
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    if not (folder / "model").exists():
        child(Path(sys.executable), "model", file)
    figures: dict[str, dict[str, float]] = {}
    for side in SIDES:
        figures[side] = child(trl if side == "trl" else Path(sys.executable), side, file)
        one = figures[side]
        print(f"k={count:2}  {side:11} {one['peak_mib']:8.1f} MiB {one['cpu_s']:7.2f} s", flush=True)
    return figures


def child(python: Path, side: str, job: Path) -> dict[str, float]:
    """One figure, made by another process."""
    done = subprocess.run(
        [str(python), __file__, "--one", side, str(job)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def one_side(side: str, job: dict[str, Any]) -> dict[str, float]:
    """The figure of one side, in this process."""
    if side == "model":
        return make_model(job)
    return of_trl(job) if side == "trl" else of_memtrain(side, job)


def make_model(job: dict[str, Any]) -> dict[str, float]:
    """Random weights and a tokenizer that all sides load."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODEL, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(job["model"])
    tokenizer.save_pretrained(job["model"])
    return {}


def of_memtrain(side: str, job: dict[str, Any]) -> dict[str, float]:
    """The update of `memtrain grpo`: each prompt once, or for each completion."""
    import numpy as np

    from memtrain.cli.plan.make_plan import make_plan
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.trainers.batches.prompt_batches import PromptFeed
    from memtrain.trainers.build.components import build
    from memtrain.trainers.build.step import OptimizerStep
    from memtrain.trainers.losses.policy.registry import Norms
    from memtrain.trainers.memory_meter.live_tensors import TensorPeak
    from memtrain.trainers.online.generation.protocol import Sample
    from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed, new_window

    folder, completions = Path(job["folder"]), job["completions"]
    count, prompt = len(completions), job["prompt"][: SHORT if side == "short" else PROMPT]
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "Ana has 1 plum.", "answer": "1"}) + "\n")
    recipe: dict[str, Any] = {
        "method": "grpo",
        "model": {"path": job["model"]},
        "data": {"train": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache")},
        "length": {"max_length": 4096, "shared_prompts": side != "duplicated"},
        "generate": {"num_generations": count, "max_tokens": COMPLETION},
        "rewards": {"functions": "exact_answer"},
        "memory": {"activation_checkpointing": job["checkpointing"]},
        "train": {"batch_size": count, "micro_batch_size": count, "max_steps": 1},
        "cluster": {"device": "cpu", "threads": 1},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    plan = make_plan(load_recipe(str(folder / "recipe.yaml"), []), run_dir=str(folder / "run")).plan
    built = build(plan)
    tokens = count * COMPLETION
    feed = PolicyFeed(cast(PromptFeed, built.train), plan.settings, Norms(count, tokens, tokens, COMPLETION))
    samples = [[Sample(tuple(one), (-1.0,) * len(one), "length") for one in completions]]
    feed.window = new_window(0, [0], [0], [prompt], samples, 1)
    feed.window.advantage_A = np.resize(np.array([1.0, -1.0], np.float32), count)
    (answers,) = feed.deal(np.arange(count), micro_batch_size=count, micro_tokens=None)
    begun = time.process_time()
    with TensorPeak() as counted:
        step = OptimizerStep(built.scorer, built.method, built.optimizer, ())
        micro_batch = feed.micro_batch(answers)
        made = step.passes([micro_batch], denominator=float(tokens), num_micro_batches=1, want_stats=False)
    assert float(made["loss"]) < 1, "The update went through."
    return reported(counted.peak_bytes, begun, int(feed.tokens.sum()), built.scorer.parameters())


def of_trl(job: dict[str, Any]) -> dict[str, float]:
    """The update of TRL's GRPOTrainer: its own loss on its own padded inputs."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from memtrain.trainers.memory_meter.live_tensors import TensorPeak

    completions, prompt = job["completions"], job["prompt"]
    count = len(completions)
    torch.set_num_threads(1)
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=lambda completions, **given: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=job["folder"] + "/trl",
            use_cpu=True,
            bf16=False,
            num_generations=count,
            per_device_train_batch_size=count,
            gradient_checkpointing=job["checkpointing"] == "on",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": "Ana has 1 plum."}]),
    )
    model = trainer.model.train()
    ids = torch.tensor(completions)
    inputs = {
        "prompt_ids": torch.tensor([prompt] * count),
        "prompt_mask": torch.ones(count, len(prompt), dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": torch.ones_like(ids),
        "advantages": torch.tensor([1.0, -1.0]).repeat(count // 2),
        "num_items_in_batch": torch.tensor(ids.numel()),
    }
    trainer.current_gradient_accumulation_steps = 1
    begun = time.process_time()
    with TensorPeak() as counted:
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
    return reported(counted.peak_bytes, begun, count * (len(prompt) + COMPLETION), model.parameters())


def reported(peak_bytes: int, begun: float, tokens: int, parameters: Iterable[Any]) -> dict[str, float]:
    """One figure, with the norm of the gradients: the sides must agree on it."""
    seconds = time.process_time() - begun
    squares = [float(one.grad.double().square().sum()) for one in parameters if one.grad is not None]
    return {
        "peak_mib": round(peak_bytes / 2**20, 1),
        "cpu_s": round(seconds, 2),
        "tokens": tokens,
        "grad_norm": float(f"{sum(squares) ** 0.5:.5g}"),
    }


if __name__ == "__main__":
    main()
