"""Memory of a streamed layer: a few tensors of the whole row, and the intermediates of one slice."""

# a: bytes of a number, N: tokens of a micro-batch, n: tokens of a slice, W: model width, K: width of keys.

from __future__ import annotations

from memtrain.memory.estimate.activations import (
    attention_kept,
    keeps_its_input,
    keeps_mlp_input,
    layer_boundary,
    layer_forward,
    layer_kept,
    mlp_backward,
    mlp_output_backward,
    needs_product,
    norm_kept,
    unpacking_backward,
)
from memtrain.memory.estimate.adapters import adapts, adds_in_one_kernel, kept_by
from memtrain.memory.estimate.context_parallel import num_gathered_kv
from memtrain.memory.estimate.experts import experts_backward, experts_forward, stack_gradients
from memtrain.memory.estimate.flash_scratch import SCRATCH, flash_scratch, windows_backward
from memtrain.memory.estimate.layer_record import recorded_slices, slice_of
from memtrain.memory.estimate.own_attention import whole_scores
from memtrain.memory.estimate.quantized import LAST
from memtrain.memory.estimate.weights_offload import adapter_of_layer
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import ENTERING
from memtrain.memory.plan.sizes import WIDENED_TOKENS

KEYS = "keys and values"
"""Owner of the keys and values of one layer, and of their gradients."""
ROW = "gradient of the row"
"""Owner of the gradient of one layer's output."""


def streamed_backward(load: Workload) -> dict[str, int]:
    """Most that one layer holds in its backward pass beside its input, by owner.

    a*N*W for the gradient of the output (that of the input takes the place of the input); 2*a*N*K for keys
    and values, 2*4*N*K for their gradients, which are summed in float32 (of the M tokens too that ranks of
    context parallelism gather); and of one slice what a layer holds
    in its backward pass (`_slice_backward`). Gradients of weights are summed over the slices in float32.

    Source: derived from trainers/model/streamed; held against traces by
    tests/trainers/tools/trace/test_trace.py.
    """
    measured = None if load.record is None else recorded_slices(load)
    if measured is not None:
        beside, of_keys = _gathered(load)
        keys = 2 * load.N * load.shape.kv_width * (load.a + max(4, load.a))
        inner = measured.backward - measured.kernel - keys
        owners = {ROW: layer_boundary(load) + beside, KEYS: keys + of_keys}
        return owners | {"recomputation": inner, SCRATCH: measured.kernel}
    part, a, N = slice_of(load), load.a, load.N  # noqa: N806
    sums, added = _sums(load)
    gathered = num_gathered_kv(load)
    keys = 2 * (N + gathered) * load.shape.kv_width * (a + max(4, a))
    inner, kernel = _slice_backward(part, load, added)
    # The input's gradient waits for that of keys, to which other ranks add.
    rows = layer_boundary(load) * (2 if gathered else 1)
    return {ROW: rows, KEYS: keys, "recomputation": inner + sums, SCRATCH: kernel}


def _gathered(load: Workload) -> tuple[int, int]:
    """Bytes besides where ranks hold a row together: the input's gradient, which waits for that of keys that
    other ranks add to, and gathered keys and values with their gradients."""
    gathered = num_gathered_kv(load)
    keys = 2 * gathered * load.shape.kv_width * (load.a + max(4, load.a))
    return (layer_boundary(load) if gathered else 0), keys


def _slice_backward(part: Workload, load: Workload, added: int) -> tuple[int, int]:
    """Of one slice of a load, a kernel's scratch apart from the rest (seen in traces).

    In the MLP the gradient of its output is the row's, and so are keys, values and an input that the first
    norm keeps; `added`: what its largest map adds to the sum of its weight's gradient, in half precision
    before the gradient of its input is made. Attention has no weights to add to.
    """
    kept, _ = whole_scores(part)
    made = max(mlp_backward(part), unpacking_backward(part), _at_last_map(part) + added, _forward_end(part))
    if part.shape.experts is not None:
        # A stack's gradient is added to its sum, and gone, before the next is made.
        gradients, begun = stack_gradients(part), layer_kept(part) + layer_boundary(part)
        made = max(
            made,
            begun + experts_forward(part, keeps_input=keeps_mlp_input(part)),
            experts_backward(part, layer_kept(part), *gradients, stays=False),
        )
    of_row = (1 + keeps_its_input(part)) * layer_boundary(part) + 2 * part.a * part.N * part.shape.kv_width
    mlp = made - of_row - kept
    attention = _slice_attention(part, load)
    kernel = flash_scratch(part) if attention + flash_scratch(part) > mlp else 0
    return max(mlp, attention + kernel) - kernel, kernel


def _at_last_map(part: Workload) -> int:
    """Bytes of one slice where the gradient of the MLP's last map is added to its sum."""
    return layer_kept(part) + layer_boundary(part) if part.is_half else mlp_output_backward(part)


def _forward_end(part: Workload) -> int:
    """Bytes of one slice at the end of its recomputation, where the last map's adapter is PEFT's own: the
    residual stream, that map's input and output, its adapter's product, and the same scaled; 0 elsewhere."""
    if adds_in_one_kernel(part) or not adapts(part, LAST):
        return 0
    product = 0 if needs_product(part) else part.shape.mlp_width
    return layer_kept(part) + part.a * part.N * (product + 5 * part.shape.width)


def _slice_attention(part: Workload, load: Workload) -> int:
    """Bytes at the moment of attention's backward pass over one slice and one block of keys.

    Kept: rotated queries, output and log-sum-exp, the norm before and its output; the gradients of the
    residual stream and of attention's output; the slice's input is the row's. Gradients of queries are
    summed over blocks of keys in float32: 4*n*Q, beside what one block gives. A CPU's kernel and masked
    attention work on float32 copies of half-precision numbers there. Rows that look past their block of a
    window are copied.
    """
    shape, n, a = part.shape, part.N, part.a
    Q, K = shape.query_width, shape.kv_width  # noqa: N806
    kept, _ = whole_scores(part)
    window = shape.sliding_window if windows_backward(load) else None
    held = attention_kept(part) - kept - 2 * a * n * K + norm_kept(part, shape.width, num_scales=1)
    held += _maps_inputs(part) + a * n * (shape.width + Q) + max(4, a) * n * Q
    held -= keeps_its_input(part) * layer_boundary(part)
    in_kernel = part.settings.attention == "torch_cpu"
    # trainers/model/streamed/attention.py: parts of a row that nothing rounds before they are summed.
    is_cut = n < load.N and part.settings.device == "cpu"
    widens = part.is_half and (in_kernel or (is_cut and kept > 0))
    wide = max(4, a) if in_kernel or widens else a
    held += n * wide * (Q + 2 * K) + 4 * n * (3 * Q + 2 * K) * widens

    def of_layer(span: int, copies: int) -> int:
        """Bytes that layers of one kind hold besides."""
        # Of one block of keys at a time: weights, their gradients and a product of the two, and the queries'
        # gradients that it gives; none is kept. Capped scores have a slope.
        scores = (8 + wide + 4 * shape.makes_scores) * span * span * shape.num_heads + span * wide * Q
        # A single call's results are the row's; of more, one's stay until those of the next are there.
        results = 0 if span == n else 2 * (Q + 2 * K)
        return scores * (kept > 0) + span * wide * results * in_kernel + copies

    copies = a * n * (3 * Q + 2 * K) if window else 0
    whole = of_layer(n, 0)
    if not window:
        return held + whole
    short = of_layer(min(n, window), copies)
    return held + (short if shape.num_sliding_layers == shape.num_layers else max(whole, short))


def _maps_inputs(part: Workload) -> int:
    """Kept by the maps to queries, keys and values: their input, and what adapters keep."""
    adapter = part.settings.adapter
    if adapter is None:
        return layer_boundary(part)
    adapted = [map_ for map_ in part.shape.adapted(adapter) if map_.name in ENTERING]
    return (layer_boundary(part) if adapted else 0) + kept_by(part, adapted)


def _sums(load: Workload) -> tuple[int, int]:
    """Gradients of one layer's weights: their sums in float32 at least, and an addend of the largest.

    In float32 that is one gradient. In half precision no gradient is made (trainers/model/streamed/
    wide_products.py): a product's operands are widened a few tokens at a time, where no kernel does without.
    """
    shape, adapter = load.shape, load.settings.adapter
    if adapter is not None:
        return 4 * adapter_of_layer(adapter, shape), 0
    whole = shape.num_per_layer(expert=shape.num_expert_layers > 0)
    added = 0 if shape.num_expert_layers else load.a * shape.largest_linear
    if load.is_half and not shape.num_expert_layers:
        ends = max((part.num_inputs + part.num_outputs for part in shape.linears), default=0)
        added = 0 if load.sums_half_wide else 4 * min(WIDENED_TOKENS, load.settings.slice_tokens) * ends
    return max(4, load.a) * whole, added


def forward_of_layer(load: Workload) -> int:
    """Most that one layer holds in a pass without gradients; in slices: input, output, keys and values of the
    row, and a slice, whose own input and embeddings are views. The embeddings stay until the last layer: the
    model's own forward pass holds them."""
    if not load.settings.slice_tokens:
        return layer_forward(load)
    measured = None if load.record is None else recorded_slices(load)
    if measured is not None:
        return measured.forward + 2 * load.a * num_gathered_kv(load) * load.shape.kv_width
    rows = 3 * layer_boundary(load) + 2 * load.a * (load.N + num_gathered_kv(load)) * load.shape.kv_width
    part = slice_of(load)
    return rows + layer_forward(part) - 2 * layer_boundary(part)


def final_norm_backward(load: Workload) -> int:
    """Most that the final norm in slices holds beside its input in its backward pass: the gradient of its
    output, and one slice of a norm."""
    measured = None if load.record is None else recorded_slices(load)
    if measured is not None:
        return measured.final_backward
    part = slice_of(load)
    of_slice = norm_kept(part, part.shape.width, num_scales=1)
    of_slice += part.N * part.shape.width * (12 + (3 if load.trains_all else 4) * load.a)
    return layer_boundary(load) + of_slice
