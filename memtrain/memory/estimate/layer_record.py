"""Bytes of layers in a step, from the record of a layer of each kind."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from memtrain.memory.estimate.context_parallel import gathered_backward, gathered_forward, ulysses_kept
from memtrain.memory.estimate.flash_scratch import flash_scratch
from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.model_shape.layer_record import ModelRecord, Moment, Peak
from memtrain.memory.plan.heaviest_batch import HeaviestBatch


class Turn(NamedTuple):
    """A layer at its highest moment in the backward pass."""

    num_bytes: int
    gradients: int
    """Of its weights, where there were none before."""
    kernel: int
    """Part of `num_bytes` that is a kernel's own."""


@once
def recorded_kept(load: Workload) -> tuple[int, ...]:
    """Bytes that each layer keeps for its backward pass when it is not checkpointed, in order."""
    of_kinds = [_bytes(load, kind.kept) + ulysses_kept(load) for kind in _record(load).kinds]
    return tuple(of_kinds[kind] for kind in _record(load).order)


@once
def recorded_backward(load: Workload) -> Turn:
    """The turn of the layer that holds the most during its backward pass, kept tensors included."""
    return max(_turns(load), key=lambda turn: turn.num_bytes)


def first_turn(load: Workload) -> Turn:
    """The turn of the first layer."""
    return _turns(load)[0]


def recorded_gradients(load: Workload) -> int:
    """Bytes of the gradients of the last layer's weights at its highest moment, where there were none before;
    0 without a record, and in slices, whose sums wait."""
    if load.record is None or load.settings.slice_tokens:
        return 0
    return travelling_backward(load).gradients if travels(load) else _turns(load)[-1].gradients


def travels(load: Workload) -> bool:
    """Whether all that layers keep is on its way to the host, as passes measured it."""
    return load.settings.offload == "all" and load.record is not None and load.record.travelling is not None


def _with_layers(load: Workload, num_bytes: int) -> int:
    """Bytes of as many layers as were passed, with what stays of the others; at most what they keep."""
    of = _record(load).travelling
    assert of is not None, "These activations travel."
    return num_bytes + max(0, load.shape.num_layers - of.depth) * _bytes(load, of.stays)


def travelling_waiting(load: Workload) -> int:
    """On the device when all layers are through, and what they keep travels."""
    of = _record(load).travelling
    assert of is not None, "These activations travel."
    return min(sum(recorded_kept(load)), _with_layers(load, _bytes(load, of.waiting)))


@once
def travelling_forward(load: Workload) -> int:
    """Most that is there in a layer's forward pass."""
    of = _record(load).travelling
    assert of is not None, "These activations travel."
    return _with_layers(load, _turn(load, of.forward).num_bytes)


@once
def travelling_backward(load: Workload, *, is_first: bool = False) -> Turn:
    """The turn of the layer that holds the most in its backward pass, or of the first."""
    of = _record(load).travelling
    assert of is not None, "These activations travel."
    if is_first:
        return _turn(load, of.first)
    found = _turn(load, of.backward)
    return found._replace(num_bytes=_with_layers(load, found.num_bytes))


class Slices(NamedTuple):
    """Most that a layer holds over a row in slices, its input and the gradient of its output aside."""

    backward: int
    kernel: int
    """Part of it that is a kernel's own."""
    forward: int
    tables: int
    final_backward: int


@once
def recorded_slices(load: Workload) -> Slices | None:
    """The most of any kind; None where passes over slices were not measured."""
    of = _record(load).sliced
    if of is None:
        return None
    row, part = load.N, min(load.settings.slice_tokens, load.N)
    most = max(one.of(row, part) for one in of.backward)
    scratch = flash_scratch(slice_of(load)) if of.in_kernel else 0
    in_kernel = max((one.of(row, part) for one in of.in_kernel), default=0) + scratch
    return Slices(
        backward=max(most, in_kernel),
        kernel=scratch if in_kernel > most else 0,
        forward=max(one.of(row, part) for one in of.forward),
        tables=of.tables.of(row, part),
        final_backward=of.final_backward.of(row, part),
    )


@once
def slice_of(load: Workload) -> Workload:
    """The load of one slice: as many tokens, all scored, in one row."""
    n = min(load.settings.slice_tokens, load.N)
    alone = {"pad_to_multiple_of": None, "slice_tokens": 0, "context_parallel": 1}
    whole = load.settings.model_copy(update=alone)
    batch = HeaviestBatch(1, n, n, n, load.batch.asks, segments=min(n, load.batch.num_segments))
    return replace(load, settings=whole, batch=batch, shape=replace(load.shape, record=None))


@once
def recorded_forward(load: Workload) -> int:
    """Most that a layer holds in a pass without gradients, with the embeddings and the residual stream."""
    highest = max(_highest(load, kind.forward)[0] for kind in _record(load).kinds)
    return highest + gathered_forward(load)


@once
def recorded_at_work(load: Workload) -> int:
    """Share of all that layers keep that is gone, or counted by `recorded_backward`, in the turn that needs
    most: that holds what the layers before it keep."""
    kept, turns = recorded_kept(load), _turns(load)
    before = accumulate(kept, initial=0)
    highest = max(held + turn.num_bytes for held, turn in zip(before, turns, strict=False))
    return sum(kept) + recorded_backward(load).num_bytes - highest


@once
def recorded_tables(load: Workload) -> int:
    """Cosines and sines of a pass."""
    slices = recorded_slices(load) if load.settings.slice_tokens else None
    if slices is not None:
        return slices.tables
    return _bytes(load, _record(load).tables)


@once
def recorded_embeddings(load: Workload) -> int:
    """The embeddings' output, where the first layer keeps it."""
    return _bytes(load, _record(load).embedded)


@once
def recorded_final_norm(load: Workload) -> int:
    """Kept by the norm after the layers."""
    return _bytes(load, _record(load).final_norm)


@once
def recorded_final_backward(load: Workload) -> int:
    """Peak of that norm's backward pass beside what it kept."""
    return _highest(load, _record(load).final_backward)[0]


@once
def _turns(load: Workload) -> tuple[Turn, ...]:
    record, every = _record(load), load.settings.checkpoint_every
    plain = [_turn(load, kind.backward) for kind in record.kinds]
    again = [_turn(load, kind.recomputed) for kind in record.kinds]
    is_again = (bool(every) and at % every == 0 for at in range(len(record.order)))
    return tuple((again if one else plain)[kind] for kind, one in zip(record.order, is_again, strict=True))


def _turn(load: Workload, peak: Peak) -> Turn:
    highest, gradients = _highest(load, peak)
    scratch = flash_scratch(load) if peak.in_kernel else 0
    in_kernel = peak.highest_in_kernel(*_rows(load)) + scratch if scratch else 0
    # What the passes of one process have not: keys of other ranks, at attention.
    of_ranks = ulysses_kept(load) + gathered_backward(load)
    in_kernel, highest = (in_kernel + of_ranks, highest) if scratch else (0, highest + of_ranks)
    highest += _identity(load)
    return Turn(in_kernel, gradients, scratch) if in_kernel > highest else Turn(highest, gradients, 0)


def _identity(load: Workload) -> int:
    """The identity by which PEFT's DoRA multiplies A and B under ZeRO-3, whose weights lie in parts."""
    adapter = load.settings.adapter
    if adapter is None or adapter.kind != "dora" or load.settings.engine != "zero3":
        return 0
    return 4 * max((part.num_inputs**2 for part in load.shape.adapted(adapter)), default=0)


def _highest(load: Workload, peak: Peak) -> tuple[int, int]:
    return peak.highest(*_rows(load), with_gradients=load.trains_all)


def _bytes(load: Workload, moment: Moment) -> int:
    return round(moment.of(*_rows(load)))


def _rows(load: Workload) -> tuple[int, float]:
    """(rows, tokens of each, in whole pieces)."""
    rows = 1 if load.settings.padding_free else load.batch.rows
    piece = _record(load).piece
    return rows, load.N / rows if piece == 1 else -(-load.N // (rows * piece)) * piece


def _record(load: Workload) -> ModelRecord:
    assert load.record is not None, "These layers were measured."
    return load.record
