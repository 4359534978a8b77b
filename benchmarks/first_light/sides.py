"""One side of the comparison with TRL, in a process of its own: a round of steps for each line it is given.

python -m first_light.sides memtrain|trl JOB.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

Job = dict[str, Any]


class Rounds:
    """The pipe to the stage: waits for its word, then measures so many steps."""

    def __init__(self, job: Job) -> None:
        self.pipe = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.is_cuda = job["device"] == "cuda"
        self.steps, self.rounds, self.made = job["steps"], job["rounds"], 0
        self.tokens, self.loss = 0, 0.0

    def wait_for_word(self) -> None:
        """The next round begins when the stage says so."""
        if not sys.stdin.readline():
            os._exit(0)
        self._settle()
        self.tokens, self.began = 0, time.perf_counter()

    def step(self, tokens: int, loss: float) -> None:
        """A step is done."""
        self.made += 1
        self.tokens += tokens
        self.loss = loss
        if self.made % self.steps:
            return
        self._settle()
        took = time.perf_counter() - self.began
        peak = torch.cuda.max_memory_allocated() if self.is_cuda else 0
        said = {"tokens": self.tokens, "seconds": took, "peak_bytes": peak, "loss": self.loss}
        self.pipe.write(json.dumps(said) + "\n")
        self.pipe.flush()
        self.wait_for_word()

    def _settle(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def run_memtrain(job: Job) -> None:
    """Steps as `memtrain sft` makes them, by its own plan."""
    from memtrain.cli.plan.make_plan import make_plan
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.trainers.build.bare_steps import Stepper
    from memtrain.trainers.build.components import build
    from memtrain.trainers.build.engine import make_accelerator

    loaded = load_recipe(
        job["recipe"], [*job["overrides"], f"train.max_steps={job['steps'] * job['rounds']}"]
    )
    plan = make_plan(loaded, run_dir=str(Path(job["work"]) / "side-run")).plan
    make_accelerator(plan.settings)
    stepper = Stepper(plan, build(plan))
    rounds = Rounds(job)
    rounds.wait_for_word()
    for number in range(job["steps"] * job["rounds"]):
        made = stepper.step(number)
        rounds.step(made.num_tokens, made.loss)


def run_trl(job: Job) -> None:
    """TRL's `SFTTrainer` at its defaults for these rows: padded batches, bfloat16, the gradients' checkpoints
    as its configuration has them."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    cuda = job["device"] == "cuda"
    seen = {"tokens": 0, "loss": 0.0}
    rounds = Rounds(job)

    class Counted(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            mask = inputs.get("attention_mask")
            seen["tokens"] += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
            loss = super().training_step(model, inputs, *rest)
            seen["loss"] += float(loss)
            return loss

    class Clock(TrainerCallback):
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            rounds.wait_for_word()

        def on_step_end(self, *given: Any, **named: Any) -> None:
            rounds.step(int(seen["tokens"]), seen["loss"])
            seen.update(tokens=0, loss=0.0)

    config = SFTConfig(
        output_dir=str(Path(job["work"]) / "trl"),
        max_length=job["max_length"],
        per_device_train_batch_size=job["batch"],
        max_steps=job["steps"] * job["rounds"] + 1,
        train_sampling_strategy="sequential",
        model_init_kwargs={"dtype": "bfloat16" if cuda else "float32"},
        use_cpu=not cuda,
        bf16=cuda,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    peft_config = None
    if job["lora"]:
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    Counted(
        model=job["model"],
        args=config,
        train_dataset=Dataset.from_list(rows),
        peft_config=peft_config,
        callbacks=[Clock()],
    ).train()


def main() -> None:
    """Run one side."""
    side, path = sys.argv[1:]
    job: Job = json.loads(Path(path).read_text())
    {"memtrain": run_memtrain, "trl": run_trl}[side](job)


if __name__ == "__main__":
    main()
