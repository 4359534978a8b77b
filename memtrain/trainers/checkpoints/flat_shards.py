"""Pieces of saved states: stretches of flattened weights, read by any engine and any number of ranks.

What DeepSpeed leaves a rank is cut through the middle of weights. A rank writes of each weight the stretch
that it steps, and where it begins; a reader takes from every file what overlaps with what it holds now: the
whole, its rows, or a stretch of its own.
"""

# A stretch is counted in numbers of the flattened weight: range(first, end).

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.trainers.checkpoints.checkpoint import Checkpoint
from memtrain.trainers.checkpoints.shard_names import PIECES, files_of
from memtrain.trainers.checkpoints.state_io import load_state
from memtrain.trainers.runtime.weight_layout import local_of, rows_of

State = dict[str, Any]


def has_pieces(checkpoint: Checkpoint, part: str) -> bool:
    """Whether a part of a checkpoint is in pieces."""
    return bool(files_of(checkpoint, part + PIECES))


def stretch_of(shape: torch.Size, rank: int, world: int) -> range:
    """The numbers of a weight that are in its rows of shard `rank` of `world`; 0 of 1 is all."""
    if not shape:
        return range(1)
    rows, width = rows_of(shape[0], rank, world), shape[1:].numel()
    return range(rows.start * width, rows.stop * width)


def fill_from_pieces(
    checkpoint: Checkpoint, part: str, tensors: Mapping[str, Tensor], *, rank: int, world: int
) -> None:
    """Fill each tensor with its saved numbers, in place: the rows of shard `rank` of `world`."""
    wanted = {name: stretch_of(tensor.shape, rank, world) for name, tensor in tensors.items()}
    missing = {name: len(stretch) for name, stretch in wanted.items()}
    with torch.no_grad():
        for file in files_of(checkpoint, part + PIECES):
            saved = load_state(checkpoint.part(file), tensors.keys())
            for name in saved:
                own = local_of(tensors[name]) if world > 1 else tensors[name]
                piece = saved[name]
                missing[name] -= _copy(piece["numbers"], piece["first"], own.view(-1), wanted[name].start)
    assert not any(missing.values()), "A checkpoint of this recipe has the weights that it trains."


def read_states(checkpoint: Checkpoint, wanted: Mapping[int, range], *, own: int = 0) -> State:
    """The optimizer's state for some stretches of the weights, by the number of the weight.

    Tensors are flat, counters as they are. `own`: the file to look into first; the others are read only where
    it has not all.
    """
    files = files_of(checkpoint, "optimizer" + PIECES)
    missing = {index: len(stretch) for index, stretch in wanted.items()}
    made: dict[int, State] = {}
    groups: list[State] = []
    for file in [*files[own:], *files[:own]]:
        if groups and not any(missing.values()) and made.keys() == wanted.keys():
            break
        saved = load_state(checkpoint.part(file))
        groups = saved["param_groups"]
        for index in saved["state"].keys() & wanted.keys():
            entry, stretch = saved["state"][index], wanted[index]
            held = made.setdefault(index, dict(entry["counters"]))
            missing[index] -= len(_overlap(entry["first"], entry["count"], stretch))
            for key, numbers in entry["numbers"].items():
                if key not in held:
                    held[key] = numbers.new_zeros(len(stretch))
                _copy(numbers, entry["first"], held[key], stretch.start)
    return {"state": dict(sorted(made.items())), "param_groups": groups}


def read_rows(
    checkpoint: Checkpoint, names: Sequence[str], shapes: Mapping[str, torch.Size], *, rank: int, world: int
) -> State:
    """The optimizer's state for a rank that steps the rows in shard `rank` of `world` of the weights `names`.

    `shapes`: of whole weights.
    """
    wanted = {index: stretch_of(shapes[name], rank, world) for index, name in enumerate(names)}
    made = read_states(checkpoint, wanted)
    states: dict[int, State] = made["state"]
    for index, entry in states.items():
        shape = shapes[names[index]]
        own = torch.Size((len(rows_of(shape[0], rank, world)), *shape[1:])) if shape else shape
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.shape == (len(wanted[index]),):
                entry[key] = value.view(tuple(own))
    return made


def _copy(numbers: Tensor, first: int, own: Tensor, own_first: int) -> int:
    """Copy the numbers that both flat stretches hold; how many these are."""
    both = _overlap(first, numbers.numel(), range(own_first, own_first + own.numel()))
    if both:
        target = own[both.start - own_first : both.stop - own_first]
        target.copy_(numbers[both.start - first : both.stop - first])
    return len(both)


def _overlap(first: int, count: int, stretch: range) -> range:
    """The numbers that both have."""
    return range(max(first, stretch.start), min(first + count, stretch.stop))
