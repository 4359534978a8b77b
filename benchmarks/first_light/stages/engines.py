"""What moves bytes, against the same steps without it: losses bit for bit where the claim is that.

torch's deterministic algorithms are asked for in their strict form: where they only warn, the backward pass
of flash attention goes on adding by atomics, and a run is not itself twice. Strictly, attention's backward
passes, `index_add`, `index_put` and the gradients of gathers take their ordered forms in bfloat16 as in
float32; the gradient of an embedding is sorted, and ordered, by itself; a matrix product needs
CUBLAS_WORKSPACE_CONFIG, which the ladder sets for these stages alone. An operator that has no ordered form is
refused by torch: then both runs are made again with what has one, and the result names it. Memory that nobody
has written is filled with NaN. Kernels in Triton are not torch's to know.

Source: torch.use_deterministic_algorithms and torch.utils.deterministic in torch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from first_light.bench import Bench
from memtrain.trainers.runtime.one_order import unordered_operator

STEPS = 3
CLOSE = 2e-2
"""Largest difference of losses in bfloat16 that rounding explains over three steps; what is bit for bit is
distinguished by `is_equal`. Taste."""
Made = TypeVar("Made")


@contextmanager
def deterministic(*, is_strict: bool) -> Iterator[None]:
    """Operators take their ordered forms; strictly, what has none is an error, else it goes on as it is."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=not is_strict)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])


def in_one_form(runs: Callable[[], Made]) -> tuple[Made, str | None]:
    """What `runs` makes, and the operator for which torch has no ordered form, if one of them has none."""
    try:
        with deterministic(is_strict=True):
            return runs(), None
    except RuntimeError as error:
        unordered = unordered_operator(error)
        if not unordered:
            raise
    with deterministic(is_strict=False):
        return runs(), unordered


def losses_of(bench: Bench, overrides: Sequence[str]) -> tuple[list[float], list[str]]:
    """(losses, strategies in use) of some steps of a small run of the first size."""
    from memtrain.memory.strategies.registry import used_in
    from memtrain.trainers.tools.bench import bench as bench_steps

    length = bench.tokens(4096)
    path, words = bench.recipe("sft", "0.6B", tokens=length, overrides=overrides, batch=1, count=16)
    planned = bench.plan(path, [*words, "length.packing=bfd"], STEPS + 2)
    try:
        made = bench_steps(planned.plan, STEPS)
    finally:
        bench.device.freed()
    return list(made.losses), [one.name for one in used_in(planned.plan.settings)]


def twice(bench: Bench) -> dict[str, Any]:
    """The run without any of them, twice: where it is not itself, nothing else can be bit for bit."""
    return both(bench, PLAIN, PLAIN)


def against_none(bench: Bench, overrides: list[str]) -> dict[str, Any]:
    """The run with some strategy, and without it."""
    keys = {word.partition("=")[0] for word in overrides}
    plain = [word for word in PLAIN if word.partition("=")[0] not in keys]
    same = [word for word in overrides if word.startswith(("optim.max_grad_norm", "memory.activation_ch"))]
    without = [
        word for word in PLAIN if word.partition("=")[0] not in {one.partition("=")[0] for one in same}
    ]
    return both(bench, [*without, *same], [*plain, *overrides])


def both(bench: Bench, one: Sequence[str], other: Sequence[str]) -> dict[str, Any]:
    """Two runs by their overrides, in the same form, compared."""
    made, unordered = in_one_form(lambda: (losses_of(bench, one), losses_of(bench, other)))
    (expected, _), (found, strategies) = made
    told = compared(expected, found) | {"strategies": strategies, "unordered_operator": unordered}
    if unordered is not None:
        told["words"] += f": torch has no deterministic form of {unordered}, which adds in any order"
    return told


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
