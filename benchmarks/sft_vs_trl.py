"""Supervised fine-tuning beside TRL: the same weights, tokenizer, rows, order, batch and schedule.

    python -m venv trl-env && trl-env/bin/pip install trl==1.16.0 torch==2.13.0
    python benchmarks/sft_vs_trl.py --trl trl-env/bin/python [--gsm8k train.jsonl] [--repeats 3]
    python benchmarks/sft_vs_trl.py --trl trl-env/bin/python --record tests/runs/data/trl_sft_losses.json

Losses are compared step by step. Speed and memory are ratios of medians over repetitions in which the two
sides take turns: absolute figures of a shared machine say little. Speed is tokens over the time between the
ends of the first and the last step, of one thread: CPU time, and beside it the clock on the wall, which on a
shared machine tells of the others. Memory is the peak of the resident set above what the imports left, and,
in a run of its own that is not timed, the peak of live tensors, both by the same meter on both sides.
A later call adds its rows to the results, in the place of rows of the same model, data and mode.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result_files import write_result

HERE = Path(__file__).resolve().parent
SIDES = ("memtrain", "trl")
MODES = ("padded", "padding-free", "bfd")
MODELS: dict[str, dict[str, int]] = {
    "0.9M": {"hidden": 128, "inner": 384, "layers": 4, "heads": 4},
    "11M, 32k words": {"hidden": 256, "inner": 688, "layers": 4, "heads": 4, "words": 32_000},
    "25M": {"hidden": 512, "inner": 1376, "layers": 8, "heads": 8},
}
RECORDED = {"hidden": 32, "inner": 64, "layers": 2, "heads": 2}
MAX_LENGTH = 256


def wave_weights(model: Any) -> None:
    """Fill a model with numbers that need no random generator: the same on every machine and version."""
    import torch

    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            index = torch.arange(parameter.numel(), dtype=torch.float64)
            wave = torch.sin(index * 0.7390851332 + number).reshape(parameter.shape)
            parameter.copy_(1.0 + 0.1 * wave if parameter.ndim == 1 else 0.05 * wave)


def save_model(folder: Path, shape: dict[str, int], *, is_wave: bool = False) -> None:
    """A Llama of `shape` with the built-in tokenizer, as both sides load it: random weights, or waves.

    Waves are the same with every version of torch, as the recorded losses need. But they are nearly of one
    rank: a wide model of them is thrown about by its first steps, which turns rounding into differences.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    config = LlamaConfig(
        vocab_size=shape.get("words", len(tokenizer)),
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=max(1, shape["heads"] // 2),
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if is_wave:
        wave_weights(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def counting_rows(num_rows: int) -> list[dict[str, str]]:
    """Made-up rows of long-tailed lengths, without a random generator."""
    lengths = [1 + (7 * n * n + 3 * n) % 29 for n in range(num_rows)]
    return [
        {"prompt": f"Count to {n}:", "completion": " " + " ".join(str(i) for i in range(1, n + 1))}
        for n in lengths
    ]


def arithmetic_rows(num_rows: int) -> list[dict[str, str]]:
    """The built-in word problems, as prompt and completion."""
    from memtrain.trainers.data.sources.builtin_arithmetic import rows

    return [{key: str(value) for key, value in row.items()} for row in rows(num_rows, 0, "prompt_completion")]


def gsm8k_rows(path: Path, num_rows: int) -> list[dict[str, str]]:
    """The first rows of GSM8K, as prompt and completion."""
    lines = [json.loads(line) for line in path.open()][: 4 * num_rows]
    return [{"prompt": f"{row['question']}\n", "completion": row["answer"]} for row in lines]


def write_rows(rows: list[dict[str, str]], path: Path, num_rows: int) -> None:
    """The first rows that fit in MAX_LENGTH: TRL cuts nothing off padding-free rows."""
    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    fits = [
        row for row in rows if len(tokenizer(row["prompt"] + row["completion"])["input_ids"]) < MAX_LENGTH
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in fits[:num_rows]))


def run_side(side: str, python: str, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run of one side in a process of its own."""
    mine = folder / side
    mine.mkdir(exist_ok=True)
    (mine / "job.json").write_text(json.dumps(job | {"folder": str(mine)}))
    words = [python, str(HERE / "sft_sides.py"), side, str(mine / "job.json"), str(mine / "result.json")]
    cache = {"HF_HOME": str(folder / "hub"), "MEMTRAIN_CACHE": str(folder / "cache")}
    given = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    given |= {"PYTHONPATH": str(HERE.parent)} if side == "memtrain" else {}
    ended = subprocess.run(words, env=os.environ | cache | given, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{ended.stderr[-4000:]}")
    return json.loads((mine / "result.json").read_text())


def tokens_per_s(result: dict[str, Any], clock: str = "cpu_s") -> float:
    """Tokens of all steps but the first, over the time they took: of the CPU, or of the clock on the wall."""
    return sum(result["tokens"][1:]) / (result[clock][-1] - result[clock][0])


def largest_gap(one: list[float], other: list[float]) -> float:
    """Largest difference of two curves; NaN when they have not the same number of steps."""
    if len(one) != len(other):
        return math.nan
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def compare(job: dict[str, Any], pythons: dict[str, str], folder: Path, repeats: int) -> dict[str, Any]:
    """Run both sides in turns; the losses, and the ratios memtrain : TRL."""
    timed: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for repeat in range(repeats):
        for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
            timed[side].append(run_side(side, pythons[side], job, folder))
    counted = {
        side: run_side(side, pythons[side], job | {"count_tensors": True, "steps": 3}, folder)
        for side in SIDES
    }
    ours, theirs = timed["memtrain"], timed["trl"]
    speeds = {
        clock: [
            tokens_per_s(one, clock) / tokens_per_s(other, clock)
            for one, other in zip(ours, theirs, strict=True)
        ]
        for clock in ("cpu_s", "ended_s")
    }
    growth = [a["rss_growth_bytes"] / b["rss_growth_bytes"] for a, b in zip(ours, theirs, strict=True)]
    return {
        "mode": job["mode"],
        "steps": job["steps"],
        "batch_size": job["batch_size"],
        "micro_batch_size": job["micro_batch_size"],
        "loss_first_last": [ours[0]["losses"][0], ours[0]["losses"][-1]],
        "largest_loss_difference": largest_gap(ours[0]["losses"], theirs[0]["losses"]),
        "largest_grad_norm_difference": largest_gap(ours[0]["grad_norms"], theirs[0]["grad_norms"]),
        "sequences": {side: timed[side][0]["sequences"] for side in SIDES},
        "tokens_per_cpu_s": {
            side: statistics.median(tokens_per_s(one) for one in timed[side]) for side in SIDES
        },
        "speed_ratio": {"median": statistics.median(speeds["cpu_s"]), "all": speeds["cpu_s"]},
        "wall_speed_ratio": {"median": statistics.median(speeds["ended_s"]), "all": speeds["ended_s"]},
        "rss_growth_mib": {
            side: statistics.median(one["rss_growth_bytes"] for one in timed[side]) / 2**20 for side in SIDES
        },
        "rss_growth_ratio": {"median": statistics.median(growth), "all": growth},
        "tensor_mib": {side: counted[side]["tensor_bytes"] / 2**20 for side in SIDES},
        "tensor_ratio": counted["memtrain"]["tensor_bytes"] / counted["trl"]["tensor_bytes"],
    }


def job_of(mode: str, model: Path, data: Path, **changes: Any) -> dict[str, Any]:
    """A job for `sft_sides.py`; nothing is shuffled."""
    plain = {
        "mode": mode,
        "model": str(model),
        "data": str(data),
        "max_length": MAX_LENGTH,
        "batch_size": 8,
        "micro_batch_size": 8,
        "steps": 12,
        "lr": 1e-3,
        "seed": 0,
        "shuffle": False,
        "checkpointing": True,
        "count_tensors": False,
    }
    return plain | changes


def whole_epoch(job: dict[str, Any], python: str, folder: Path) -> dict[str, Any]:
    """With packing, a step takes every sequence: the two sides fill them in another order."""
    probe = run_side("trl", python, job | {"steps": 1, "batch_size": job["micro_batch_size"]}, folder)
    return job | {"batch_size": probe["sequences"]}


def record(out: Path, pythons: dict[str, str], folder: Path) -> None:
    """Write TRL's losses on made-up rows: what a test holds memtrain to, without TRL."""
    model, data = folder / "model", folder / "rows.jsonl"
    save_model(model, RECORDED, is_wave=True)
    write_rows(counting_rows(40), data, 40)
    cases = {}
    for mode in MODES:
        job = job_of(mode, model, data, max_length=96, batch_size=8, micro_batch_size=4, lr=3e-3)
        if mode == "bfd":
            job = whole_epoch(job | {"micro_batch_size": 2}, pythons["trl"], folder)
        result = run_side("trl", pythons["trl"], job, folder)
        named = {
            key: job[key] for key in ("mode", "max_length", "batch_size", "micro_batch_size", "steps", "lr")
        }
        cases[mode] = named | {key: result[key] for key in ("losses", "grad_norms", "sequences")}
    reported = {"command": command(), "versions": result["versions"], "shape": RECORDED, "cases": cases}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_result(out, reported)


def command() -> str:
    """The command line, without the paths of this machine."""
    words = [Path(word).name if "/" in word else word for word in sys.argv]
    return shlex.join(["python", *words])


def environment() -> dict[str, Any]:
    """Where it was measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
    )
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "device": f"{names[0].split(':')[1].strip()}, {os.cpu_count()} cores, 1 thread used",
        "system": platform.platform(),
        "commit": commit.stdout.strip(),
        "command": command(),
        "load_average": list(os.getloadavg()),
    }


def main() -> None:
    """Compare, or record what the test needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl", required=True, help="Python of the environment with TRL")
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "sft_vs_trl.json")
    asked = parser.parse_args()
    pythons = {"memtrain": sys.executable, "trl": asked.trl}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.record:
            record(asked.record, pythons, folder)
            return
        rows = {"arithmetic": arithmetic_rows(400)}
        if asked.gsm8k:
            rows = {"gsm8k": gsm8k_rows(asked.gsm8k, 96)}
        for size in asked.models:
            save_model(folder / size, MODELS[size])
            for source in rows:
                data = folder / f"{source}.jsonl"
                write_rows(rows[source], data, 96)
                for mode in asked.modes:
                    steps = 12 if size == "0.9M" else 5
                    job = job_of(mode, folder / size, data, steps=steps)
                    if mode == "bfd":
                        fewer = {"micro_batch_size": 2, "steps": steps // 2}
                        job = whole_epoch(job | fewer, pythons["trl"], folder)
                    reported = {"model": size, "data": source} | compare(job, pythons, folder, asked.repeats)
                    reported |= {"environment": environment(), "versions": run_versions(folder)}
                    print(json.dumps(reported), flush=True)
                    keep(asked.out, reported)


def keep(out: Path, reported: dict[str, Any]) -> None:
    """Put one row into the results, in the place of the one of the same model, data and mode."""
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    names = ("model", "data", "mode")
    rows = [row for row in rows if any(row[name] != reported[name] for name in names)] + [reported]
    write_result(out, {"rows": rows})


def run_versions(folder: Path) -> dict[str, Any]:
    """Versions of both sides, from their last results."""
    return {side: json.loads((folder / side / "result.json").read_text())["versions"] for side in SIDES}


if __name__ == "__main__":
    main()
