"""CUDA's caching allocator with expandable segments: asked for in this process, and seen to be in force."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads the allocator's settings from when it is loaded; the second is the older."""

KEY = "expandable_segments"

PROBE_BYTES = 24 * 2**20
"""More than the allocator serves from its pool of small blocks, or from the rest of another large one."""


_asked = True
"""Last wish of this process; launchers ask for expandable segments in the environment."""


def use_expandable_segments(is_on: bool) -> None:
    """From now on new segments are expandable, or are not; nothing without CUDA.

    torch reads the environment once, when it is loaded, which may be before this process has written it. What
    the environment says of expandable segments wins; its other settings are given again.
    """
    global _asked
    _asked = is_on
    if torch.cuda.is_available():
        torch._C._accelerator_setAllocatorSettings(settings_text(is_on))  # pyright: ignore


def settings_text(is_on: bool) -> str:
    """The allocator's settings as torch takes them: the environment's, and expandable segments."""
    given = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    if KEY in given:
        return given
    return ",".join(one for one in (given, f"{KEY}:{is_on}") if one)


@contextmanager
def fixed_segments() -> Iterator[None]:
    """New segments inside are not expandable, later ones are as before.

    Many drivers let no other process see memory of an expandable one.
    """
    if not torch.cuda.is_available():
        yield
        return
    torch._C._accelerator_setAllocatorSettings(f"{KEY}:False")  # pyright: ignore
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings_text(_asked))  # pyright: ignore


def expandable_in_force() -> bool:
    """Whether memory that is taken from the driver now is an expandable segment. Needs a CUDA device.

    Cached memory is given back first; blocks that still lie in a segment of before, beside what is alive in
    it, tell of its settings and not of today's, and are held until one does not.
    Source: torch's own record of its segments (`torch.cuda.memory_snapshot`), after a real allocation.
    """
    torch.cuda.empty_cache()
    known = torch.cuda.memory_snapshot()
    held: list[Tensor] = []
    while True:
        held.append(torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cuda"))
        place = held[-1].data_ptr()
        if _segment_of(place, known) is None:
            found = _segment_of(place, torch.cuda.memory_snapshot())
            return found is not None and bool(found["is_expandable"])


def _segment_of(place: int, segments: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The segment in which an address lies."""
    return next(
        (one for one in segments if one["address"] <= place < one["address"] + one["total_size"]), None
    )


def allocator_words(is_asked: bool) -> str:
    """A sentence for the report on the allocator, where it differs from the plan."""
    found = expandable_in_force()
    if found == is_asked:
        return f"CUDA's allocator has {'expandable' if found else 'fixed'} segments, as planned"
    return (
        f"CUDA's allocator has {'expandable' if found else 'fixed'} segments where the plan has others: "
        "reserved memory is not the predicted one (see PYTORCH_ALLOC_CONF in the environment)"
    )
