"""Memory and time of a DPO step beside TRL's, by prompt : answer, in one run of both, in turns.

    python -m venv trl-env && trl-env/bin/pip install trl==1.16.0 torch==2.13.0
    python benchmarks/pairs_against_trl.py --trl trl-env/bin/python -o FILE

The same weights, pairs, order and optimizer; the reference's log-probs are computed before training on both
sides, activations are kept, a step is one micro-batch. Three forms: memtrain with the prompt once, memtrain
with the prompt for each answer, and `DPOTrainer`, which pads. Every form and share runs in a process of its
own. Memory: the resident set's peak during the steps above what it was before the first (so with gradients
and AdamW's state, without imports, model and data), and the peak of live tensors made in the last step, both
by the same meter on both sides. Time: the median over steps 2 to 5 of the CPU time of one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from result_files import write_result

ROOT = Path(__file__).resolve().parents[1]
SHARES = {"4:1": 0.8, "1:1": 0.5, "1:4": 0.2}
FORMS = {
    "prompt once": ("memtrain", []),
    "prompt for each answer": ("memtrain", ["length.shared_prompts=false"]),
    "trl": ("trl", []),
}
TOTAL, PAIRS, STEPS, LR = 640, 2, 6, 1e-4
"""Tokens of a prompt with one answer; pairs of a step; steps, of which the last one is counted, not timed."""
CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
NOTE = (
    "resident_mib compares: tensors_mib of trl holds a buffer of its loss that is made as wide as a block of "
    "a large vocabulary, of which pages that are never written take no memory"
)
WORDS = (" apples", " books", " coins", " eggs", " pens", " plums", " shells", " stamps")


def main() -> None:
    """Run everything in turns and write the figures."""
    words = argparse.ArgumentParser()
    words.add_argument("--trl", help="a Python with trl")
    words.add_argument("--repeats", type=int, default=2)
    words.add_argument("-o", "--output", type=Path)
    words.add_argument("--side", nargs=3, help=argparse.SUPPRESS, metavar=("FORM", "FOLDER", "RESULT"))
    asked = words.parse_args()
    if asked.side:
        form, folder, result = asked.side
        run = by_memtrain if FORMS[form][0] == "memtrain" else by_trl
        Path(result).write_text(json.dumps(run(Path(folder), FORMS[form][1])))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_parameters = save_model(folder / "model")
        for share, part in SHARES.items():
            write_pairs(folder / share.replace(":", "-"), part)
        found = {share: {form: [] for form in FORMS} for share in SHARES}
        for repeat in range(asked.repeats):
            for share in SHARES:
                for form in FORMS if repeat % 2 == 0 else reversed(FORMS):
                    found[share][form].append(one_run(form, folder / share.replace(":", "-"), asked.trl))
    reported = {share: summary(forms) for share, forms in found.items()}
    for share, forms in reported.items():
        for form, figures in forms.items():
            print(f"{share}  {form:24}", *(f"{key} {value}" for key, value in figures.items()), sep="  ")
    if asked.output:
        write_result(asked.output, about(num_parameters, asked.repeats) | {"prompt:answer": reported})


def about(num_parameters: int, repeats: int) -> dict[str, Any]:
    """What was run, and where."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "what": "DPO steps: forward, backward, AdamW; float32, every weight, no checkpointing",
        "device": f"CPU, {platform.machine()}, one thread",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "command": "python benchmarks/pairs_against_trl.py --trl PYTHON -o FILE",
        "versions": {one: version(one) for one in ("torch", "transformers")} | {"trl": "1.16"},
        "note": NOTE,
        "parameters": num_parameters,
        "tokens_of_a_prompt_with_one_answer": TOTAL,
        "pairs_of_a_step": PAIRS,
        "repeats": repeats,
    }


def summary(forms: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians over the repetitions, and how far the losses of the forms are from TRL's."""
    theirs = forms["trl"][0]["losses"]
    reported = {}
    for form, runs in forms.items():
        gap = max(abs(one - other) for one, other in zip(runs[0]["losses"], theirs, strict=True))
        reported[form] = {
            "resident_mib": round(statistics.median(run["resident_bytes"] for run in runs) / 2**20, 1),
            "tensors_mib": round(statistics.median(run["tensor_bytes"] for run in runs) / 2**20, 1),
            "step_s": round(statistics.median(s for run in runs for s in run["step_s"]), 3),
            "largest_loss_gap_to_trl": float(f"{gap:.1e}"),
        }
    return reported


def save_model(folder: Path) -> int:
    """A random Qwen3 with the built-in tokenizer, as both sides load it; how many weights it has."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), bos_token_id=None, **special, **CONFIG))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def write_pairs(folder: Path, prompt_share: float) -> None:
    """Pairs whose answers differ in length by a tenth, as padding has to pay for."""
    folder.mkdir()
    draw = random.Random(0)
    prompt, answer = round(TOTAL * prompt_share), round(TOTAL * (1 - prompt_share))

    def text(count: int) -> str:
        return "".join(draw.choice(WORDS) for _ in range(count))

    rows = [
        {
            "prompt": "Ana has" + text(prompt),
            "chosen": "\n" + text(answer),
            "rejected": "\n" + text(round(answer * 0.9)),
        }
        for _ in range(PAIRS * STEPS)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def one_run(form: str, folder: Path, trl_python: str) -> dict[str, Any]:
    """One form in a process of its own."""
    python = trl_python if FORMS[form][0] == "trl" else sys.executable
    result = folder / "result.json"
    words = [python, __file__, "--side", form, str(folder), str(result)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env |= {"HF_HOME": str(folder / "hub"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(result.read_text())


class Meter:
    """Resident memory over all steps, CPU time of each, and the live tensors of the last one."""

    def __init__(self) -> None:
        self.number = 0
        self.times: list[float] = []
        self.counting = ExitStack()
        self.counted: Any = None

    def begins(self) -> None:
        """Before a step."""
        if self.number == 0:
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # What loading left behind would hide growth.
            Path("/proc/self/clear_refs").write_text("5")  # The high-water mark begins anew.
            self.resident = resident_bytes("VmRSS")
        if self.number == STEPS - 1:
            from memtrain.trainers.memory_meter.live_tensors import TensorPeak

            self.peak = resident_bytes("VmHWM") - self.resident
            self.counted = self.counting.enter_context(TensorPeak())
        self.begun = time.process_time()

    def ends(self) -> None:
        """After a step."""
        self.times.append(time.process_time() - self.begun)
        self.number += 1
        if self.number == STEPS:
            self.counting.close()

    def reported(self, losses: list[float]) -> dict[str, Any]:
        """Everything that was measured."""
        return {
            "resident_bytes": self.peak,
            "tensor_bytes": self.counted.peak_bytes,
            "step_s": self.times[1 : STEPS - 1],
            "losses": losses,
        }


def resident_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def by_memtrain(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """`memtrain dpo`, in this process."""
    from memtrain.__main__ import main as memtrain
    from memtrain.trainers.loop import loop

    recipe = {
        "method": "dpo",
        "model": {"path": str(folder.parent / "model")},
        "data": {"train": str(folder / "pairs.jsonl"), "cache_dir": str(folder / "cache")},
        "length": {"max_length": None},
        "dpo": {"reference": "precomputed"},
        "memory": {"activation_checkpointing": "off", "measure_peaks": False},
        "optim": {"lr": LR, "schedule": "constant", "warmup_steps": 0},
        "train": {"batch_size": PAIRS, "micro_batch_size": PAIRS, "max_steps": STEPS, "shuffle": False},
        "cluster": {"device": "cpu", "threads": 1},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    meter, plain = Meter(), loop.one_step

    def one_step(*given: Any) -> Any:
        meter.begins()
        made = plain(*given)
        meter.ends()
        return made

    loop.one_step = one_step
    run = Path(tempfile.mkdtemp(dir=folder))
    if memtrain(["dpo", str(folder / "recipe.yaml"), "--run-dir", str(run), *overrides]):
        raise SystemExit("the run failed")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return meter.reported([line["loss"] for line in lines if line["kind"] == "step"])


def by_trl(folder: Path, overrides: list[str]) -> dict[str, Any]:
    """`DPOTrainer`, in this process of another Python."""
    import torch
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(1)
    model, meter = str(folder.parent / "model"), Meter()

    class Metered(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.begins()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.ends()

    config = trl.DPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        per_device_train_batch_size=PAIRS,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        precompute_ref_log_probs=True,
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
    trainer = trl.DPOTrainer(
        model=model,
        args=config,
        train_dataset=load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Metered()],
    )
    trainer.train()
    return meter.reported([line["loss"] for line in trainer.state.log_history if "loss" in line])


if __name__ == "__main__":
    main()
