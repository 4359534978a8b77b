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
    if seen is None:
        return 0
    last = seen.kinds[seen.order[-1]]
    return last.recomputed_gradients if is_recomputed(load, len(seen.order) - 1) else last.gradients


def is_recomputed(load: Workload, at: int) -> bool:
    """Whether a layer is computed again in its backward pass."""
    every = load.settings.checkpoint_every
    return bool(every) and at % every == 0


@once
def seen_forward(load: Workload) -> int:
    """Most that a layer holds in a pass without gradients, with the embeddings and the residual stream."""
    return max(_bytes(load, kind.forward) for kind in _seen(load).kinds)


@once
def seen_at_work(load: Workload) -> int:
    """Share of all that layers keep that is gone, or counted by `seen_backward`, in the turn that needs most.

    A layer's turn holds what the layers before it keep, and its input where its own norm is the first to keep
    it: in float32, and a layer norm.
    """
    kept, backward = seen_kept(load), _of_each(load)
    before = accumulate(kept, initial=0)
    highest = max(held + at_once for held, at_once in zip(before, backward, strict=False))
    keeps_input = not load.is_half or load.shape.family.layer_norms
    return sum(kept) + seen_backward(load) - highest - load.a * load.N * load.shape.width * keeps_input


def _of_each(load: Workload) -> list[int]:
    seen = _seen(load)
    plain = [_bytes(load, kind.backward) for kind in seen.kinds]
    again = [_bytes(load, kind.recomputed) for kind in seen.kinds]
    return [(again if is_recomputed(load, at) else plain)[kind] for at, kind in enumerate(seen.order)]


def _bytes(load: Workload, growth: Growth) -> int:
    rows = 1 if load.settings.padding_free else load.batch.rows
    piece = _seen(load).piece
    return round(rows * growth.of(-(-load.N // (rows * piece)) * piece))


def _seen(load: Workload) -> SeenLayers:
    assert load.shape.seen is not None, "These layers were passed."
    return load.shape.seen
