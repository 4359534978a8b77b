"""memtrain's SFT beside the bare loop of plain PyTorch, which is the limit: the tool's own cost of a step.

    python benchmarks/bare_loop.py [--models 0.9M 25M] [--steps 40] [--repeats 3]
    python benchmarks/bare_loop.py --meter    a step with its tensors counted over one without, step by step
    python benchmarks/bare_loop.py --parts    processor ms of the parts of the median step, of both sides

The bare loop is what one writes by hand, and nothing else: sdpa, transformers' own loss over all logits
of a row, fused AdamW, a clipped norm; no file is written and nothing is reported. All rows are of one
length and every token is trained on: nothing is padded and no position is left out, so that neither side
has less to do. memtrain runs as its plan chooses, with its meter of memory as it is by default, and
without it. The sides take turns in processes of their own, in the opposite order every other time, one
thread each, float32, the same weights and rows (random ids). `mean`: processor time from the end of the
first step to that of the last, over the steps between; the steps that the meter counts are among them.
`settled`: the median step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from method_sides import run_memtrain
from result_files import write_result
from sft_sides import versions
from sft_vs_trl import MODELS, environment, save_model

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "bare_loop.json"
SIDES = ("bare", "measured", "unmeasured")
"""memtrain's: with its meter of memory, and without."""
BATCH = 4
ROW_TOKENS = 192


def run_bare(job: dict[str, Any]) -> dict[str, Any]:
    """The plain loop."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(job["model"], attn_implementation="sdpa")
    model.train()
    rows = [json.loads(line)["input_ids"] for line in Path(job["data"]).read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], fused=True, weight_decay=0.0)
    cpu_s: list[float] = []
    for step in range(job["steps"]):
        ids_BT = torch.tensor(rows[step * BATCH : (step + 1) * BATCH])
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        cpu_s.append(time.process_time())
    return {"cpu_s": cpu_s}


def write_rows(path: Path, num_rows: int, seed: int, vocabulary: int) -> None:
    """Rows of random ids, all of one length."""
    draw = random.Random(seed)
    rows = ([draw.randrange(5, vocabulary) for _ in range(ROW_TOKENS)] for _ in range(num_rows))
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))


def counted_over_plain(size: str, folder: Path, pairs: int = 12) -> list[float]:
    """Shares by which a step takes longer with its tensors counted, of pairs in turns in one process."""
    import torch
    from transformers import AutoModelForCausalLM

    from memtrain.trainers.memory_meter.live_tensors import TensorPeak

    torch.set_num_threads(1)
    save_model(folder / size, MODELS[size])
    model = AutoModelForCausalLM.from_pretrained(folder / size, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids_BT = torch.randint(5, 500, (BATCH, ROW_TOKENS))

    def step(*, counts: bool) -> float:
        begun = time.process_time()
        with TensorPeak() if counts else nullcontext():
            model(input_ids=ids_BT, labels=ids_BT).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - begun

    for counts in (False, True):
        step(counts=counts)
    shares: list[float] = []
    for number in range(pairs):
        order = (False, True) if number % 2 else (True, False)
        taken = {counts: step(counts=counts) for counts in order}
        shares.append(round(taken[True] / taken[False] - 1, 4))
    return sorted(shares)


def timed(owner: Any, name: str, label: str, taken: dict[str, list[float]]) -> None:
    """From now on the processor time of each call of a function is kept."""
    plain = getattr(owner, name)

    def kept(*given: Any, **named: Any) -> Any:
        begun = time.process_time()
        try:
            return plain(*given, **named)
        finally:
            taken.setdefault(label, []).append(time.process_time() - begun)

    setattr(owner, name, kept)


def part_times(side: str, job: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of the layers' forward pass, the gradients whole, and the update, of the median step."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaModel

    taken: dict[str, list[float]] = {}
    timed(LlamaModel, "forward", "layers forward", taken)
    if side == "bare":
        timed(torch.Tensor, "backward", "backward", taken)
        timed(torch.nn.utils, "clip_grad_norm_", "clip", taken)
        made = run_bare(job)
    else:
        import memtrain.trainers.loop.worker  # noqa: F401
        from memtrain.trainers.loop import loop

        timed(loop, "whole_gradients", "gradients", taken)
        timed(loop, "one_step", "step", taken)
        made = run_memtrain(job)
    taken["step to step"] = [after - before for before, after in pairwise(made["cpu_s"])]
    return {label: round(1000 * statistics.median(times[3:]), 1) for label, times in taken.items()}


def turn(job: dict[str, Any], side: str, folder: Path, *more: str) -> Any:
    """Processor seconds at the end of each step of one side, in a process of its own."""
    work = folder / "-".join((Path(job["model"]).name, side, str(job["seed"])))
    work.mkdir()
    given = job | {"folder": str(work), "measure_peaks": side == "measured"}
    (work / "job.json").write_text(json.dumps(given))
    words = [sys.executable, __file__, "--side", side, str(work / "job.json"), str(work / "made.json"), *more]
    one = os.environ | {"OMP_NUM_THREADS": "1", "MEMTRAIN_CALIBRATION": "off"}
    done = subprocess.run(words, capture_output=True, text=True, env=one)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((work / "made.json").read_text())["cpu_s"]


def costs(cpu_s: Sequence[float]) -> dict[str, float]:
    """(mean, median) seconds of the steps after the first."""
    steps = [after - before for before, after in pairwise(cpu_s)]
    return {"mean_s": statistics.fmean(steps), "settled_s": statistics.median(steps)}


def job_of(size: str, steps: int, seed: int, folder: Path) -> dict[str, Any]:
    """The job of both sides, with its rows and its model written."""
    if not (folder / size).exists():
        save_model(folder / size, MODELS[size])
    data = folder / f"{size}-{seed}.jsonl"
    vocabulary = json.loads((folder / size / "config.json").read_text())["vocab_size"]
    write_rows(data, steps * BATCH, seed, vocabulary)
    return {
        "method": "sft",
        "model": str(folder / size),
        "data": str(data),
        "batch_size": BATCH,
        "steps": steps,
        "lr": 1e-4,
        "seed": seed,
        "fixed": False,
    }


def compare(size: str, steps: int, repeats: int, folder: Path) -> dict[str, Any]:
    """The sides in turns; ratios of memtrain's to the bare loop's, turn by turn."""
    turns: list[dict[str, dict[str, float]]] = []
    for seed in range(repeats):
        job = job_of(size, steps, seed, folder)
        order = SIDES if seed % 2 == 0 else SIDES[::-1]
        made = {side: costs(turn(job, side, folder)) for side in order}
        turns.append({side: made[side] for side in SIDES})
        print(json.dumps(turns[-1]), flush=True)
    ratios = {
        side: {
            key: sorted(round(one[side][key] / one["bare"][key], 4) for one in turns)
            for key in ("mean_s", "settled_s")
        }
        for side in SIDES[1:]
    }
    return {"model": size, "steps": steps, "turns": turns, "over_bare": ratios}


def main() -> int:
    """Compare model by model, or be one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.9M", "25M"], choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--meter", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.side:
        side, job, out = asked.side
        if asked.parts:
            Path(out).write_text(json.dumps({"cpu_s": part_times(side, json.loads(Path(job).read_text()))}))
            return 0
        made = (run_bare if side == "bare" else run_memtrain)(json.loads(Path(job).read_text()))
        Path(out).write_text(json.dumps({"cpu_s": made["cpu_s"]}))
        return 0
    if asked.parts:
        with tempfile.TemporaryDirectory() as name:
            for side in SIDES[:2] * asked.repeats:
                job = job_of(asked.models[0], asked.steps, len(os.listdir(name)), Path(name))
                print(side, turn(job, side, Path(name), "--parts"), flush=True)
        return 0
    if asked.meter:
        with tempfile.TemporaryDirectory() as name:
            for size in asked.models:
                print(size, counted_over_plain(size, Path(name)), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as name:
        found = [compare(size, asked.steps, asked.repeats, Path(name)) for size in asked.models]
    reported = {"models": found, "environment": environment(), "versions": versions("memtrain")}
    write_result(asked.output, reported)
    return 0


if __name__ == "__main__":
    sys.exit(main())
