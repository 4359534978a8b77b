"""Speed and memory of a supervised run on packed rows: tokens a second, MFU, peaks beside plan and trace."""

from __future__ import annotations

from typing import Any

from first_light.bench import Bench, Planned
from first_light.stages.steps import measured_steps

PACKED = ("length.packing=bfd", "train.micro_batch_size=1", "data.completion_only_loss=false")


def speed_plan(bench: Bench, size: str, tokens: int, overrides: list[str]) -> Planned:
    """Rows of an eighth of a sequence at most, packed into sequences of `tokens` tokens, one a micro-batch.

    Every token is learned, as in the records that others have published.
    """
    length = bench.tokens(tokens)
    path, words = bench.recipe(
        "sft",
        size,
        tokens=length,
        row_tokens=max(16, length // 8),
        overrides=[*overrides, *PACKED],
        count=192,
    )
    return bench.plan(path, words)


def measure_speed(bench: Bench, size: str, tokens: int, overrides: list[str]) -> dict[str, Any]:
    """Three steps after two that are not timed."""
    return measured_steps(bench, speed_plan(bench, size, tokens, overrides), 3)
