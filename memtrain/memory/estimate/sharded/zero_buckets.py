"""Gradients of a rank in DeepSpeed's stage 2: buckets as they fill, and the copies that they are summed in.

Gradients are copied into a bucket as they come; one that has no room there, and the end of the pass, has the
bucket summed: what goes to different ranks, or to different weights of one's own, is laid end to end, and in
half precision widened to float32. From its first part on a rank has room for all of its own: the numbers of
its share in float32 where weights are in half precision, else all of each weight of which any part is its.
A weight that is larger than the bucket is summed by itself, when the next gradient comes.

Source: deepspeed 0.19.8, stage_1_and_2.py: `reduce_independent_p_g_buckets_and_remove_grads`,
`average_tensor`, `allreduce_bucket`, `copy_grads_in_partition` and `_build_compact_grad_partition_buffer`;
held against traces of all ranks by tests/trainers/tools/trace/test_zero_ranks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from memtrain.memory.model_shape.shape import ModelShape

MOST_NUMBERS = 50_000_000
"""Most numbers that are reduced or gathered at once: 200 MB in float32. Taste: a tenth of DeepSpeed's
default."""

END = -1
"""Layer of the embedding, whose gradient is the last."""


class Cut(NamedTuple):
    """Weights in the order of the model, and how they are cut and summed."""

    embedding: int
    maps: tuple[int, ...]
    """Numbers of each matrix of a layer, in order of use."""
    num_layers: int
    head: int
    """0: it is the embedding."""
    width: int
    """Numbers of the final norm."""
    num_ranks: int
    bucket: int
    size: int
    """Bytes of a number."""
    is_away: bool = False
    """Parts of float32 weights wait on the host; float32 parts of half-precision ones are sent there at the
    step."""

    @property
    def is_half(self) -> bool:
        """Parts of a rank are float32, and weights are not."""
        return self.size == 2


class Weight(NamedTuple):
    """A matrix, or the norm after the layers."""

    layer: int
    place: int
    """Number of the matrix in its layer, counted from the last."""
    first: int
    """Place of its first number among those of all; below 0 of the norm, which is dealt out apart."""
    numbers: int


class Arrival(NamedTuple):
    """The bytes of a rank's gradients when one comes."""

    layer: int
    """`END`: of the embedding, or of none more; as many as there are layers: of the final norm."""
    place: int
    """Of the embedding 0, of the end of the pass 1."""
    gradients: int
    """Laid out for the rank's own part, and gradients that are in no bucket."""
    copies: int
    """In which a bucket is summed before it has room; 0: it has."""


def cut_of(shape: ModelShape, num_ranks: int, bucket: int, size: int, *, is_away: bool) -> Cut:
    """The cut of a model's weights: those of its largest kind of layer, as often as there are layers."""
    maps = [part.num_inputs * part.num_outputs for part in shape.plain_linears]
    maps += [stack.num_weights for stack, _ in shape.stacks]
    return Cut(
        shape.num_embedding,
        tuple(maps),
        shape.num_layers,
        shape.num_head,
        shape.width,
        num_ranks,
        bucket,
        size,
        is_away,
    )


def largest_part(cut: Cut) -> int:
    """Bytes that the rank with the largest weights has laid out for its part."""
    return max(_laid_out(cut, rank) for rank in _told_apart(cut))


def _laid_out(cut: Cut, rank: int) -> int:
    part = _part(cut)
    if cut.is_half:
        return 4 * part
    if cut.is_away:
        return 0
    mine = range(rank * part, (rank + 1) * part)
    return cut.size * sum(one.numbers for one in _backwards(cut) if _is_in(one, mine))


def _part(cut: Cut) -> int:
    """Numbers of one rank."""
    return -(-(cut.embedding + cut.num_layers * sum(cut.maps) + cut.head) // cut.num_ranks)


@lru_cache(maxsize=64)
def arrivals(cut: Cut, *, holds: bool) -> tuple[Arrival, ...]:
    """The arrivals of a backward pass at which a rank can need the most, over all ranks.

    Of those at one place of a layer, only such as need more than all in later layers, which keep more.
    `holds`: gradients of a micro-batch before are there; they are added to in place where they are float32
    parts, and lie beside the new ones else.
    """
    found = [one for rank in _told_apart(cut) for one in _of_rank(cut, rank, holds=holds)]
    found.sort(key=lambda one: (one.layer, one.gradients + one.copies), reverse=True)
    most: dict[tuple[int, int, bool], int] = {}
    kept: list[Arrival] = []
    for one in found:
        # Norm and embedding stand for themselves, and layers for each other.
        key = (one.place, one.layer if one.layer in (END, cut.num_layers) else 0, one.copies > 0)
        if one.gradients + one.copies > most.get(key, -1):
            most[key] = one.gradients + one.copies
            kept.append(one)
    return tuple(kept)


def _told_apart(cut: Cut) -> set[int]:
    """Ranks that have parts of different kinds: with the embedding, the head, both, or layers alone."""
    part, of_layers = _part(cut), cut.num_layers * sum(cut.maps)
    ends = {0, cut.num_ranks // 2, cut.num_ranks - 1}
    ends |= {cut.embedding // part, (cut.embedding + of_layers) // part}
    return {rank for end in ends for rank in (end - 1, end, end + 1) if 0 <= rank < cut.num_ranks}


def _of_rank(cut: Cut, rank: int, *, holds: bool) -> Iterator[Arrival]:
    """All arrivals at one rank, in order."""
    part, whole = _part(cut), _laid_out(cut, rank)
    mine = range(rank * part, (rank + 1) * part)
    held = whole if holds else 0
    waiting: list[Weight] = []
    for one in (*_backwards(cut), None):
        before = held
        room = cut.bucket - sum(each.numbers for each in waiting)
        if waiting and (one is None or one.numbers > room):
            layer, place, comes = (
                (END, 1, 0) if one is None else (one.layer, one.place, cut.size * one.numbers)
            )
            if any(_is_in(each, mine) for each in waiting):
                held = whole * (1 + (holds and not cut.is_half))
            # Whole weights are laid out when they are summed, parts before.
            beside = (held if cut.is_half else before) + comes + _in_no_bucket(cut, waiting)
            yield Arrival(layer, place, beside, _copies(cut, waiting, part))
            waiting = []
        if one is not None:
            waiting.append(one)
            # Until the next comes, it is in its bucket or by itself. An embedding's is added to a head's
            # before it comes.
            there = before if one.layer == END else held
            yield Arrival(one.layer, one.place, there + _in_no_bucket(cut, waiting), 0)


def _backwards(cut: Cut) -> Iterator[Weight]:
    """All matrices in the order in which their gradients come, and the norm after the layers."""
    of_layer, starts = sum(cut.maps), list(accumulate(cut.maps, initial=0))
    if cut.head:
        yield Weight(cut.num_layers, 0, cut.embedding + cut.num_layers * of_layer, cut.head)
    yield Weight(cut.num_layers, 0, -1, cut.width)
    for layer in reversed(range(cut.num_layers)):
        for place, (start, count) in enumerate(reversed(list(zip(starts, cut.maps, strict=False)))):
            yield Weight(layer, place, cut.embedding + layer * of_layer + start, count)
    yield Weight(END, 0, 0, cut.embedding)


def _is_in(one: Weight, mine: range) -> bool:
    """Whether a rank has a part of a weight; the few numbers of a norm that it has are left out."""
    return 0 <= one.first < mine.stop and one.first + one.numbers > mine.start


def _in_no_bucket(cut: Cut, waiting: list[Weight]) -> int:
    return sum(cut.size * one.numbers for one in waiting if one.numbers > cut.bucket)


def _copies(cut: Cut, waiting: list[Weight], part: int) -> int:
    """Bytes in which a bucket is summed, as much of it at a time as a bucket holds."""
    sums = [sum(one.numbers for one in waiting)]
    are_several = len(waiting) > 1
    if not are_several:
        [one] = waiting
        inner = range((one.first // part + 1) * part, one.first + one.numbers, part)
        ends = [one.first, *inner, one.first + one.numbers]
        pieces = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        are_several = len(pieces) > 1
        if one.numbers > cut.bucket:
            sums, are_several = _in_turns(pieces, cut.bucket)
    wide = 4 if cut.is_half else 0
    return max(sums) * (wide + cut.size * are_several)


def _in_turns(pieces: list[int], bucket: int) -> tuple[list[int], bool]:
    """(numbers summed together, whether any are of several ranks): pieces until a bucket is passed."""
    turns: list[list[int]] = [[]]
    for piece in pieces:
        if sum(turns[-1]) > bucket:
            turns.append([])
        turns[-1].append(piece)
    return [sum(turn) for turn in turns], any(len(turn) > 1 for turn in turns)


def bucket_of(shape: ModelShape) -> int:
    """Numbers that are reduced or gathered at once: the largest layer or embedding, or fewer.

    DeepSpeed makes a buffer of that size whatever the model is, and stage 3 keeps as many gathered weights.
    Source: measured: with its own 1e9 live weights a pass of 147 M weights kept all of them and saved nothing
    (two gloo ranks, deepspeed 0.19.8, CPU).
    """
    layer = shape.num_per_layer(expert=shape.num_expert_layers > 0)
    return min(MOST_NUMBERS, max(layer, shape.num_embedding, shape.num_head))
