"""The tensors that were alive at the highest moment of a recorded history of CUDA's allocator.

Source: `torch.cuda.memory._snapshot()` after `_record_memory_history`: events `alloc` and `free_requested` of
the allocator, oldest first, and the blocks that are allocated at the end. The history is walked from its end
backwards, so that blocks of before it are counted too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROUNDING = 512
"""The allocator counts blocks in these bytes."""
BEFORE = "before the history"
NO_FRAME = "no Python frame: the backward pass of an operator"
PACKAGES = ("memtrain", "transformers", "liger_kernel", "peft", "bitsandbytes", "torch")
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Alive:
    """A block that was allocated at the highest moment."""

    num_bytes: int
    owner: str


def alive_at_peak(events: Sequence[Event], at_end: Mapping[int, int]) -> list[Alive]:
    """Blocks of the highest moment, the last one first; then those whose allocation is not in the history.

    `at_end`: sizes of the blocks that are allocated at the end, by address.
    """
    highest = _highest(events, sum(at_end.values()))
    alive = dict(at_end)
    for event in reversed(events[highest:]):
        if event["action"] == "free_requested":
            alive[event["addr"]] = rounded(event["size"])
        elif event["action"] == "alloc":
            alive.pop(event["addr"], None)
    found: list[Alive] = []
    for event in reversed(events[:highest]):
        if event["action"] == "alloc" and event["addr"] in alive:
            found.append(Alive(alive.pop(event["addr"]), owner_of(event.get("frames", ()), event["size"])))
    return found + [Alive(size, BEFORE) for size in alive.values()]


def _highest(events: Sequence[Event], at_end: int) -> int:
    """Number of the events after which most is allocated."""
    allocated = best = at_end
    highest = len(events)
    for number in range(len(events), 0, -1):
        event = events[number - 1]
        if event["action"] == "free_requested":
            allocated += rounded(event["size"])
        elif event["action"] == "alloc":
            allocated -= rounded(event["size"])
        if allocated > best:
            best, highest = allocated, number - 1
    return highest


def rounded(size: int) -> int:
    """Bytes that the allocator counts for a block of a size."""
    return -(-size // ROUNDING) * ROUNDING


def owner_of(frames: Iterable[Mapping[str, Any]], size: int) -> str:
    """The innermost frame that allocated, as file:line function; below it the first that is not torch's.

    The engine of autograd calls operators without a frame: their blocks are told apart by their size.
    """
    known = [(name, one) for one in frames if (name := _in_package(str(one["filename"]))) is not None]
    if not known:
        return f"{NO_FRAME}, {size:,} bytes"
    outer = next((one for one in known if not one[0].startswith("torch/")), None)
    told = [known[0], *([outer] if outer is not None and outer is not known[0] else [])]
    return " < ".join(f"{name}:{one['line']} {one['name']}" for name, one in told)


def _in_package(path: str) -> str | None:
    """The path from its package on; None where it is of none of them."""
    folders = path.split("/")[:-1]
    places = [place for place, folder in enumerate(folders) if folder in PACKAGES]
    return "/".join(path.split("/")[places[-1] :]) if places else None


def by_owner(alive: Iterable[Alive], count: int) -> list[dict[str, Any]]:
    """The largest owners with their bytes and blocks; the others together as the last."""
    sums: dict[str, list[int]] = {}
    for one in alive:
        of = sums.setdefault(one.owner, [0, 0])
        of[0] += one.num_bytes
        of[1] += 1
    ranked = sorted(sums.items(), key=lambda one: -one[1][0])
    told = [{"owner": name, "bytes": of[0], "blocks": of[1]} for name, of in ranked[:count]]
    rest = [of for _, of in ranked[count:]]
    if rest:
        told.append(
            {"owner": "others", "bytes": sum(of[0] for of in rest), "blocks": sum(of[1] for of in rest)}
        )
    return told
