"""Rows of saved states: whole or in shards on disk, read by any number of ranks.

A shard holds consecutive rows of every tensor, in the split of `torch.chunk`: shard r of n the rows from
r * ceil(rows / n) on. A rank reads the files that hold some of its rows, one at a time. What DeepSpeed's
ranks wrote is no rows, and read by pieces.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memtrain.trainers.checkpoints.checkpoint import Checkpoint
from memtrain.trainers.checkpoints.flat_shards import fill_from_pieces, has_pieces, read_rows
from memtrain.trainers.checkpoints.shard_names import files_of
from memtrain.trainers.checkpoints.state_io import load_state
from memtrain.trainers.runtime.weight_layout import local_of, rows_of

State = dict[str, Any]


def fill_from(
    checkpoint: Checkpoint,
    part: str,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    world: int,
    may_hold_more: bool = False,
) -> None:
    """Fill each tensor with its saved rows, in place: the rows of shard `rank` of `world` (0 of 1 is all).

    `may_hold_more`: the checkpoint has other weights as well, which are not read.
    """
    if has_pieces(checkpoint, part):
        fill_from_pieces(checkpoint, part, tensors, rank=rank, world=world)
        return
    files = files_of(checkpoint, part)
    with torch.no_grad():
        for number, name in enumerate(files):
            shapes = {key: tensor.shape for key, tensor in tensors.items()}
            if not _has_any(shapes, number, len(files), rank, world):
                continue
            saved = load_state(checkpoint.part(name), tensors.keys() if may_hold_more else None)
            is_whole = saved.keys() == tensors.keys() or (may_hold_more and saved.keys() >= tensors.keys())
            assert is_whole, "A checkpoint of this recipe has the weights that it trains."
            for key, tensor in tensors.items():
                own = local_of(tensor) if world > 1 else tensor
                _copy(saved[key], own, tensor.shape, number, len(files), rank, world)


def read_optimizer(
    checkpoint: Checkpoint,
    names: Sequence[str],
    shapes: Mapping[str, torch.Size],
    *,
    rank: int,
    world: int,
) -> State:
    """The optimizer's state for a rank that steps shard `rank` of `world` of the weights `names`.

    `shapes`: of whole weights. Tensors that are no rows of a weight (counters) are the same in all shards.
    """
    if has_pieces(checkpoint, "optimizer"):
        return read_rows(checkpoint, names, shapes, rank=rank, world=world)
    files = files_of(checkpoint, "optimizer")
    if len(files) == 1 and world == 1:
        return load_state(checkpoint.part(files[0]))
    own = {name: shapes[name] for name in names}
    made: State = {}
    for number, file in enumerate(files):
        if not _has_any(own, number, len(files), rank, world):
            continue
        saved = load_state(checkpoint.part(file))
        if not made:
            made = saved | {"state": {index: {} for index in saved["state"]}}
        for index, entry in saved["state"].items():
            held: State = made["state"][index]
            for key, value in entry.items():
                place = (number, len(files), rank, world)
                _take_rows(held, key, value, shapes[names[int(index)]], place)
    assert made, "Some file holds rows of some weight."
    return made


def _take_rows(
    held: State, key: str, value: Any, whole: torch.Size, place: tuple[int, int, int, int]
) -> None:
    """Put the rows that `value` has into `held[key]`; a value that is no rows is taken as it is."""
    number, count, rank, world = place
    saved_rows = rows_of(whole[0], number, count) if len(whole) else range(0)
    if not isinstance(value, Tensor) or value.shape != torch.Size((len(saved_rows), *whole[1:])):
        held.setdefault(key, value)
        return
    if key not in held:
        held[key] = value.new_zeros(len(rows_of(whole[0], rank, world)), *whole[1:])
    _copy(value, held[key], whole, number, count, rank, world)


def _copy(
    saved: Tensor, own: Tensor, whole: torch.Size, number: int, count: int, rank: int, world: int
) -> None:
    """Copy the rows that shard `number` of `count` and shard `rank` of `world` both hold."""
    if not whole:
        own.copy_(saved)
        return
    theirs, ours = rows_of(whole[0], number, count), rows_of(whole[0], rank, world)
    first, end = max(theirs.start, ours.start), min(theirs.stop, ours.stop)
    if first < end:
        rows = saved[first - theirs.start : end - theirs.start]
        own[first - ours.start : end - ours.start].copy_(rows)


def _has_any(shapes: Mapping[str, torch.Size], number: int, count: int, rank: int, world: int) -> bool:
    for shape in shapes.values():
        rows = shape[0] if len(shape) else 1
        theirs, ours = rows_of(rows, number, count), rows_of(rows, rank, world)
        if max(theirs.start, ours.start) < min(theirs.stop, ours.stop):
            return True
    return False
