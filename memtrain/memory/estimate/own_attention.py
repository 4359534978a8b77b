"""Activations of transformers' own attention, which takes padded rows: scores in steps, and masks.

Rows are padded on the right, where causality is enough: SDPA makes no mask of it.

Source: transformers 5.23, masking_utils.py, `_ignore_causal_mask_sdpa`, and `eager_attention_forward`; held
against traces by tests/trainers/tools/trace/test_own_attention.py. Letters: as in activations.py.
"""

from __future__ import annotations

from memtrain.memory.estimate.workload import Workload


def makes_own_scores(load: Workload) -> bool:
    """Whether the model's own attention holds all scores of a row, as it does to cap or to drop some."""
    return load.shape.makes_scores and load.settings.attention == "transformers"


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


def own_kept(load: Workload) -> int:
    """Kept by a layer of its scores: their log-sum-exp and `masked_kept`; where it makes them in steps, keys
    and values for every head, capped or dropped scores, their softmax, and its rounded copy."""
    if not makes_own_scores(load):
        return 4 * load.N * load.shape.num_heads + masked_kept(load)
    return _for_every_head(load) + own_scores(load) * (load.a + 4 + (load.a if load.is_half else 0))


def masked_kept(load: Workload) -> int:
    """Kept besides by a layer with a masked window: keys and values for every head, and the mask as a kernel
    takes it, for each row."""
    if not hides_by_mask(load):
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
    and values have made room for their gradient.
    """
    gone = load.a * load.N * load.shape.query_width + load.is_half * load.a * own_scores(load)
    return kept - gone + 8 * own_scores(load)


def _for_every_head(load: Workload) -> int:
    """Bytes of keys and values laid out for every head that shares them, beyond their own."""
    return 2 * load.a * load.N * (load.shape.query_width - load.shape.kv_width)


def _row(load: Workload) -> int:
    """Tokens of a padded row."""
    return load.N // load.batch.rows
