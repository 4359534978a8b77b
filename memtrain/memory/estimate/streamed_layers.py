"""Memory of a streamed layer: a few tensors of the whole row, and the intermediates of one slice."""

# a: bytes of a number, N: tokens of a micro-batch, n: tokens of a slice, W: model width, K: width of keys.

from __future__ import annotations

from dataclasses import replace

from memtrain.memory.estimate.activations import layer_backward, layer_boundary, layer_forward, norm_kept
from memtrain.memory.estimate.workload import HeaviestBatch, Workload

KEYS = "keys and values"
"""Owner of the keys and values of one layer, and of their gradients."""
ROW = "gradients of the row"
"""Owner of the gradients of one layer's output and input."""


def slice_of(load: Workload) -> Workload:
    """The load of one slice: as many tokens, all scored, in one row."""
    n = min(load.settings.slice_tokens, load.N)
    whole = load.settings.model_copy(update={"pad_to_multiple_of": None, "slice_tokens": 0})
    return replace(load, settings=whole, batch=HeaviestBatch(1, n, n, n, load.batch.asks))


def streamed_backward(load: Workload) -> dict[str, int]:
    """Most that one layer holds in its backward pass beside its input, by owner.

    2*a*N*W for the gradients of output and input; 2*a*N*K for keys and values, 2*4*N*K for their gradients,
    which are summed in float32; and of one slice what a layer holds in its backward pass
    (`layer_backward`), where the first norm keeps a view of the input in float32. Gradients of weights are
    summed over the slices in float32.

    Source: derived from trainers/model/streamed; held against traces by
    tests/trainers/tools/trace/test_trace.py.
    """
    part, a, N = slice_of(load), load.a, load.N  # noqa: N806
    keys = 2 * N * load.shape.kv_width * (a + max(4, a))
    return {ROW: 2 * layer_boundary(load), KEYS: keys, "recomputation": _slice_backward(part) + _sums(load)}


def _slice_backward(part: Workload) -> int:
    """Of one slice; the gradient of its output is part of the row's, and in float32 so is its input."""
    viewed = 1 if part.is_half else 2
    return layer_backward(part) - viewed * layer_boundary(part)


def _sums(load: Workload) -> int:
    """Gradients of one layer's weights: their sums in float32 at least, and one that is being added."""
    shape, adapter = load.shape, load.settings.adapter
    if adapter is not None:
        return 4 * shape.num_adapter_per_layer(adapter)
    whole = shape.num_per_layer(expert=shape.num_expert_layers > 0)
    return max(4, load.a) * whole + load.a * shape.largest_linear


def forward_of_layer(load: Workload) -> int:
    """Most that one layer holds in a pass without gradients; in slices: input, output, keys and values of the
    row, and a slice."""
    if not load.settings.slice_tokens:
        return layer_forward(load)
    rows = 2 * layer_boundary(load) + 2 * load.a * load.N * load.shape.kv_width
    return rows + layer_forward(slice_of(load))


def final_norm_kept(load: Workload) -> int:
    """Kept by the final norm in slices: its input."""
    return layer_boundary(load)


def final_norm_backward(load: Workload) -> int:
    """Most that the final norm in slices holds beside its input in its backward pass: the gradients of its
    output and input, and one slice of a norm."""
    part = slice_of(load)
    of_slice = norm_kept(part, part.shape.width, num_scales=1)
    of_slice += part.N * part.shape.width * (12 + (3 if load.trains_all else 4) * load.a)
    return 2 * layer_boundary(load) + of_slice
