"""Packing 100,000 and 1,000,000 rows: time, fill and memory, ours and TRL's three strategies in turns.

    python benchmarks/packing.py --trl trl-env/bin/python [--sizes 100000 1000000] [--repeats 3] [-o FILE]

Both pack the same log-normal lengths (median 40 tokens) into sequences of 512. Ours (`lay_out`) makes the
index of which piece goes into which sequence, over the lengths alone, as the launcher and every rank do;
tokens are read from the store row by row in training. TRL's `pack_dataset` writes a new table with all
tokens; its input table is made before the clock starts. CPU time of one thread, and the peak of the resident
set above what was there before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from meter import peak_bytes, reset_peak

CAPACITY = 512
STRATEGIES = ("bfd", "bfd_split", "wrapped")


def main() -> None:
    """Measure and write, or one side of it."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--trl", help="a Python with trl")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--side", nargs=3, metavar=("SIDE", "STRATEGY", "ROWS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side is not None:
        side, strategy, rows = asked.side
        print(json.dumps({"memtrain": ours, "trl": theirs}[side](strategy, lengths_of(int(rows)))))
        return
    from turns import in_turns, medians, ratios, where, write

    result = where("python benchmarks/packing.py --trl PYTHON")
    result |= {"capacity": CAPACITY, "repeats": asked.repeats, "rows": {}}
    for rows in asked.sizes:
        for strategy in STRATEGIES:
            pythons = {"memtrain": sys.executable} | ({"trl": asked.trl} if asked.trl else {})
            sides = {side: partial(apart, python, side, strategy, rows) for side, python in pythons.items()}
            figures = in_turns(sides, asked.repeats)
            reported: dict[str, Any] = {side: medians(of_side) for side, of_side in figures.items()}
            if asked.trl:
                reported["ratio"] = ratios(
                    *([one["cpu_s"] for one in figures[side]] for side in ("memtrain", "trl"))
                )
            result["rows"].setdefault(str(rows), {})[strategy] = reported
            print(rows, strategy, json.dumps(reported), flush=True)
    write("packing", result, asked.output)


def apart(python: str, side: str, strategy: str, rows: int) -> dict[str, float]:
    """One side in a process of its own."""
    command = [python, __file__, "--side", side, strategy, str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def lengths_of(rows: int) -> Any:
    """The lengths, the same in every process: int64."""
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(np.log(40), 0.8, rows)
    return np.clip(drawn, 2, 2 * CAPACITY).astype(np.int64)


def measured(pack: Any, tokens: int) -> dict[str, float]:
    """CPU time and peak memory of `pack`, which returns (sequences, tokens in them)."""
    import gc

    gc.collect()
    before = reset_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    sequences, kept = pack()
    return {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "peak_bytes": peak_bytes() - before,
        "sequences": float(sequences),
        "fill": kept / (sequences * CAPACITY),
        "kept": kept / tokens,
    }


def ours(strategy: str, lengths: Any) -> dict[str, float]:
    """memtrain's index of pieces; every token is trained on."""
    import numpy as np

    from memtrain.recipes.sections.length import Length, limits_of
    from memtrain.trainers.data.packing.token_rows import Spans, lay_out

    count = len(lengths)
    spans = Spans(np.arange(count + 1), np.zeros(count, np.int64), lengths)
    length = Length(max_length=CAPACITY, packing=strategy)  # type: ignore[arg-type]

    def pack() -> tuple[int, int]:
        made = lay_out(lengths, spans, np.arange(count), limits_of(length, has_prompts=False))
        return len(made.tokens), int(made.tokens.sum())

    return measured(pack, int(lengths.sum()))


def theirs(strategy: str, lengths: Any) -> dict[str, float]:
    """TRL's new table."""
    import datasets
    import numpy as np
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    values = pa.array(np.ones(int(offsets[-1]), np.int32))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), values)})
    rows = datasets.Dataset(table)

    def pack() -> tuple[int, int]:
        made = pack_dataset(rows, CAPACITY, strategy)
        column = made.data.column("input_ids")
        return len(made), int(sum(len(chunk.flatten()) for chunk in column.chunks))

    return measured(pack, int(lengths.sum()))


if __name__ == "__main__":
    main()
