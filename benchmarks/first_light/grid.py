"""The points of the planner's error: methods, sizes, lengths and strategies, the least seen ones first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

METHODS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "online_dpo", "ppo")
SIZES = ("0.6B", "1.7B", "4B", "8B")
LENGTHS = (512, 2_048, 8_192)
ADAPTERS = ("full", "lora")
STRATEGIES = (
    "planned",
    "activation_checkpointing",
    "no_checkpointing",
    "boundary_offloading",
    "full_offloading",
    "streamed_layers",
    "full_logits",
    "liger_loss",
    "packing",
    "padded",
    "optimizer_offload",
    "optimizer_in_backward",
    "compressed_moments",
    "split_copies",
    "stochastic_rounding",
    "adamw_8bit",
    "qlora",
)
FULL_ONLY = (
    *("optimizer_offload", "optimizer_in_backward", "compressed_moments"),
    *("split_copies", "stochastic_rounding", "adamw_8bit"),
)
"""Strategies that have little or nothing to do beside an adapter."""
NUM_POINTS = 64


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of the grid."""

    method: str
    size: str
    length: int
    adapter: str
    strategy: str

    @property
    def name(self) -> str:
        """Of its stage."""
        return f"{self.method} {self.size} {self.length} {self.adapter} {self.strategy}"

    def as_json(self) -> dict[str, Any]:
        """The arguments of its stage."""
        return asdict(self)


def possible() -> Iterator[Point]:
    """Every point that makes sense: an adapter where only it can be trained, none where it hides the rest."""
    for method in METHODS:
        for size in SIZES:
            for length in LENGTHS:
                for adapter in ADAPTERS:
                    for strategy in STRATEGIES:
                        if adapter == "lora" and strategy in FULL_ONLY:
                            continue
                        if adapter == "full" and (strategy == "qlora" or size == "8B"):
                            continue
                        if strategy == "packing" and method != "sft":
                            continue
                        if strategy == "liger_loss" and method not in ("sft", "dpo"):
                            continue
                        if strategy == "full_logits" and method == "reward":
                            continue
                        yield Point(method, size, length, adapter, strategy)


def sampled(count: int = NUM_POINTS, seed: int = 0) -> list[Point]:
    """`count` points; each next one has values that were seen least: every value appears early, twice later.

    The same for the same seed on every machine.
    """
    draw = random.Random(seed)
    left = list(possible())
    draw.shuffle(left)
    values = {point: _values(point) for point in left}
    seen: Counter[str] = Counter()
    taken: list[Point] = []
    while left and len(taken) < count:
        best = min(left, key=lambda point: _seen(values[point], seen))
        left.remove(best)
        taken.append(best)
        seen.update(values[best])
    return taken


def _values(point: Point) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in point.as_json().items())


def _seen(values: tuple[str, ...], seen: Counter[str]) -> tuple[float, int]:
    """How often the values of a point were seen: by their shares, for some axes are longer than others."""
    shares = [seen[value] * NUM_VALUES[value.partition("=")[0]] for value in values]
    return sum(shares), max(shares)


NUM_VALUES = {
    "method": len(METHODS),
    "size": len(SIZES),
    "length": len(LENGTHS),
    "adapter": len(ADAPTERS),
    "strategy": len(STRATEGIES),
}
GRID = sampled()
