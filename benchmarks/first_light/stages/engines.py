"""What moves bytes, against the same steps without it: losses bit for bit where the claim is that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from first_light.bench import Bench

STEPS = 3
CLOSE = 2e-2
"""Largest difference of losses in bfloat16 that rounding explains over three steps; what is bit for bit is
distinguished by `is_equal`. Taste."""


def losses_of(bench: Bench, overrides: Sequence[str]) -> tuple[list[float], list[str]]:
    """(losses, strategies in use) of some steps of a small run of the first size, deterministic kernels."""
    from memtrain.memory.strategies.registry import used_in
    from memtrain.trainers.tools.bench import bench as bench_steps

    length = bench.tokens(4096)
    path, words = bench.recipe("sft", "0.6B", tokens=length, overrides=overrides, batch=1, count=16)
    planned = bench.plan(path, [*words, "length.packing=bfd"], STEPS + 2)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        made = bench_steps(planned.plan, STEPS)
    finally:
        torch.use_deterministic_algorithms(was)
        bench.device.freed()
    return list(made.losses), [one.name for one in used_in(planned.plan.settings)]


def twice(bench: Bench) -> dict[str, Any]:
    """The run without any of them, twice: where it is not itself, nothing else can be bit for bit."""
    plain = [*PLAIN]
    first, strategies = losses_of(bench, plain)
    again, _ = losses_of(bench, plain)
    return compared(first, again) | {"strategies": strategies}


def against_none(bench: Bench, overrides: list[str]) -> dict[str, Any]:
    """The run with some strategy, and without it."""
    keys = {word.partition("=")[0] for word in overrides}
    plain = [word for word in PLAIN if word.partition("=")[0] not in keys]
    same = [word for word in overrides if word.startswith(("optim.max_grad_norm", "memory.activation_ch"))]
    without = [
        word for word in PLAIN if word.partition("=")[0] not in {one.partition("=")[0] for one in same}
    ]
    expected, _ = losses_of(bench, [*without, *same])
    found, strategies = losses_of(bench, [*plain, *overrides])
    return compared(expected, found) | {"strategies": strategies}


PLAIN = (
    "memory.activation_checkpointing=off",
    "memory.activation_offloading=off",
    "memory.optimizer_offload=off",
    "memory.streamed_layers=off",
)


def compared(expected: Sequence[float], found: Sequence[float]) -> dict[str, Any]:
    """Two curves. Raises: AssertionError where they are further apart than rounding explains."""
    worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    assert worst <= CLOSE, f"losses differ by {worst:.2e}: {expected} and {found}"
    is_equal = list(expected) == list(found)
    return {
        "words": "bit for bit" if is_equal else f"losses differ by {worst:.1e}",
        "is_equal": is_equal,
        "difference": worst,
        "losses": list(found),
    }
