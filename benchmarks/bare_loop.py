"""memtrain's SFT beside the bare loop of plain PyTorch, which is the limit: the tool's own cost of a step.

    python benchmarks/bare_loop.py [--models 0.9M 25M] [--steps 40 ...] [--repeats 3]
    python benchmarks/bare_loop.py --meter    a step with its tensors counted over one without, step by step

The bare loop is what one writes by hand, and nothing else: sdpa, transformers' own loss over all logits
of a row, fused AdamW, a clipped norm; no file is written and nothing is reported. All rows are of one
length and every token is trained on: nothing is padded and no position is left out, so that neither side
has less to do. memtrain runs as its plan chooses, with its meter of memory as it is by default, and
without it. Both sides make their steps in turns in one process, one thread, float32, the same weights and
rows (random ids): whole processes in turns differ by ten percent on a machine that others use. A step of
memtrain is all from the end of the loop's step to its own end. `mean`: processor time of the steps after
the first; those that the meter counts are among them. `settled`: the median of the steps' ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from method_sides import run_memtrain
from result_files import write_result
from sft_sides import versions
from sft_vs_trl import MODELS, environment, save_model

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "bare_loop.json"
SIDES = ("measured", "unmeasured")
"""With memtrain's meter of memory, and without."""
BATCH = 4
ROW_TOKENS = 192


def bare_step(job: dict[str, Any]) -> Callable[[int], None]:
    """The plain loop: makes the step of a number."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(job["model"], attn_implementation="sdpa")
    model.train()
    rows = [json.loads(line)["input_ids"] for line in Path(job["data"]).read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], fused=True, weight_decay=0.0)

    def step(number: int) -> None:
        ids_BT = torch.tensor(rows[number * BATCH : (number + 1) * BATCH])
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def in_turns(job: dict[str, Any]) -> dict[str, list[float]]:
    """Processor seconds of each step after the first, of memtrain's run and of the bare loop's between."""
    import memtrain.trainers.loop.worker  # noqa: F401
    from memtrain.trainers.loop import loop

    bare, own, taken = bare_step(job), loop.one_step, {"memtrain": [], "bare": []}
    ends: list[float] = []

    def both(*given: Any, **named: Any) -> None:
        own(*given, **named)
        ended = time.process_time()
        if ends:
            taken["memtrain"].append(ended - ends[-1])
        bare(len(ends))
        if not ends:
            # A full pass over what both sides have loaded, 0.2 s, would fall on either of them.
            gc.collect()
            gc.freeze()
        ends.append(time.process_time())
        if len(ends) > 1:
            taken["bare"].append(ends[-1] - ended)

    loop.one_step = both
    run_memtrain(job)
    return taken


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


def turn(job: dict[str, Any], side: str, folder: Path) -> dict[str, list[float]]:
    """Seconds of `in_turns` in a process of its own."""
    work = folder / "-".join((Path(job["model"]).name, side, str(job["seed"])))
    work.mkdir()
    given = job | {"folder": str(work), "measure_peaks": side == "measured"}
    (work / "job.json").write_text(json.dumps(given))
    words = [sys.executable, __file__, "--job", str(work / "job.json"), str(work / "made.json")]
    one = os.environ | {"OMP_NUM_THREADS": "1", "MEMTRAIN_CALIBRATION": "off"}
    done = subprocess.run(words, capture_output=True, text=True, env=one)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((work / "made.json").read_text())


def ratios_of(taken: dict[str, list[float]]) -> dict[str, float]:
    """memtrain's time over the loop's, and both in seconds."""
    ours, bare = taken["memtrain"], taken["bare"]
    return {
        "mean": sum(ours) / sum(bare),
        "settled": statistics.median(one / other for one, other in zip(ours, bare, strict=True)),
        "memtrain_s": statistics.median(ours),
        "bare_s": statistics.median(bare),
    }


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
    """Ratios of memtrain's to the bare loop's, turn by turn."""
    turns: list[dict[str, dict[str, float]]] = []
    for seed in range(repeats):
        job = job_of(size, steps, seed, folder)
        turns.append({side: ratios_of(turn(job, side, folder)) for side in SIDES})
        print(json.dumps(turns[-1]), flush=True)
    ratios = {
        side: {key: sorted(round(one[side][key], 4) for one in turns) for key in ("mean", "settled")}
        for side in SIDES
    }
    return {"model": size, "steps": steps, "turns": turns, "over_bare": ratios}


def main() -> int:
    """Compare model by model, or be one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.9M", "25M"], choices=list(MODELS))
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[40], help="of each model, the last of the rest"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--meter", action="store_true")
    parser.add_argument("--job", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.job:
        given, out = asked.job
        out.write_text(json.dumps(in_turns(json.loads(given.read_text()))))
        return 0
    if asked.meter:
        with tempfile.TemporaryDirectory() as name:
            for size in asked.models:
                print(size, counted_over_plain(size, Path(name)), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as name:
        steps = asked.steps + asked.steps[-1:] * len(asked.models)
        found = [
            compare(size, num, asked.repeats, Path(name))
            for size, num in zip(asked.models, steps, strict=False)
        ]
    reported = {"models": found, "environment": environment(), "versions": versions("memtrain")}
    write_result(asked.output, reported)
    return 0


if __name__ == "__main__":
    sys.exit(main())
