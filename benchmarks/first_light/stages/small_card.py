"""A card with less memory: plans that are said to fit it, run with no more than it has."""

from __future__ import annotations

from typing import Any

from first_light.bench import Bench
from first_light.stages.steps import measured_steps

MARGIN = 1.1
"""Past the longest row that is said to fit, so much longer: it need not fit, and is reported."""


def under_a_fraction(
    bench: Bench, size: str, tokens: int, overrides: list[str], gib: float
) -> dict[str, Any]:
    """The plan for a card of `gib` GiB, measured there; out of memory is a false "fits"."""
    from memtrain.trainers.runtime.oom_errors import is_out_of_memory

    limit = bench.gib(gib)
    path, words = bench.recipe("sft", size, tokens=bench.tokens(tokens), overrides=overrides, batch=4)
    planned = bench.plan(path, [*words, f"memory.budget={limit}"], 4)
    try:
        with bench.device.no_more_than(limit):
            made = measured_steps(bench, planned, 2)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {
            "fault": "out of memory",
            "is_false_fit": True,
            "planned_bytes": planned.variant.predicted_bytes,
        }
    return made | {"is_false_fit": False, "limit_bytes": limit}


def longest_row(bench: Bench, size: str, gib: float, overrides: list[str]) -> dict[str, Any]:
    """The longest row that the planner says fits a card of `gib` GiB, measured there and a tenth beyond."""
    from memtrain.memory.planner.resolve import longest_that_fits
    from memtrain.trainers.runtime.oom_errors import is_out_of_memory

    limit = bench.gib(gib)
    # Every token is learned: with a short answer the head of the longest row would need less than planned.
    words = [
        *overrides,
        f"memory.budget={limit}",
        "train.micro_batch_size=1",
        "data.completion_only_loss=false",
    ]
    path, given = bench.recipe("sft", size, tokens=bench.tokens(4096), overrides=words, batch=1, count=16)
    planned = bench.plan(path, given, 3)
    del planned
    longest = solved(path, given)
    if bench.stand_in:
        longest = min(longest, 512)
    assert longest_that_fits, "The solver is there."
    made: dict[str, Any] = {"longest": longest}
    for name, length in (("at", longest), ("beyond", int(MARGIN * longest))):
        path, given = bench.recipe(
            "sft", size, tokens=length, row_tokens=int(1.2 * length), overrides=words, batch=1, count=4
        )
        planned = bench.plan(path, given, 3)
        try:
            with bench.device.no_more_than(limit):
                made[name] = measured_steps(bench, planned, 1)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            made[name] = {"fault": "out of memory"}
        bench.device.freed()
        made["words"] = f"{longest:,} tokens: {made['at'].get('words', made['at'].get('fault'))}"
    return made


def solved(recipe: str, overrides: list[str]) -> int:
    """The length in the answer of `memtrain plan --solve max_length --json`."""
    import json
    import subprocess
    import sys

    words = [sys.executable, "-m", "memtrain", "plan", recipe, *overrides, "--solve", "max_length", "--json"]
    reported = subprocess.run(words, capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stderr.strip().splitlines()[:3]
    return int(json.loads(reported.stdout)["value"])
