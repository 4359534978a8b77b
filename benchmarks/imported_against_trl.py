"""Three steps of each method by TRL, and by the recipe that `memtrain import` makes of the same script.

python -m venv trl-env && trl-env/bin/pip install trl==1.16.0 torch==2.13.0 peft
python benchmarks/imported_against_trl.py --trl trl-env/bin/python [--methods dpo orpo ...]

A script for each method is written, run as it stands, and imported as it stands; the recipe is trained with
nothing changed but the run folder. Rows are as many as a step takes, so that no order matters; float32 on a
processor. Printed are both losses of every step. ORPO's are apart by what its import tells: TRL counts the
likelihood of prompts too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sft_vs_trl import save_model

HERE = Path(__file__).resolve().parent
SHAPE = {"hidden": 64, "inner": 128, "layers": 2, "heads": 4}
MOST_APART = 2e-4
"""Largest difference of two losses: float32 in another order, in three steps of an optimizer."""

PAIR = {"prompt": "2 + 2 =", "chosen": " 4, because two and two", "rejected": " 5"}
ROWS = {
    "sft": [{"prompt": f"{n} + 1 =", "completion": f" {n + 1} is one more" * n} for n in (1, 2, 3, 4)],
    "dpo": [{**PAIR, "prompt": f"{n} + {n} =", "chosen": f" {2 * n}" * n} for n in (1, 2, 3, 4)],
    "kto": [{"prompt": f"{n} =", "completion": f" {n}" * n, "label": n % 2 == 0} for n in (1, 2, 3, 4)],
}
_SIMPO = "loss_type='simpo', cpo_alpha=0.0, simpo_gamma=0.7, beta=2.0"
CASES: dict[str, tuple[str, str, str, str]] = {
    "sft": ("trl", "SFT", "sft", ""),
    "dpo": ("trl", "DPO", "dpo", "beta=0.2"),
    "kto": ("trl", "KTO", "kto", ""),
    "reward": ("trl", "Reward", "dpo", ""),
    "orpo": ("trl.experimental.orpo", "ORPO", "dpo", "beta=0.3"),
    "cpo": ("trl.experimental.cpo", "CPO", "dpo", "cpo_alpha=0.5"),
    "simpo": (
        "trl.experimental.cpo",
        "CPO",
        "dpo",
        _SIMPO,
    ),
}
"""Module of the trainer, its name, its rows, and more arguments."""

SCRIPT = """\
import json

from datasets import load_dataset
from transformers import AutoTokenizer
from {module} import {name}Config, {name}Trainer

args = {name}Config(
    output_dir="{folder}/trl",
    per_device_train_batch_size=4,
    num_train_epochs=3,
    learning_rate=1e-3,
    max_length=64,
    bf16=False,
    use_cpu=True,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    {more}
)
rows = load_dataset("json", data_files="{folder}/rows.jsonl", split="train")
trainer = {name}Trainer(
    model="{folder}/model",
    args=args,
    train_dataset=rows,
    processing_class=AutoTokenizer.from_pretrained("{folder}/model"),
)
trainer.train()
print("LOSSES", json.dumps([one["loss"] for one in trainer.state.log_history if "loss" in one]))
"""


def main() -> int:
    """Print the losses of both sides; 1 where they are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl", required=True, help="the interpreter that has TRL")
    parser.add_argument("--methods", nargs="+", default=[*CASES], choices=[*CASES])
    given = parser.parse_args()
    apart = 0
    for case in given.methods:
        with tempfile.TemporaryDirectory() as folder:
            theirs, ours = both_sides(case, Path(folder), given.trl)
        gap = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
        apart += gap > MOST_APART
        print(
            f"{case:8} TRL {theirs}  memtrain {[round(one, 6) for one in ours]}  apart {gap:.1e}", flush=True
        )
    return int(apart > 0)


def both_sides(case: str, folder: Path, trl: str) -> tuple[list[float], list[float]]:
    """(TRL's losses, memtrain's) of the steps of a script."""
    module, name, rows, more = CASES[case]
    save_model(folder / "model", SHAPE)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS[rows])))
    script = folder / "train.py"
    script.write_text(SCRIPT.format(module=module, name=name, folder=folder, more=more))
    said = run([trl, str(script)])
    theirs = json.loads(said.partition("LOSSES ")[2].splitlines()[0])
    recipe, made = folder / "recipe.yaml", folder / "run"
    run([sys.executable, "-m", "memtrain", "import", str(script), "-o", str(recipe)])
    method = next(line for line in recipe.read_text().splitlines() if line.startswith("method")).split()[1]
    run([sys.executable, "-m", "memtrain", method, str(recipe), f"run_dir={made}"])
    lines = map(json.loads, (made / "metrics.jsonl").read_text().splitlines())
    return theirs, [one["loss"] for one in lines if "loss" in one]


def run(words: list[str]) -> str:
    """What a command says. Its environment is this one's, without the tracker of TRL's own."""
    made = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    if made.returncode:
        raise SystemExit(f"{' '.join(words)}\n{made.stdout[-2000:]}\n{made.stderr[-3000:]}")
    return made.stdout


if __name__ == "__main__":
    sys.exit(main())
