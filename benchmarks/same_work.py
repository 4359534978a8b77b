"""The same work by memtrain, TRL and Unsloth: steps on the same rows, and RLOO on long prompts, in turns.

    python benchmarks/same_work.py --out FOLDER                   # on a card: under five minutes
    python benchmarks/same_work.py --out FOLDER --trl PYTHON      # TRL from another environment
    python benchmarks/same_work.py --out FOLDER --unsloth SCRIPT  # Unsloth, by a script of one JSON line
    python benchmarks/same_work.py --out FOLDER --stand-in        # on a CPU, tiny models: figures say nothing

Rows are exactly as long as the case says and every token is learned; models have real shapes and random
weights. The sides take turns, alone on the card: each case is a process of its own, forked from one that has
imported what the side needs, so that nothing of the case before is left. Of each step the time, the time for
which the device was busy by torch's profiler (one step after those that are timed), and the peak of tensors.
memtrain steps eagerly and captured; where it cannot capture, the file says why. `--limit-s` ends the turns:
what was not reached says so. The result is FOLDER/same_work.json, with device, commit and versions.

RLOO: prompts of 3,100 tokens, 64 answered, k completions a prompt, one prompt a step: what TRL's pull request
3837 is about (shared prompts in the update). Sides alone, one after the other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM, TIMED = 4, 6
RLOO_STEPS = 3
PROMPT, COMPLETION = 3100, 64
LORA = {"r": 16, "alpha": 32}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NAMES = {"0.6B": "qwen3-0.6b", "8B": "qwen3-8b"}
TINY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 40960,
    "vocab_size": 8192,
}
CASES: list[dict[str, Any]] = [
    {"kind": "steps", "size": "0.6B", "rows": 8, "tokens": 2048, "lora": True, "checkpointed": False},
    {"kind": "steps", "size": "8B", "rows": 4, "tokens": 2048, "lora": True, "checkpointed": False},
    {"kind": "steps", "size": "0.6B", "rows": 8, "tokens": 2048, "lora": False, "checkpointed": False},
    {"kind": "steps", "size": "8B", "rows": 4, "tokens": 2048, "lora": True, "checkpointed": True},
    *({"kind": "rloo", "size": "0.6B", "k": k, "checkpointed": False} for k in (2, 4, 8)),
]
SIDES = {
    "memtrain": ("memtrain.cli.plan.make_plan", "memtrain.trainers.build.bare_steps", "memtrain.__main__"),
    "trl": ("trl.trainer.sft_trainer", "trl.trainer.rloo_trainer", "datasets", "peft"),
}
"""What each side imports once, before its first turn. None of it may touch a device: a fork could not."""
PACKAGES = ("torch", "transformers", "trl", "peft", "liger-kernel", "triton", "accelerate", "unsloth")


def main() -> None:
    """Let the sides take turns, or be one of them."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the result")
    parser.add_argument("--trl", default=sys.executable, help="the Python of an environment with TRL")
    parser.add_argument(
        "--unsloth", type=Path, help="a script that times Unsloth, where its wheels are there"
    )
    parser.add_argument("--limit-s", type=float, default=290.0, help="seconds after which no turn begins")
    parser.add_argument("--only", choices=("steps", "rloo"), help="one part")
    parser.add_argument("--stand-in", action="store_true", help="a CPU and tiny models")
    parser.add_argument("--serve", nargs=2, metavar=("SIDE", "WORK"), help=argparse.SUPPRESS)
    parser.add_argument("--save", nargs=2, metavar=("SIZE", "WORK"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve[0], Path(asked.serve[1]))
        return
    if asked.save:
        save_weights(asked.save[0], Path(asked.save[1]))
        return
    if asked.out is None:
        parser.error("--out: the folder of the result")
    sys.path.insert(0, str(Path(__file__).parent))
    from result_files import write_result

    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        made = turns(asked, Path(name))
    write_result(asked.out / "same_work.json", made)
    print("\n".join(table(made)), flush=True)
    sys.exit(any("error" in one for one in made["turns"]))


def turns(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Every case by every side, in turns."""
    began = time.monotonic()
    prepare(work, stand_in=asked.stand_in)
    workers = {
        "memtrain": Worker("memtrain", sys.executable, work),
        "trl": Worker("trl", asked.trl, work),
    }
    found: list[dict[str, Any]] = []
    try:
        for case in CASES:
            if asked.only in (None, case["kind"]):
                own = small(case) if asked.stand_in else case
                found += list(of_case(own, workers, asked, work, began))
    finally:
        for one in workers.values():
            one.close()
    known = [one for one in found if "device" in one]
    words = [] if asked.only is None else ["--only", asked.only]
    return {
        "command": " ".join(["python benchmarks/same_work.py", *words, *["--stand-in"] * asked.stand_in]),
        "device": known[0]["device"] if known else "",
        "stands_in": asked.stand_in,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - began),
        "warm_steps": WARM,
        "timed_steps": TIMED,
        "versions": {one["side"]: one.pop("versions") for one in known if "versions" in one},
        "turns": found,
    }


def of_case(
    case: dict[str, Any], workers: dict[str, Worker], asked: argparse.Namespace, work: Path, began: float
) -> Iterator[dict[str, Any]]:
    """The sides of a case, one after the other."""
    for side in ("memtrain", "memtrain, captured", "trl", "unsloth"):
        left = asked.limit_s - (time.monotonic() - began)
        is_of_steps = case["kind"] == "steps"
        reason = ""
        if side == "unsloth":
            can = is_of_steps and case["lora"]
            reason = "not asked for" if asked.unsloth is None else "" if can else "no such form of it"
        elif side == "memtrain, captured" and not is_of_steps:
            continue
        if not reason and left <= 0:
            reason = f"no time left of {asked.limit_s:.0f} s"
        if reason:
            yield {"side": side, **case, "not_run": reason}
            continue
        if side == "unsloth":
            made = of_unsloth(case, asked.unsloth, work, left)
        else:
            name, _, form = side.partition(", ")
            made = workers[name].turn(case | {"captured": bool(form)}, left)
        print(json.dumps({"side": side, **made})[:300], flush=True)
        yield {"side": side, **case, **made}


class Worker:
    """A process that has imported a side, and forks one for each of its turns."""

    def __init__(self, side: str, python: str, work: Path) -> None:
        self.side = side
        self._log = (work / f"{side}.log").open("w")
        self._process = subprocess.Popen(
            [python, __file__, "--serve", side, str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def turn(self, case: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """What a case was, or the error that ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(case | {"limit_s": limit_s}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": f"{self.side} cannot be imported: {self._last_line()}"}
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": f"{self.side} ended: {self._last_line()}"}

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _last_line(self) -> str:
        lines = Path(self._log.name).read_text().strip().splitlines()
        return lines[-1][-300:] if lines else "it says nothing"


def serve(side: str, work: Path) -> None:
    """Import the side, then make a process for each line of standard input, and print its result."""
    answers = os.fdopen(os.dup(1), "w")
    # What libraries print is no result.
    os.dup2(2, 1)
    sys.path.insert(0, str(ROOT))
    for name in SIDES[side]:
        importlib.import_module(name)
    for line in sys.stdin:
        answers.write(json.dumps(in_a_fork(side, json.loads(line), work)) + "\n")
        answers.flush()


def in_a_fork(side: str, case: dict[str, Any], work: Path) -> dict[str, Any]:
    """A turn in a process of its own, whose memory is gone with it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal_after(case["limit_s"])
        try:
            made = {"memtrain": of_memtrain, "trl": of_trl}[side](case, work) | where()
        except BaseException as error:
            traceback.print_exc()
            made = {"error": f"{type(error).__name__}: {str(error).strip()[:600]}"}
        with os.fdopen(writer, "w") as out:
            out.write(json.dumps(made))
        sys.stderr.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return {"error": f"ended by signal {status & 127}: no time or no memory left"}
    return json.loads(text)


def signal_after(seconds: float) -> None:
    """End this process where it takes longer."""
    import signal

    signal.alarm(max(1, int(seconds)))


def where() -> dict[str, Any]:
    """Device and versions of a turn."""
    import torch

    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"device": torch.cuda.get_device_name() if cuda() else "cpu", "versions": found}


def cuda() -> bool:
    """Whether there is a card."""
    import torch

    return torch.cuda.is_available()


def wait() -> None:
    """Wait for the device."""
    import torch

    if cuda():
        torch.cuda.synchronize()


# Rows and models, the same for all sides.


def small(case: dict[str, Any]) -> dict[str, Any]:
    """A case as a CPU stands in for it."""
    return case | ({"rows": 2, "tokens": 64} if case["kind"] == "steps" else {"prompt": 48, "completion": 8})


def prepare(work: Path, *, stand_in: bool) -> None:
    """Configurations, a tokenizer, and prompts, in files that every side reads."""
    sys.path.insert(0, str(ROOT))
    from memtrain.memory.model_shape.known_models import known_config
    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    tokenizer.save_pretrained(work / "tokenizer")
    for size, name in NAMES.items():
        given = TINY if stand_in else dict(known_config(name) or {})
        folder = work / size
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(given))
    draw = random.Random(0)
    words = [tokenizer.decode([draw.randrange(300, len(tokenizer) - 1)]) for _ in range(2 * PROMPT)]
    for tokens in (PROMPT, 48):
        ids = tokenizer(" ".join(words))["input_ids"][:tokens]
        rows = [{"prompt": f"{n} {tokenizer.decode(ids)}"} for n in range(RLOO_STEPS + 1)]
        (work / f"prompts-{tokens}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_weights(size: str, work: Path) -> None:
    """A model of random weights with its tokenizer, for a side that loads both from a folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    with torch.device("cuda" if cuda() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(work / size), dtype=torch.bfloat16
        )
    model.save_pretrained(work / f"{size}-weights")
    AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(work / f"{size}-weights")


def rows_of(case: dict[str, Any]) -> list[dict[str, list[int]]]:
    """Rows of exactly as many tokens, one batch a step."""
    draw = random.Random(0)
    count = case["rows"] * (WARM + TIMED + 2)
    return [{"input_ids": [draw.randrange(20, 240) for _ in range(case["tokens"])]} for _ in range(count)]


def figures(seconds: list[float], tokens: int, busy_s: float | None, losses: list[float]) -> dict[str, Any]:
    """Of the timed steps: the median one."""
    step = statistics.median(seconds)
    return {
        "step_s": round(step, 5),
        "steps_s": [round(one, 5) for one in seconds],
        "tokens_per_s": round(tokens / step),
        "busy_s": None if busy_s is None else round(busy_s, 5),
        "busy_share": None if busy_s is None else round(busy_s / step, 3),
        "peak_gib": peak_gib(),
        "first_loss": losses[0],
    }


def peak_gib() -> float | None:
    """Peak of tensors of this process."""
    import torch

    return round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda() else None


@contextmanager
def profiled(found: list[float]) -> Iterator[None]:
    """The seconds in which any kernel of the block ran (on a CPU: any operator), added to `found`."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if cuda() else ProfilerActivity.CPU
    wait()
    with profile(activities=[kind]) as seen:
        yield
        wait()
    results = seen.profiler.kineto_results if seen.profiler is not None else None
    spans: list[tuple[int, int]] = []
    for event in results.events() if results is not None else ():
        is_kernel = event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
        if is_kernel if cuda() else event.name().startswith("aten::"):
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    found.append(covered(spans) / 1e9)


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds in any of the spans, each counted once."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


# memtrain.


def of_memtrain(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """A turn of memtrain."""
    return memtrain_rloo(case, work) if case["kind"] == "rloo" else memtrain_steps(case, work)


def memtrain_steps(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """Steps of the trainer's own, without a run folder."""
    from memtrain.cli.plan.make_plan import make_plan
    from memtrain.memory.strategies.registry import used_in
    from memtrain.recipes.reading.load import load_recipe
    from memtrain.trainers.build.bare_steps import Stepper
    from memtrain.trainers.build.components import build
    from memtrain.trainers.build.engine import make_accelerator

    data = work / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(case)))
    recipe = common_recipe("sft", case, work) | {
        "data": {"train": str(data), "cache_dir": str(work / "cache"), "completion_only_loss": False},
        "length": {"max_length": case["tokens"]},
        "train": {
            "batch_size": case["rows"],
            "micro_batch_size": case["rows"],
            "max_steps": WARM + TIMED + 1,
            "shuffle": False,
        },
    }
    if not captures(recipe, is_on=case["captured"]) and case["captured"]:
        return {"not_run": "this memtrain captures no step"}
    if not case["lora"]:
        recipe["optim"] = {"master_weights": False}
    plan = make_plan(load_recipe(written(recipe, work), []), run_dir=str(work / f"run-{os.getpid()}")).plan
    make_accelerator(plan.settings)
    stepper = Stepper(plan, build(plan))
    seconds, losses, busy = list[float](), list[float](), list[float]()
    for number in range(WARM + TIMED):
        wait()
        began = time.perf_counter()
        made = stepper.step(number)
        wait()
        losses.append(made.loss)
        if number >= WARM:
            seconds.append(time.perf_counter() - began)
    with profiled(busy):
        stepper.step(WARM + TIMED)
    settings = plan.settings
    return figures(seconds, case["rows"] * case["tokens"], busy[0], losses) | {
        "used": [one.name for one in used_in(settings)],
        "attention": str(settings.attention),
        "liger": settings.liger,
        "captures": settings.step_graphs,
    }


def captures(recipe: dict[str, Any], *, is_on: bool) -> bool:
    """Ask for captured steps, or for none; whether this memtrain knows of them."""
    from memtrain.recipes.sections.training import Train

    if "cuda_graphs" not in Train.model_fields:
        return False
    recipe["train"]["cuda_graphs"] = "on" if is_on else "off"
    return True


def common_recipe(method: str, case: dict[str, Any], work: Path) -> dict[str, Any]:
    """What the recipes of all cases say."""
    config = str(work / case["size"] / "config.json")
    model: dict[str, Any] = {"config": config, "tokenizer": "builtin:tiny"}
    model["dtype"] = "bfloat16" if cuda() else "float32"
    if case.get("lora", True):
        model["adapter"] = dict(LORA)
    kept = "on" if case["checkpointed"] else "off"
    return {
        "method": method,
        "model": model,
        "memory": {"oom_recovery": "off", "activation_checkpointing": kept},
        "cluster": {"device": "cuda" if cuda() else "cpu", "processes": 1},
    }


def written(recipe: dict[str, Any], work: Path) -> str:
    """A recipe's file."""
    path = work / f"recipe-{os.getpid()}.yaml"
    path.write_text(json.dumps(recipe))
    return str(path)


def memtrain_rloo(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """A run of `memtrain rloo`."""
    from memtrain.__main__ import main as memtrain

    prompt, completion, k = of_rloo(case)
    recipe = common_recipe("rloo", case, work) | {
        "data": {"train": str(work / f"prompts-{prompt}.jsonl"), "cache_dir": str(work / "cache")},
        "length": {"max_length": 2 * (prompt + completion)},
        "generate": {"num_generations": k, "max_tokens": completion},
        "rewards": {
            "functions": [{"function": "length", "args": {"longest": completion, "room": completion}}]
        },
        "train": {"batch_size": k, "micro_batch_size": k, "max_steps": RLOO_STEPS},
    }
    folder = work / f"run-{os.getpid()}"
    with highest_peak() as peak:
        code = memtrain(["rloo", written(recipe, work), "--run-dir", str(folder), "--no-resume"])
    if code != 0:
        raise RuntimeError(f"memtrain ended with {code}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    ended = [line["time"] for line in lines if line["kind"] == "step"]
    return {"step_s": round(ended[-1] - ended[-2], 4), "peak_gib": peak(), "steps": len(ended)}


def of_rloo(case: dict[str, Any]) -> tuple[int, int, int]:
    """(tokens of a prompt, of a completion, completions of a prompt)."""
    return case.get("prompt", PROMPT), case.get("completion", COMPLETION), case["k"]


@contextmanager
def highest_peak() -> Iterator[Callable[[], float | None]]:
    """The peak of tensors over the block, though a side begins it anew now and then."""
    import torch

    plain, seen = torch.cuda.reset_peak_memory_stats, [0]

    def noted(*given: Any, **named: Any) -> None:
        seen.append(torch.cuda.max_memory_allocated())
        plain(*given, **named)

    def found() -> float | None:
        return round(max(*seen, torch.cuda.max_memory_allocated()) / 2**30, 3) if cuda() else None

    torch.cuda.reset_peak_memory_stats = noted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield found
    finally:
        torch.cuda.reset_peak_memory_stats = plain


# TRL, as its own scripts build its trainers.


def of_trl(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """A turn of TRL."""
    return trl_rloo(case, work) if case["kind"] == "rloo" else trl_steps(case, work)


def trl_model(case: dict[str, Any], work: Path) -> tuple[Any, Any, Any]:
    """(model on the device, tokenizer, configuration of the adapter)."""
    import torch
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(work / case["size"])
    with torch.device("cuda" if cuda() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda() else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    if not case.get("lora", True):
        return model, tokenizer, None
    adapter = LoraConfig(r=LORA["r"], lora_alpha=LORA["alpha"], target_modules=TARGETS, task_type="CAUSAL_LM")
    return model, tokenizer, adapter


def trl_arguments(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """What the arguments of all its trainers say."""
    return {
        "output_dir": str(work / f"trl-{os.getpid()}"),
        "lr_scheduler_type": "constant",
        "use_cpu": not cuda(),
        "bf16": cuda(),
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": case["checkpointed"],
        "use_liger_kernel": cuda(),
        "optim": "adamw_torch_fused",
    }


def trl_steps(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """Steps of SFTTrainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer, adapter = trl_model(case, work)
    losses: list[float] = []

    class Recorded(SFTTrainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            losses.append(float(loss))
            return loss

    clock = clock_of(WARM, TIMED)
    given = trl_arguments(case, work) | {
        "max_length": case["tokens"],
        "per_device_train_batch_size": case["rows"],
        "max_steps": WARM + TIMED + 1,
    }
    trainer = Recorded(
        model=model,
        args=SFTConfig(**given),
        train_dataset=Dataset.from_list(rows_of(case)),
        peft_config=adapter,
        callbacks=[clock],
        processing_class=tokenizer,
    )
    trainer.train()
    reported = figures(clock.seconds, case["rows"] * case["tokens"], clock.busy[0], losses)
    dtypes = sorted({str(one.dtype)[6:] for one in trainer.model.parameters() if one.requires_grad})
    attention = trainer.model.config._attn_implementation
    return reported | {"attention": attention, "liger": given["use_liger_kernel"], "trained_in": dtypes}


def clock_of(warm: int, timed: int) -> Any:
    """A callback of transformers' trainer: seconds of the timed steps, and the busy time of the one after."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.busy: list[float] = []
            self._began, self._inside = 0.0, profiled(self.busy)

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            wait()
            if state.global_step == warm + timed:
                self._inside.__enter__()
            self._began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            wait()
            if warm < state.global_step <= warm + timed:
                self.seconds.append(time.perf_counter() - self._began)
            if state.global_step == warm + timed + 1:
                self._inside.__exit__(None, None, None)

    return Clock()


def trl_rloo(case: dict[str, Any], work: Path) -> dict[str, Any]:
    """A run of RLOOTrainer, its completions by transformers."""
    from datasets import load_dataset
    from trl import RLOOConfig, RLOOTrainer

    model, tokenizer, adapter = trl_model(case, work)
    prompt, completion, k = of_rloo(case)
    clock = clock_of(0, RLOO_STEPS)
    given = trl_arguments(case, work) | {
        "num_generations": k,
        "max_completion_length": completion,
        "per_device_train_batch_size": k,
        "max_steps": RLOO_STEPS,
    }
    given.pop("use_liger_kernel")
    files = str(work / f"prompts-{prompt}.jsonl")
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=lambda completions, **named: [float(len(one)) for one in completions],
        args=RLOOConfig(**given),
        train_dataset=load_dataset("json", data_files=files, split="train", cache_dir=str(work / "trl-data")),
        peft_config=adapter,
        callbacks=[clock],
        processing_class=tokenizer,
    )
    with highest_peak() as peak:
        trainer.train()
    return {"step_s": round(clock.seconds[-1], 4), "peak_gib": peak(), "steps": len(clock.seconds)}


# Unsloth, by a script of its own: its import changes transformers, and looks at the card.


def of_unsloth(case: dict[str, Any], script: Path, work: Path, limit_s: float) -> dict[str, Any]:
    """A turn of Unsloth: the script prints one JSON line, and one that begins with PROFILE."""
    folder = work / f"{case['size']}-weights"
    if not folder.is_dir():
        saved = subprocess.run(
            [sys.executable, __file__, "--save", case["size"], str(work)],
            capture_output=True,
            text=True,
            check=False,
        )
        if saved.returncode:
            return {"error": f"no weights for it: {saved.stderr.strip().splitlines()[-1:]}"}
    words = [str(folder), "--batch", str(case["rows"]), "--tokens", str(case["tokens"])]
    words += ["--checkpointing", "unsloth" if case["checkpointed"] else "False"]
    words += ["--warmup", str(WARM), "--steps", str(TIMED), "--limit", str(max(1, int(limit_s)))]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    found = next((json.loads(line) for line in lines if line.startswith('{"bench"')), None)
    if found is None or not found.get("ok"):
        said = (found or {}).get("error") or done.stderr.strip().splitlines()[-1:]
        return {"error": f"Unsloth: {said}"[:600]}
    seen = next((json.loads(line[8:]) for line in lines if line.startswith("PROFILE ")), {})
    busy = seen.get("device_ms_total")
    step = found["ms_per_step"] / 1000
    return {
        "step_s": round(step, 5),
        "tokens_per_s": round(found["tokens_per_s"]),
        "busy_s": None if busy is None else round(busy / 1000, 5),
        "busy_share": None if busy is None else round(busy / 1000 / step, 3),
        "peak_gib": round(found["peak_allocated_bytes"] / 2**30, 3),
        "first_loss": found["first_loss"],
        "device": found["device"],
        "versions": {name: one for name, one in found["versions"].items() if one},
    }


def commit() -> str:
    """The commit that is measured."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def table(made: dict[str, Any]) -> list[str]:
    """The result for people."""
    lines = [f"{made['device']}, commit {made['commit']}, {made['seconds']} s"]
    for one in made["turns"]:
        if one["kind"] == "steps":
            form = "LoRA" if one["lora"] else "all weights"
            kept = ", checkpointed" if one["checkpointed"] else ""
            case = f"{one['size']} {form}{kept}, {one['rows']} rows of {one['tokens']}"
        else:
            case = f"{one['size']} RLOO, k = {one['k']}"
        if "step_s" not in one:
            words = one.get("not_run") or one.get("error", "")
        else:
            speed = (
                f"{one['tokens_per_s']:,} tokens/s, busy {one['busy_share']:.0%}, " if "busy_s" in one else ""
            )
            words = f"{speed}{one['step_s']:.3f} s a step, peak {one['peak_gib']} GiB"
        lines.append(f"{case:45} {one['side']:20} {words}")
    return lines


if __name__ == "__main__":
    main()
