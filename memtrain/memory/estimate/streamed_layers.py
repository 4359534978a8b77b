"""Memory of a streamed layer: a few tensors of the whole row, and the intermediates of one slice."""

# a: bytes of a number, N: tokens of a micro-batch, n: tokens of a slice, W: model width, K: width of keys.

from __future__ import annotations

from dataclasses import replace

from memtrain.memory.estimate.activations import (
    SCRATCH,
    attention_backward,
    dequantized,
    flash_scratch,
    layer_boundary,
    layer_forward,
    mlp_backward,
    norm_kept,
    whole_scores,
)
from memtrain.memory.estimate.workload import HeaviestBatch, Workload

KEYS = "keys and values"
"""Owner of the keys and values of one layer, and of their gradients."""
ROW = "gradient of the row"
"""Owner of the gradient of one layer's output."""

WIDENED_TOKENS = 256
"""Tokens whose numbers are widened at a time for a weight's gradient, where no kernel adds a product of half
precision to a float32 sum: 18 MiB for an 8B model's largest map, and products long enough. Taste."""


def slice_of(load: Workload) -> Workload:
    """The load of one slice: as many tokens, all scored, in one row."""
    n = min(load.settings.slice_tokens, load.N)
    whole = load.settings.model_copy(update={"pad_to_multiple_of": None, "slice_tokens": 0})
    return replace(load, settings=whole, batch=HeaviestBatch(1, n, n, n, load.batch.asks))


def streamed_backward(load: Workload) -> dict[str, int]:
    """Most that one layer holds in its backward pass beside its input, by owner.

    a*N*W for the gradient of the output (that of the input takes the place of the input); 2*a*N*K for keys
    and values, 2*4*N*K for their gradients, which are summed in float32; and of one slice what a layer holds
    in its backward pass (`_slice_backward`). Gradients of weights are summed over the slices in float32.

    Source: derived from trainers/model/streamed; held against traces by
    tests/trainers/tools/trace/test_trace.py.
    """
    part, a, N = slice_of(load), load.a, load.N  # noqa: N806
    keys = 2 * N * load.shape.kv_width * (a + max(4, a))
    inner, kernel = _slice_backward(part)
    return {ROW: layer_boundary(load), KEYS: keys, "recomputation": inner + _sums(load), SCRATCH: kernel}


def _slice_backward(part: Workload) -> tuple[int, int]:
    """Of one slice, a kernel's scratch apart from the rest (seen in traces).

    In the MLP input, output and that one's gradient are no memory of its own. In the attention the
    gradient of the queries is summed over blocks of keys in float32: 4*n*Q, beside what one block gives. A
    CPU's kernel works on float32 copies of half-precision numbers there, and gives such.
    """
    shape, n = part.shape, part.N
    kept, made = whole_scores(part)
    # Of one block of keys at a time: weights, their gradients and a product of the two; none is kept.
    scores = (8 + part.a) * n * n * shape.num_heads if kept else 0
    mlp = mlp_backward(part) - 3 * layer_boundary(part) - kept
    attention = attention_backward(part) + max(4, part.a) * n * shape.query_width
    attention += layer_boundary(part) + 4 * n * shape.num_heads + scores - kept - made
    if part.is_half and part.settings.attention == "torch_cpu":
        # Copies of query, output and its gradient, key and value; wider gradients, of keys for every query
        # head before they are summed.
        copied = 3 * shape.query_width + 2 * shape.kv_width
        attention += n * (4 + 4 - part.a) * copied
    kernel = flash_scratch(part) if attention > mlp else 0
    return max(mlp, attention) - kernel + dequantized(part), kernel


def _sums(load: Workload) -> int:
    """Gradients of one layer's weights: their sums in float32 at least, and the addend.

    In float32 that is one gradient. In half precision no gradient is made (trainers/model/streamed/
    wide_products.py): a product's operands are widened a few tokens at a time, where no kernel does without.
    """
    shape, adapter = load.shape, load.settings.adapter
    if adapter is not None:
        return 4 * shape.num_adapter_per_layer(adapter)
    whole = shape.num_per_layer(expert=shape.num_expert_layers > 0)
    added = load.a * shape.largest_linear
    if load.is_half and not shape.num_expert_layers:
        ends = max((part.num_inputs + part.num_outputs for part in shape.linears), default=0)
        in_kernel = load.settings.device == "cuda" and load.settings.dtype == "bfloat16"
        added = 0 if in_kernel else 4 * min(WIDENED_TOKENS, load.settings.slice_tokens) * ends
    return max(4, load.a) * whole + added


def forward_of_layer(load: Workload) -> int:
    """Most that one layer holds in a pass without gradients; in slices: input, output, keys and values of the
    row, and a slice. The embeddings stay until the last layer: the model's own forward pass holds them."""
    if not load.settings.slice_tokens:
        return layer_forward(load)
    rows = 3 * layer_boundary(load) + 2 * load.a * load.N * load.shape.kv_width
    return rows + layer_forward(slice_of(load))


def final_norm_backward(load: Workload) -> int:
    """Most that the final norm in slices holds beside its input in its backward pass: the gradient of its
    output, and one slice of a norm."""
    part = slice_of(load)
    of_slice = norm_kept(part, part.shape.width, num_scales=1)
    of_slice += part.N * part.shape.width * (12 + (3 if load.trains_all else 4) * load.a)
    return layer_boundary(load) + of_slice
