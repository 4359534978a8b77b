"""Activations of layers that no formula knows, from passes through one of each kind (SeenLayers)."""

from __future__ import annotations

from itertools import accumulate

from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.model_shape.seen_layers import Growth, SeenLayers


@once
def seen_kept(load: Workload) -> tuple[int, ...]:
    """Bytes that each layer keeps for its backward pass when it is not checkpointed, in order."""
    seen = _seen(load)
    of_kinds = [_bytes(load, kind.kept) for kind in seen.kinds]
    return tuple(of_kinds[kind] for kind in seen.order)


@once
def seen_backward(load: Workload) -> int:
    """Peak of the layer that holds the most during its backward pass, kept tensors included."""
    return max(_of_each(load))


def seen_gradients(load: Workload) -> int:
    """Bytes of the gradients of the last layer's weights at its highest moment, where there were none before;
    0 of layers that formulas know."""
    seen = load.shape.seen
    return 0 if seen is None else seen.kinds[seen.order[-1]].gradients


@once
def seen_forward(load: Workload) -> int:
    """Most that a layer holds in a pass without gradients, with the embeddings and the residual stream."""
    return max(_bytes(load, kind.forward) for kind in _seen(load).kinds)


@once
def seen_at_work(load: Workload) -> int:
    """Share of all that layers keep that is gone, or counted by `seen_backward`, in the turn that needs most.

    A layer's turn holds what the layers before it keep, and in float32 its input, which its own norm is the
    first to keep.
    """
    kept, backward = seen_kept(load), _of_each(load)
    before = accumulate(kept, initial=0)
    highest = max(held + at_once for held, at_once in zip(before, backward, strict=False))
    entered = load.a * load.N * load.shape.width * (not load.is_half)
    return sum(kept) + seen_backward(load) - highest - entered


def _of_each(load: Workload) -> list[int]:
    seen = _seen(load)
    of_kinds = [_bytes(load, kind.backward) for kind in seen.kinds]
    return [of_kinds[kind] for kind in seen.order]


def _bytes(load: Workload, growth: Growth) -> int:
    rows = 1 if load.settings.padding_free else load.batch.rows
    piece = _seen(load).piece
    return round(rows * growth.of(-(-load.N // (rows * piece)) * piece))


def _seen(load: Workload) -> SeenLayers:
    assert load.shape.seen is not None, "These layers were passed."
    return load.shape.seen
