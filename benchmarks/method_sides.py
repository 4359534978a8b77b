"""One side of the comparison of methods with TRL: a run in this process, measured the same way for both.

    python benchmarks/method_sides.py memtrain|trl JOB.json RESULT.json

Run by `methods_vs_trl.py`, each side with the Python of its own environment. The job is a dict of that file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sft_sides import measured, versions

ONLINE = ("grpo", "rloo")
TRL_NAMES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO", "rloo": "RLOO"}


def verdict(completion_ids: Sequence[int]) -> float:
    """A reward that both sides compute alike: it says nothing, and differs within a group."""
    return sum(completion_ids) % 101 / 100


def rewards(completions: list[str], completion_ids: list[list[int]], **others: Any) -> list[float]:
    """The reward function of both sides."""
    return [verdict(ids) for ids in completion_ids]


def fixed_completion(prompt_ids: Sequence[int], number: int, longest: int) -> list[int]:
    """Completion `number` of a prompt, made up alike on both sides, at least half as long as the longest."""
    draw = random.Random(f"{sum(prompt_ids)} {len(prompt_ids)} {number}")
    return [draw.randrange(5, 500) for _ in range(draw.randint(longest // 2, longest))]


class Clock:
    """Processor time at the end of each step, gradients' norms, and tokens of completions."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self.grad_norms: list[float] = []
        self.completion_tokens = 0

    def ends(self) -> None:
        """After a step."""
        self.cpu_s.append(time.process_time())


def run_memtrain(job: dict[str, Any]) -> dict[str, Any]:
    """`memtrain METHOD`, in this process."""
    # Imports are not part of the measurement.
    import memtrain.trainers.loop.worker  # noqa: F401
    from memtrain.__main__ import main
    from memtrain.trainers.build import step
    from memtrain.trainers.online.generation.protocol import Sample
    from memtrain.trainers.online.rollout import online_loop as online

    clock, update = Clock(), step.update

    def clocked(*given: Any, **named: Any) -> Any:
        norm = update(*given, **named)
        clock.ends()
        return norm

    step.update = clocked
    own = online.OnlineSteps.written

    def made_up(group: Any) -> list[Sample]:
        ids = [fixed_completion(group.prompt_ids, n, job["max_tokens"]) for n in range(group.count)]
        return [Sample(tuple(one), (-1.0,) * len(one), "length") for one in ids]

    def written(
        self: Any, groups: Any, sampling: Any, *on_done: Any, phase: str = "generation"
    ) -> list[list[Sample]]:
        if job["fixed"]:
            made = [made_up(group) for group in groups]
            for emit in filter(None, on_done):
                for number, group in enumerate(made):
                    emit(number, group)
        else:
            made = own(self, groups, sampling, *on_done, phase=phase)
        clock.completion_tokens += sum(len(one.token_ids) for group in made for one in group)
        return made

    setattr(online.OnlineSteps, "written", written)  # noqa: B010
    folder = Path(job["folder"])
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_of(job, folder)))
    said = io.StringIO()

    def train() -> None:
        with contextlib.redirect_stdout(said):
            code = main([job["method"], str(recipe), "--run-dir", str(folder / "run"), "--no-resume"])
        assert code == 0, said.getvalue()

    begun = time.process_time()
    peak = measured(train, count_tensors=False)
    whole_s = time.process_time() - begun
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    steps = [line for line in lines if line["kind"] == "step"]
    return peak | {
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "cpu_s": clock.cpu_s,
        "completion_tokens": clock.completion_tokens,
        "whole_s": whole_s,
    }


def recipe_of(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe of a job: what TRL is reported too, and else what the plan chooses."""
    method = job["method"]
    own: dict[str, Any] = {}
    if method in ONLINE:
        (folder / "judge.py").write_text(
            f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nfrom method_sides import rewards\n"
        )
        own = {
            "generate": {
                "num_generations": job["group"],
                "max_tokens": job["max_tokens"],
                # Made-up completions have no log-probs of a sampler.
                **({"max_logprob_gap": None} if job["fixed"] else {}),
            },
            "rewards": {"functions": f"{folder / 'judge.py'}:rewards"},
        }
    if method in ("dpo", "kto"):
        own = {method: {"reference": "precomputed"}}
    return own | {
        "method": method,
        "model": {"path": job["model"]},
        "data": {"train": job["data"], "cache_dir": str(folder / "cache")},
        "length": {"max_length": 1024},
        "optim": {"lr": job["lr"], "schedule": "constant", "warmup_steps": 0},
        "train": {
            "batch_size": job["batch_size"],
            "micro_batch_size": job["batch_size"],
            "max_steps": job["steps"],
            "shuffle": False,
            "seed": job["seed"],
        },
        "log": {"final_sample": False},
        "memory": {"activation_checkpointing": "off", "measure_peaks": job.get("measure_peaks", False)},
        "cluster": {"device": "cpu", "processes": 1, "threads": 1},
    }


def run_trl(job: dict[str, Any]) -> dict[str, Any]:
    """TRL's trainer of the method, in this process."""
    import torch
    import trl  # pyright: ignore[reportMissingImports]
    import trl.trainer.utils  # pyright: ignore[reportMissingImports]
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(1)
    if job["compacts"]:
        # As where Triton runs: only trained positions go through the head.
        sys.modules["trl.trainer.utils"]._use_triton = lambda device: True  # pyright: ignore[reportAttributeAccessIssue]
    clock, name, method = Clock(), TRL_NAMES[job["method"]], job["method"]

    class Clocked(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.ends()

        def on_log(self, *_: Any, **given: Any) -> None:
            if "grad_norm" in given["logs"]:  # Before clipping.
                clock.grad_norms.append(float(given["logs"]["grad_norm"]))

    trainer_of: Callable[..., Any] = getattr(trl, f"{name}Trainer")
    config = getattr(trl, f"{name}Config")(**trl_words(job))
    made: dict[str, Any] = {}

    def train() -> None:
        rows = load_dataset("json", data_files=job["data"], split="train")
        extra = {"reward_funcs": rewards} if method in ONLINE else {}
        made["trainer"] = trainer = trainer_of(
            model=job["model"],
            args=config,
            train_dataset=rows,
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
            callbacks=[Clocked()],
            **extra,
        )
        if method in ONLINE:
            with_counted_completions(trainer, job, clock)
        if method == "reward":
            same_head(trainer, job["model"])
        trainer.train()
        trainer.save_model()

    begun = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        peak = measured(train, count_tensors=False)
    whole_s = time.process_time() - begun
    losses = [line["loss"] for line in made["trainer"].state.log_history if "loss" in line]
    return peak | {
        "losses": losses,
        "grad_norms": clock.grad_norms,
        "cpu_s": clock.cpu_s,
        "completion_tokens": clock.completion_tokens,
        "whole_s": whole_s,
    }


def trl_words(job: dict[str, Any]) -> dict[str, Any]:
    """The configuration of TRL's trainer: what the recipe says, and else its defaults."""
    method = job["method"]
    words: dict[str, Any] = {
        "output_dir": str(Path(job["folder"]) / "trl"),
        "per_device_train_batch_size": job["batch_size"],
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "max_steps": job["steps"],
        "learning_rate": job["lr"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        # Both sides save the optimizer's states after the last step, and then the model.
        "save_strategy": "steps",
        "save_steps": job["steps"],
        "disable_tqdm": True,
        "seed": job["seed"],
        "model_init_kwargs": {"dtype": "float32"},
    }
    if method in ONLINE:
        return words | {
            "num_generations": job["group"],
            "max_completion_length": job["max_tokens"],
            "steps_per_generation": 1,
            "shuffle_dataset": False,
        }
    words |= {"max_length": 1024, "train_sampling_strategy": "sequential"}
    return words | ({"precompute_ref_log_probs": True} if method in ("dpo", "kto") else {})


def with_counted_completions(trainer: Any, job: dict[str, Any], clock: Clock) -> None:
    """Count a trainer's completions, which are made up where the job says so."""
    own, is_pair = trainer._generate_single_turn, job["method"] == "grpo"

    def made_up(prompt_ids: list[list[int]]) -> list[list[int]]:
        seen: dict[tuple[int, ...], int] = {}
        made: list[list[int]] = []
        for ids in prompt_ids:
            number = seen[tuple(ids)] = seen.get(tuple(ids), -1) + 1
            made.append(fixed_completion(ids, number, job["max_tokens"]))
        return made

    def counted(prompt_ids: list[list[int]], *others: Any, **named: Any) -> Any:
        if job["fixed"]:
            made: Any = (made_up(prompt_ids), None) if is_pair else made_up(prompt_ids)
        else:
            made = own(prompt_ids, *others, **named)
        clock.completion_tokens += sum(map(len, made[0] if is_pair else made))
        return made

    trainer._generate_single_turn = counted


def same_head(trainer: Any, model: str) -> None:
    """The reward head of the saved model: the trainer would draw one of its own."""
    from transformers import AutoModelForSequenceClassification

    own = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    trainer.model.load_state_dict(own.state_dict())


def main() -> None:
    """Run one side and write what it measured."""
    side, job_path, result_path = sys.argv[1:]
    job = json.loads(Path(job_path).read_text())
    os.chdir(job["folder"])
    result = {"memtrain": run_memtrain, "trl": run_trl}[side](job)
    Path(result_path).write_text(json.dumps(result | {"versions": versions(side)}))


if __name__ == "__main__":
    main()
