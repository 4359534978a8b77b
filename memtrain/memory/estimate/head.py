"""The LM head and the loss in closed form: bytes kept for the backward pass, and most at once.

Letters as in activations.py: N tokens of a micro-batch with padding, S scored tokens, W model width, V
vocabulary, a bytes of an activation. Source: counted in trainers/losses/head, and held against traces.
"""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.activations import layer_boundary, norm_kept
from memtrain.memory.estimate.adapters import head_adapter
from memtrain.memory.estimate.layer_record import recorded_final_norm
from memtrain.memory.estimate.workload import Workload, once
from memtrain.memory.plan.heaviest_batch import HeadOutput
from memtrain.memory.plan.sizes import tile_columns, tile_tokens


class HeadBytes(NamedTuple):
    """The LM head and the loss: the final norm, then full logits or tiles of them."""

    norm: int
    """Kept by the final norm."""
    kept: int
    """Kept from the loss's forward pass to its backward pass."""
    forward: int
    """Most at once during the loss's forward pass, with `kept`."""
    backward: int
    """Most at once during the loss's backward pass, with `kept`."""
    evaluation: int
    """Most at once without gradients."""
    weight_gradient: int
    """Bytes of the head's gradient."""


@once
def head_bytes(load: Workload, *, trains_head: bool) -> HeadBytes:
    """The head under `settings.loss`, with statistics; S rows of the final norm's output enter it."""
    shape, a = load.shape, load.a
    picked, rows = a * load.S * shape.width, a * load.N * shape.width
    trains_head = trains_head and shape.ends_in == "lm"
    weight_gradient = a * shape.vocab_size * shape.width if trains_head else 0
    form = _full_head if load.settings.loss == "full" else _chunked_head
    if load.batch.teacher is not None and load.settings.loss != "full":
        form = _taught_head
    kept, forward, backward, evaluation = form(load, trains_head)
    if load.batch.teacher is not None:
        # Until the loss is made; what is kept for the backward pass has it no more.
        of_teacher = load.batch.teacher.each_scored * load.S
        forward, evaluation = forward + of_teacher, evaluation + of_teacher
    kept, forward, backward, evaluation = map(
        sum, zip((kept, forward, backward, evaluation), _of_adapter(load), strict=True)
    )
    if load.settings.slice_tokens:
        # Seen in traces of streamed layers: the norm's output is gone once the rows are picked from it, and
        # the picked rows are gone when their gradient is scattered.
        return HeadBytes(
            norm=layer_boundary(load),
            kept=picked + kept,
            forward=picked + max(rows, forward),
            backward=max(picked + backward, weight_gradient + picked + rows),
            evaluation=picked + max(rows, evaluation),
            weight_gradient=weight_gradient,
        )
    return HeadBytes(
        norm=recorded_final_norm(load) if load.record else norm_kept(load, shape.width, num_scales=1),
        kept=picked + kept,
        # The norm's output is gone once the rows are picked from it; transformers' own step holds it.
        forward=picked + (rows + forward if load.batch.foreign else max(rows, forward)),
        # At the end the gradient of the picked rows is scattered into one of all rows.
        backward=picked + max(backward, weight_gradient + picked + rows),
        evaluation=picked + (rows + evaluation if load.batch.foreign else max(rows, evaluation)),
        weight_gradient=weight_gradient,
    )


def _of_adapter(load: Workload) -> tuple[int, int, int, int]:
    """Bytes besides of an adapter on the head: S rows as it widens them (4*S*W in half precision), products
    with A as they come and scaled, and gradients of products and of B, which tiles of the NLL make in the
    forward pass. Whole logits are gone before them."""
    of_a, of_b = head_adapter(load)
    if not of_a:
        return 0, 0, 0, 0
    low = 4 * load.S * (of_a // load.shape.width)
    rows = 2 * low + 4 * load.S * load.shape.width * load.is_half
    learned = (low + 4 * of_b) * (load.settings.loss != "full")
    made = rows + learned * (load.batch.asks is HeadOutput.NLL)
    return made, made, rows + learned, rows


def _full_head(load: Workload, trains_head: bool) -> tuple[int, int, int, int]:
    """Full logits, in units of 4*S*V: 1 is kept (the log-softmax), 2 with a soft cap.

    Forward: the logits beside it, and a tile of statistics. Backward: the gradients of it and of the logits.
    With entropies that are learned from, the probabilities are kept besides, and their product is made; with
    counted ones there is a tile of statistics.
    """
    logits = 4 * load.S * load.shape.vocab_size
    cap = logits if load.shape.logit_softcap else 0
    asks, foreign = load.batch.asks, load.batch.foreign
    has_tile = asks in (HeadOutput.NLL, HeadOutput.STATISTICS)
    tile = min(STATISTICS * logits, load.settings.loss_tile_bytes) if has_tile else 0
    kept, forward, backward, evaluation = FULL_LOGITS.get(asks, (1, 2, 3, 2))
    if load.batch.teacher is not None:
        kept, forward, backward, evaluation = load.batch.teacher.logits
    if foreign is not None and asks is HeadOutput.NLL:
        tile, (kept, forward, backward, evaluation) = 0, foreign.logits
    # Without a backward pass the log-softmax of a loss is gone before its statistics.
    of_tile = tile + (logits if asks is HeadOutput.NLL else round(evaluation * logits))
    return (
        round(kept * logits) + cap,
        round(forward * logits) + cap + tile,
        round(backward * logits) + cap,
        max(cap + round(evaluation * logits), of_tile),
    )


FULL_LOGITS: dict[HeadOutput, tuple[float, float, float, float]] = {
    HeadOutput.NLL: (1, 2, 3, 2),
    HeadOutput.LOGPS: (1, 2, 3, 2),
    HeadOutput.STATISTICS: (1, 2, 3, 2),
    HeadOutput.ENTROPIES: (2, 4, 4, 4),
}
"""(kept, forward, backward, evaluation) of full logits, in copies of them. Counted in
trainers/losses/head/linear_full.py and torch's cross_entropy."""

STATISTICS = 3
"""Copies of a tile of logits that its statistics make: log-probs, probabilities and their product."""


def _chunked_head(load: Workload, trains_head: bool) -> tuple[int, int, int, int]:
    """Tiles of T x V float32 logits within `loss_tile_bytes`; see trainers/losses.

    A head that is frozen, in float32, or smaller than a tile: gradients are formed in the forward pass, and
    d_hidden (a*S*W) with d_weight (4*V*W) is kept. Otherwise the backward pass forms the tiles again, columns
    outer: 4*S*W for d_hidden, a*V*W for d_weight, and the tile's budget again for the sums of K columns, or
    a*S*W for d_hidden as it is rounded.
    """
    shape, a, S, tile_bytes = load.shape, load.a, load.S, load.settings.loss_tile_bytes  # noqa: N806
    V, W = shape.vocab_size, shape.width  # noqa: N806
    scored = _tile(load, V, buffers=1 if load.batch.asks is HeadOutput.LOGPS or load.fuses_tiles else 2)
    if not trains_head or not load.is_half or tile_bytes >= 4 * V * W:
        is_plain = load.batch.asks is not HeadOutput.NLL
        buffers = 1 if load.fuses_tiles else 2 - is_plain + shape.logit_softcap
        T, tile = _tile(load, V, buffers=buffers)  # noqa: N806
        kept = a * S * W + (4 * V * W if trains_head else 0)
        narrowed = a * V * W if trains_head and load.is_half else 0
        scratch = tile + _beside_a_tile(load, T, V, min(4 * V * W, tile_bytes)) + 4 * T * W * load.is_half
        if load.batch.asks is not HeadOutput.NLL:
            # The loss comes after the log-probs: its gradients are made in the backward pass, tile by tile.
            forward = scored[1] + _widened(load, scored[0], V)
            return 0, forward, kept + max(scratch, narrowed), forward
        return kept, kept + scratch, kept + narrowed, sum(scored[1:]) + _widened(load, scored[0], V)
    columns = tile_columns(tile_bytes, W, V)
    R = min(S, tile_tokens(tile_bytes, columns, 2 * (1 + shape.logit_softcap)))  # noqa: N806
    tile = 4 * R * columns * (1 + shape.logit_softcap)
    block = 4 * columns * W
    # When all tiles are through the float32 sums and what they are rounded to are there at once.
    beside = max(block + _beside_a_tile(load, R, columns, block), a * S * W)
    backward = 4 * S * W + a * V * W + tile + beside
    forward = scored[1] + _widened(load, scored[0], V)
    return 0, forward, backward, forward


def _taught_head(load: Workload, trains_head: bool) -> tuple[int, int, int, int]:
    """Tiles with a teacher's logits beside the student's: see trainers/losses/distill/linear.py.

    Gradients are always formed in the forward pass, those of a trained head in float32 (4*V*W).
    """
    shape, a, S, teacher = load.shape, load.a, load.S, load.batch.teacher  # noqa: N806
    assert teacher is not None, "These tiles hold a teacher's logits."
    V, W = teacher.num_columns, shape.width  # noqa: N806
    buffers = 4 if load.batch.asks is HeadOutput.TEACHER else 2
    T, tile = _tile(load, V, buffers=buffers + shape.logit_softcap)  # noqa: N806
    scores = 4 * 3 * S
    kept = a * S * W + (4 * V * W if trains_head else 0)
    narrowed = a * V * W if trains_head and load.is_half else 0
    block = min(4 * V * W, load.settings.loss_tile_bytes)
    scratch = tile + _beside_a_tile(load, T, V, block) + 4 * T * W * load.is_half
    return kept, kept + scores + scratch, kept + narrowed, scores + tile + _widened(load, T, V)


def _tile(load: Workload, num_columns: int, buffers: int) -> tuple[int, int]:
    """(tokens of a tile, bytes of all its buffers)."""
    tokens = min(load.S, tile_tokens(load.settings.loss_tile_bytes, num_columns, buffers))
    return tokens, 4 * tokens * num_columns * buffers


def _widened(load: Workload, tokens: int, num_columns: int) -> int:
    """Float32 copies of hidden states and of a block of weights, where no kernel sums half products wide."""
    if not load.is_half or load.sums_half_wide:
        return 0
    block = min(load.settings.loss_tile_bytes, 4 * num_columns * load.shape.width)
    return 4 * tokens * load.shape.width + block


def _beside_a_tile(load: Workload, tokens: int, num_columns: int, block: int) -> int:
    """Scratch of a product with a tile of gradients: widened operands, or the tile in half precision, which
    Triton's kernels write in the tile's own place."""
    if not load.is_half:
        return 0
    if load.sums_half_wide:
        return 0 if load.fuses_tiles else load.a * tokens * num_columns
    return 4 * tokens * load.shape.width + block
