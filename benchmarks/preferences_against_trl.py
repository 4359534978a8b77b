"""Loss curves of dpo, kto and reward against TRL's, on the same weights, rows and order.

python benchmarks/preferences_against_trl.py --trl /path/to/python-with-trl -o benchmarks/results/....json

Both train every weight of the same small random model in float32 on the CPU, in the same order, with the same
optimizer and a constant learning rate. What differs on purpose: this project computes a prompt once for both
answers and lays rows end to end; TRL pads and computes it twice. KTO's mismatched pairs are those of TRL when
a step is one micro-batch, as here. TRL's reward head stays in the model's dtype, which is float32 here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from result_files import write_result

METHODS = ("dpo", "kto", "reward")
STEPS, BATCH, LR = 30, 8, 1e-3
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
}


def main() -> None:
    """Run both and write the curves."""
    words = argparse.ArgumentParser()
    words.add_argument("--trl", help="a Python with trl")
    words.add_argument("-o", "--output", type=Path)
    words.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    words.add_argument("--method", help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.method:
        print(json.dumps({"trl": version("trl"), "losses": by_trl(asked.method, asked.folder)}))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        curves = {method: both(method, folder, asked.trl) for method in METHODS}
    reported = {
        "what": "training loss of every step",
        "device": f"CPU, {platform.machine()}, one thread",
        "command": "python benchmarks/preferences_against_trl.py --trl PYTHON -o FILE",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "steps": STEPS,
        "batch_size": BATCH,
        "lr": LR,
        "curves": curves,
    }
    for method, curve in curves.items():
        print(f"{method:8} largest difference of a step's loss: {curve['largest_difference']:.2e}")
    if asked.output:
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        write_result(asked.output, reported)


def prepare(folder: Path) -> None:
    """One set of weights for each head, and rows, that both sides read."""
    import torch
    from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.sources.builtin_arithmetic import rows
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), bos_token_id=None, **special, **CONFIG)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "lm")
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "score")
    for head in ("lm", "score"):
        tokenizer.save_pretrained(folder / head)
    for form in ("preference", "unpaired"):
        made = [json.dumps(row) for row in rows(STEPS * BATCH, 0, form)]
        (folder / f"{form}.jsonl").write_text("\n".join(made) + "\n")


def both(method: str, folder: Path, trl_python: str) -> dict[str, Any]:
    """The two curves of one method."""
    ours = by_memtrain(method, folder)
    words = [trl_python, __file__, "--method", method, "--folder", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    theirs = json.loads(done.stdout.splitlines()[-1])
    pairs = zip(ours, theirs["losses"], strict=True)
    largest = max(abs(one - other) for one, other in pairs)
    return {
        "memtrain": ours,
        "trl": theirs["losses"],
        "trl_version": theirs["trl"],
        "largest_difference": largest,
    }


def by_memtrain(method: str, folder: Path) -> list[float]:
    """Losses of the steps of `memtrain METHOD`."""
    recipe = {
        "method": method,
        "model": {"path": str(folder / ("score" if method == "reward" else "lm"))},
        "data": {"train": str(folder / f"{form_of(method)}.jsonl"), "cache_dir": str(folder / "cache")},
        "length": {"max_length": None},
        "optim": {"lr": LR, "schedule": "constant", "warmup_steps": 0},
        "train": {"batch_size": BATCH, "max_steps": STEPS, "shuffle": False},
        "cluster": {"device": "cpu", "threads": 1},
    }
    path, run = folder / f"{method}.yaml", folder / f"run-{method}"
    path.write_text(json.dumps(recipe))
    words = [sys.executable, "-m", "memtrain", method, str(path), "--run-dir", str(run)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def form_of(method: str) -> str:
    """The format of the rows."""
    return "unpaired" if method == "kto" else "preference"


def by_trl(method: str, folder: Path) -> list[float]:
    """Losses of the steps of TRL's trainer; runs in the other Python."""
    import torch
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import load_dataset
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward"}[method]
    model = folder / ("score" if method == "reward" else "lm")
    rows = str(folder / f"{form_of(method)}.jsonl")
    config = getattr(trl, f"{name}Config")(
        output_dir=str(folder / f"trl-{method}"),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=1,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_length=None,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        train_sampling_strategy="sequential",
        disable_tqdm=True,
    )
    trainer = getattr(trl, f"{name}Trainer")(
        model=str(model),
        args=config,
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    if method == "reward":
        # The trainer would draw a head of its own.
        from transformers import AutoModelForSequenceClassification

        own = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        trainer.model.load_state_dict(own.state_dict())
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main()
