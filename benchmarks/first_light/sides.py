"""One side of the comparison with TRL, in a process of its own: a round of steps for each line it is given.

python -m first_light.sides memtrain|trl JOB.json GIVEN

GIVEN is JSON: `overrides` of the recipe, or `config` of TRL. The first line that it writes is what it uses.
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
        self.tokens: int = 0
        self.losses: list[float] = []

    def begin(self, used: Job) -> None:
        """Say what is used, now that all is built, and wait for the first word."""
        self._say(used)
        self.wait_for_word()

    def wait_for_word(self) -> None:
        """The next round begins when the stage says so."""
        if not sys.stdin.readline():
            os._exit(0)
        self._settle()
        self.tokens, self.losses, self.began = 0, [], time.perf_counter()

    def step(self, tokens: int, loss: float) -> None:
        """A step is done."""
        self.made += 1
        self.tokens += tokens
        self.losses.append(loss)
        if self.made % self.steps:
            return
        self._settle()
        took = time.perf_counter() - self.began
        peak = torch.cuda.max_memory_allocated() if self.is_cuda else 0
        said = {"tokens": self.tokens, "seconds": took, "peak_bytes": peak, "losses": self.losses}
        self._say(said)
        self.wait_for_word()

    def _say(self, said: Job) -> None:
        self.pipe.write(json.dumps(said) + "\n")
        self.pipe.flush()

    def _settle(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def run_memtrain(job: Job) -> None:
    """Steps as `memtrain sft` makes them, by its own plan."""
    from memtrain.cli.plan.make_plan import make_plan
    from memtrain.memory.strategies.registry import used_in
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.trainers.build.bare_steps import Stepper
    from memtrain.trainers.build.components import build
    from memtrain.trainers.build.engine import make_accelerator

    steps = job["steps"] * job["rounds"]
    loaded = load_recipe(job["recipe"], [*job["overrides"], f"train.max_steps={steps}"])
    plan = make_plan(loaded, run_dir=str(Path(job["work"]) / f"side-run-{os.getpid()}")).plan
    make_accelerator(plan.settings)
    stepper = Stepper(plan, build(plan))
    rounds = Rounds(job)
    settings = plan.settings.model_dump(mode="json")
    told = ("attention", "dtype", "master_weights", "copies", "liger", "loss_kernel", "micro_batch_size")
    told += ("micro_tokens", "optimizer_in_backward")
    strategies = [one.name for one in used_in(plan.settings)]
    rounds.begin({"strategies": strategies} | {name: settings.get(name) for name in told})
    for number in range(steps):
        made = stepper.step(number)
        rounds.step(made.num_tokens, made.loss)


def run_trl(job: Job) -> None:
    """TRL's `SFTTrainer` on these rows: its defaults but for `config`, at a constant rate as the other."""
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
            rounds.begin(used_by(trainer))

        def on_step_end(self, *given: Any, **named: Any) -> None:
            rounds.step(int(seen["tokens"]), seen["loss"])
            seen.update(tokens=0, loss=0.0)

    config: dict[str, Any] = {
        "output_dir": str(Path(job["work"]) / f"trl-{os.getpid()}"),
        "max_length": job["max_length"],
        "per_device_train_batch_size": job["batch"],
        "max_steps": job["steps"] * job["rounds"] + 1,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "model_init_kwargs": {"dtype": "bfloat16" if cuda else "float32"},
        "use_cpu": not cuda,
        "bf16": cuda,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    # Liger's kernels are Triton's: a stand-in rehearses the rest.
    given = {key: value for key, value in job["config"].items() if cuda or key != "use_liger_kernel"}
    peft_config = None
    if job["lora"]:
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    trainer = Counted(
        model=job["model"],
        args=SFTConfig(**config | given),
        train_dataset=Dataset.from_list(rows),
        peft_config=peft_config,
        callbacks=[Clock()],
    )
    trainer.train()


def used_by(trainer: Any) -> Job:
    """What a trainer of TRL was set to, and the dtypes of its weights."""
    names = ("gradient_checkpointing", "use_liger_kernel", "packing", "packing_strategy", "padding_free")
    names += ("per_device_train_batch_size", "optim", "learning_rate", "bf16")
    used = {name: getattr(trainer.args, name) for name in names}
    dtypes = {str(one.dtype) for one in trainer.model.parameters() if one.requires_grad}
    return {
        "attention": trainer.model.config._attn_implementation,
        "trained_dtypes": sorted(dtypes),
        **{
            name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in used.items()
        },
    }


def main() -> None:
    """Run one side."""
    side, path, given = sys.argv[1:]
    job: Job = json.loads(Path(path).read_text())
    more: Job = json.loads(given)
    job |= {"overrides": [*job["overrides"], *more["overrides"]], "config": more["config"]}
    {"memtrain": run_memtrain, "trl": run_trl}[side](job)


if __name__ == "__main__":
    main()
