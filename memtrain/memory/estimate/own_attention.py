"""Activations of attention that holds scores: transformers' own, which takes padded rows, and masked.

Rows are padded on the right, where causality is enough: SDPA makes no mask of it.

Source: transformers 5.23, masking_utils.py, `_ignore_causal_mask_sdpa`, and `eager_attention_forward`; held
against traces by tests/trainers/tools/trace/test_own_attention.py. Letters: as in activations.py.
"""

from __future__ import annotations

from memtrain.memory.estimate.flash_scratch import MASKED
from memtrain.memory.estimate.workload import Workload


def makes_own_scores(load: Workload) -> bool:
    """Whether the model's own attention holds all scores of a row, as it does to cap them."""
    return load.shape.makes_scores and load.settings.attention == "transformers"


def drops_in_steps(load: Workload) -> bool:
    """Whether SDPA drops scores in steps, all of a row's in float32: on a CPU, whose fused form drops none.

    Source: torch 2.13, native/transformers/sdp_utils_cpp.cpp, `check_for_dropout`; attention.cpp,
    `_scaled_dot_product_attention_math`.
    """
    shape, settings = load.shape, load.settings
    is_own = settings.attention == "transformers" and not shape.makes_scores
    return is_own and shape.drops_scores and settings.device == "cpu"


def hides_by_mask(load: Workload) -> bool:
    """Whether a window that is shorter than the rows is a mask to SDPA."""
    window = load.shape.sliding_window if load.shape.num_sliding_layers else None
    is_own = load.settings.attention == "transformers" and not load.shape.makes_scores
    return is_own and window is not None and window <= _row(load)


def own_masks(load: Workload) -> int:
    """Bytes of the masks of a pass: to scores in steps one for each kind of layer, for every row and in their
    precision; to SDPA a byte for each pair of tokens, for all rows."""
    shape, rows = load.shape, load.batch.rows
    if makes_own_scores(load):
        return rows * _row(load) ** 2 * load.a * (1 + (0 < shape.num_sliding_layers < shape.num_layers))
    return _row(load) ** 2 * hides_by_mask(load)


def final_norm_forward(load: Workload) -> int:
    """Bytes beside what layers keep as the final norm, to whose end masks are there, takes its steps.

    Embeddings, its input, the normalized form and its product; in half precision a float32 copy of the input
    too, and these in float32 where the scale is.
    """
    widths = 4
    if load.is_half:
        widths = 8 + load.trains_all if load.shape.family.norms_in_float else 7
    return load.a * load.N * load.shape.width * widths


def own_kept(load: Workload) -> int:
    """Kept by a layer of its scores: their log-sum-exp and `masked_kept`; where it makes them in steps, keys
    and values for every head, capped or dropped scores, their softmax, and its rounded copy."""
    if drops_in_steps(load):
        return 0
    if not makes_own_scores(load):
        return 4 * load.N * load.shape.num_heads + masked_kept(load)
    return _for_every_head(load) + own_scores(load) * (load.a + 4 + _after_softmax(load))


def _after_softmax(load: Workload) -> int:
    """Bytes kept of each score beside its softmax: the softmax's rounded copy, or the dropped one with its
    mask, which on a CPU is of numbers."""
    if load.shape.drops_scores:
        return load.a + (1 if load.settings.device == "cuda" else load.a)
    return load.a if load.is_half else 0


def masked_kept(load: Workload) -> int:
    """Kept besides by a layer with a masked window: keys and values for every head, and the mask as a kernel
    takes it, for each row."""
    if not hides_by_mask(load) or drops_in_steps(load):
        return 0
    return _for_every_head(load) + load.a * load.N * _row(load)


def own_scores(load: Workload) -> int:
    """Scores of one layer: heads * length^2 for each row."""
    return load.shape.num_heads * load.N * _row(load)


def softmax_forward(load: Workload) -> int:
    """Bytes at a softmax in steps without gradients: scores and their softmax in float32, in half precision
    beside the scores themselves; 0 where there is none."""
    return makes_own_scores(load) * own_scores(load) * (8 + (load.a if load.is_half else 0))


def softmax_backward(load: Workload, kept: int) -> int:
    """Bytes at a softmax in a layer's backward pass, where its attention has `kept` so many.

    Float32 gradients of its output and input are there; its rounded copy and the attention's output are gone,
    and values have made room for their gradient. Of dropped scores the product with the values is higher in
    float32.
    """
    left = kept - load.a * load.N * load.shape.query_width
    at_softmax = left + own_scores(load) * (8 - _after_softmax(load))
    return max(at_softmax, left + load.a * own_scores(load)) if load.shape.drops_scores else at_softmax


def dropped_kept(load: Workload) -> int:
    """Kept by a layer that drops scores in steps, all in float32: queries, keys and values for every head,
    the softmax, what it is multiplied with, and the product."""
    return 12 * load.N * load.shape.query_width + 12 * own_scores(load)


def dropped_forward(load: Workload) -> int:
    """Bytes beside what is kept as a layer that drops scores ends its attention in half precision; 0 in
    float32, whose backward pass needs more.

    In steps of the model's own the rounded softmax. In SDPA's queries, keys and values as they came and in
    float32, keys and values for every head that shares them, a mask of the row, the product in float32, and
    the dropped softmax, rounded, which nobody asks for.
    """
    rounded = load.is_half * load.a * own_scores(load)
    if not drops_in_steps(load):
        return rounded * (makes_own_scores(load) and load.shape.drops_scores)
    query, kv = load.shape.query_width, load.shape.kv_width
    widths = (load.a + 4) * (query + 2 * kv) + 4 * query + 8 * query * (query > kv)
    return load.is_half * (load.N * widths + 4 * _row(load) ** 2) + rounded


def dropped_backward(load: Workload, kept: int) -> int:
    """Bytes at the product with the values in a layer's backward pass, where attention has `kept` so many.

    Float32 gradients of its two factors and of its output are there; the attention's output is gone.
    """
    width = load.N * load.shape.query_width
    return kept + 4 * own_scores(load) + 8 * width - load.a * width


def _for_every_head(load: Workload) -> int:
    """Bytes of keys and values laid out for every head that shares them, beyond their own."""
    return 2 * load.a * load.N * (load.shape.query_width - load.shape.kv_width)


def _row(load: Workload) -> int:
    """Tokens of a padded row."""
    return load.N // load.batch.rows


def whole_scores(load: Workload) -> tuple[int, int]:
    """Bytes counted here for scores of all tokens with all: kept, and in the backward pass besides."""
    if load.settings.attention != MASKED:
        return 0, 0
    pairs, heads = load.N * load.N, load.shape.num_heads
    return pairs * (heads * (4 + load.a + 4 * load.shape.makes_scores) + 1), pairs * heads * (
        6 if load.is_half else 4
    )
