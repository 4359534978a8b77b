"""One side of the comparison with TRL: a supervised run in this process, measured the same way for both.

    python benchmarks/sft_sides.py memtrain|trl JOB.json RESULT.json

Run by `sft_vs_trl.py`, each side with the Python of its own environment. The job is a dict of that file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASE = """\
method: sft
optim: {schedule: cosine, warmup_steps: 0, weight_decay: 0.0, max_grad_norm: 1.0}
cluster: {device: cpu, processes: 1, threads: 1}
memory: {measure_peaks: false}
"""


def resident_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def measured(train: Callable[[], None], *, count_tensors: bool) -> dict[str, float]:
    """Peak of the resident memory above what the imports left, and of live tensors where they are counted."""
    Path("/proc/self/clear_refs").write_text("5")  # The high-water mark begins anew.
    before = resident_bytes("VmRSS")
    counted = contextlib.nullcontext()
    if count_tensors:
        sys.path.append(str(ROOT))
        from memtrain.trainers.memory_meter.live_tensors import TensorPeak

        counted = TensorPeak()
    with counted as counter:
        train()
    peak = {"rss_growth_bytes": resident_bytes("VmHWM") - before, "rss_bytes": resident_bytes("VmHWM")}
    return peak | ({"tensor_bytes": counter.peak_bytes} if count_tensors else {})


def run_memtrain(job: dict[str, Any]) -> dict[str, Any]:
    """`memtrain sft`, in this process."""
    # Imports are not part of the measurement.
    import memtrain.trainers.loop.worker  # noqa: F401
    import memtrain.trainers.methods.sft  # noqa: F401
    from memtrain.__main__ import main
    from memtrain.trainers.build import step

    cpu_s: list[float] = []
    update = step.update

    def clocked(*given: Any, **named: Any) -> Any:
        norm = update(*given, **named)
        cpu_s.append(time.process_time())
        return norm

    step.update = clocked

    folder = Path(job["folder"])
    recipe = folder / "recipe.yaml"
    recipe.write_text(BASE)
    given = {
        "model.path": job["model"],
        "data.train": job["data"],
        "length.max_length": job["max_length"],
        "length.padding_free": str(job["mode"] != "padded").lower(),
        "length.packing": "bfd" if job["mode"] == "bfd" else "none",
        "optim.lr": job["lr"],
        "train.batch_size": job["batch_size"],
        "train.micro_batch_size": job["micro_batch_size"],
        "train.max_steps": job["steps"],
        "train.shuffle": str(job["shuffle"]).lower(),
        "train.seed": job["seed"],
        "memory.activation_checkpointing": "on" if job["checkpointing"] else "off",
    }
    words = ["sft", str(recipe), "--run-dir", str(folder / "run"), "--no-resume"]
    words += [f"{key}={value}" for key, value in given.items()]
    said = io.StringIO()

    def train() -> None:
        with contextlib.redirect_stdout(said):
            code = main(words)
        assert code == 0, said.getvalue()

    peak = measured(train, count_tensors=job["count_tensors"])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    steps = [line for line in lines if line["kind"] == "step"]
    return peak | {
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "tokens": [step["tokens"] for step in steps],
        "ended_s": [step["time"] for step in steps],
        "cpu_s": cpu_s,
        "sequences": next(line["sequences"] for line in lines if line["kind"] == "data"),
    }


def run_trl(job: dict[str, Any]) -> dict[str, Any]:
    """TRL's `SFTTrainer`, as `trl sft` builds it, in this process."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    reported: dict[str, list[float]] = {
        "losses": [],
        "grad_norms": [],
        "tokens": [],
        "ended_s": [],
        "cpu_s": [],
    }
    step: dict[str, float] = {"loss": 0.0, "tokens": 0}

    class Recorded(SFTTrainer):
        def training_step(self, model, inputs, *rest):
            mask = inputs.get("attention_mask")
            step["tokens"] += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
            loss = super().training_step(model, inputs, *rest)
            step["loss"] += float(loss)  # Already divided by the tokens of the whole step.
            return loss

    class Clock(TrainerCallback):
        def on_log(self, args, state, control, logs, **given):
            if "grad_norm" in logs:  # Before clipping.
                reported["grad_norms"].append(float(logs["grad_norm"]))

        def on_step_end(self, args, state, control, **given):
            reported["ended_s"].append(time.time())
            reported["cpu_s"].append(time.process_time())
            reported["losses"].append(step["loss"])
            reported["tokens"].append(step["tokens"])
            step.update(loss=0.0, tokens=0)

    config = SFTConfig(
        output_dir=str(Path(job["folder"]) / "trl"),
        # It refuses to cut rows that it does not pad; the job has none to cut.
        max_length=None if job["mode"] == "padding-free" else job["max_length"],
        packing=job["mode"] == "bfd",
        packing_strategy="bfd",
        padding_free=job["mode"] == "padding-free",
        per_device_train_batch_size=job["micro_batch_size"],
        gradient_accumulation_steps=-(-job["batch_size"] // job["micro_batch_size"]),
        learning_rate=job["lr"],
        lr_scheduler_type="cosine",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=job["steps"],
        seed=job["seed"],
        train_sampling_strategy="random" if job["shuffle"] else "sequential",
        gradient_checkpointing=job["checkpointing"],
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    built: dict[str, Any] = {}

    def train() -> None:
        rows = load_dataset("json", data_files=job["data"], split="train")
        trainer = Recorded(model=job["model"], args=config, train_dataset=rows, callbacks=[Clock()])
        built["sequences"] = len(trainer.train_dataset)
        trainer.train()
        trainer.save_model()

    with contextlib.redirect_stdout(io.StringIO()):
        peak = measured(train, count_tensors=job["count_tensors"])
    return peak | reported | built


def versions(side: str) -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = ["torch", "transformers", "accelerate"] + (["trl"] if side == "trl" else [])
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def main() -> None:
    """Run one side and write what it measured."""
    side, job_path, result_path = sys.argv[1:]
    job = json.loads(Path(job_path).read_text())
    os.chdir(job["folder"])
    result = {"memtrain": run_memtrain, "trl": run_trl}[side](job)
    result |= {"versions": versions(side), "threads": threading.active_count()}
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
