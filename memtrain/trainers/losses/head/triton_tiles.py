"""Triton kernels of a tile of logits: scores in a single read, the gradient in a read and a write.

Imported where triton is known to be installed: `tiles.py` says when. The numbers are those of the torch
form in `tiles.py` but for the order of sums. A row of the tile is one token.

Source: Milakov & Gimelshein 2018, arXiv:1805.02867, algorithm 3 (maximum and sum of a softmax in one pass).
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedFunctionDecorator=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingParameterType=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096
"""Columns that a program holds at once: 32 registers a thread for each value kept. Taste, after Liger's."""
NUM_WARPS = 8


@triton.jit
def score_rows(
    tile,
    stride,
    targets,
    logp,
    log_z,
    mean,
    entropy,
    correct,
    squares,
    slope,
    NUM_COLUMNS: tl.constexpr,  # noqa: N803
    WANT_MEAN: tl.constexpr,  # noqa: N803
    WANT_ENTROPY: tl.constexpr,  # noqa: N803
    WANT_CORRECT: tl.constexpr,  # noqa: N803
    WANT_SQUARES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Scores of the row that is this program's number; the tile stays as it is."""
    row = tl.program_id(0).to(tl.int64)
    start = tile + row * stride
    columns = tl.arange(0, BLOCK)
    inside = columns < NUM_COLUMNS
    z = tl.load(start + columns, mask=inside, other=-float("inf")) * slope
    highest = tl.max(z, 0)
    exp = tl.exp(z - highest)
    total = tl.sum(exp, 0)
    weighted = tl.sum(tl.where(inside, exp * (z - highest), 0.0), 0)
    square = tl.sum(exp * exp, 0)
    plain = tl.sum(tl.where(inside, z, 0.0), 0)
    for first in range(BLOCK, NUM_COLUMNS, BLOCK):
        inside = first + columns < NUM_COLUMNS
        z = tl.load(start + first + columns, mask=inside, other=-float("inf")) * slope
        now = tl.maximum(highest, tl.max(z, 0))
        shrunk = tl.exp(highest - now)
        exp = tl.exp(z - now)
        part = tl.sum(tl.where(inside, exp * (z - now), 0.0), 0)
        weighted = shrunk * (weighted + (highest - now) * total) + part
        total = shrunk * total + tl.sum(exp, 0)
        square = shrunk * shrunk * square + tl.sum(exp * exp, 0)
        plain += tl.sum(tl.where(inside, z, 0.0), 0)
        highest = now
    log_total = tl.log(total)
    target = tl.load(start + tl.load(targets + row)) * slope
    # The maximum leaves both terms before they are subtracted: large logits would cost digits.
    tl.store(logp + row, (target - highest) - log_total)
    tl.store(log_z + row, highest + log_total)
    if WANT_MEAN:
        tl.store(mean + row, plain / NUM_COLUMNS)
    if WANT_ENTROPY:
        tl.store(entropy + row, log_total - weighted / total)
    if WANT_CORRECT:
        tl.store(correct + row, target >= highest)
    if WANT_SQUARES:
        tl.store(squares + row, tl.log(square) - 2.0 * log_total)


@triton.jit
def gradient_of_block(
    z,
    columns,
    row,
    targets,
    log_z,
    entropy,
    of_prob,
    of_target,
    of_every,
    of_entropy,
    HAS_EVERY: tl.constexpr,  # noqa: N803
    HAS_ENTROPY: tl.constexpr,  # noqa: N803
):
    """The loss's gradient with respect to logits `z` of a row, which stand in these columns of the head."""
    logp = z - tl.load(log_z + row)
    prob = tl.exp(logp)
    grad = prob * tl.load(of_prob + row)
    if HAS_ENTROPY:
        grad -= tl.load(of_entropy + row) * prob * (logp + tl.load(entropy + row))
    if HAS_EVERY:
        grad += tl.load(of_every + row)
    return grad + tl.where(columns == tl.load(targets + row), tl.load(of_target + row), 0.0)


@triton.jit
def gradient_rows(
    tile,
    out,
    stride,
    out_stride,
    targets,
    log_z,
    entropy,
    of_prob,
    of_target,
    of_every,
    of_entropy,
    first_column,
    slope,
    NUM_COLUMNS: tl.constexpr,  # noqa: N803
    HAS_EVERY: tl.constexpr,  # noqa: N803
    HAS_ENTROPY: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A block of a row of head outputs becomes the loss's gradient with respect to it: `out` is the tile."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < NUM_COLUMNS
    z = tl.load(tile + row * stride + columns, mask=inside, other=0.0) * slope
    grad = gradient_of_block(
        z, columns + first_column, row, targets, log_z, entropy, of_prob, of_target, of_every, of_entropy,
        HAS_EVERY, HAS_ENTROPY,
    )  # fmt: skip
    tl.store(out + row * out_stride + columns, grad * slope, mask=inside)


@triton.jit
def narrow_rows(
    tile,
    out,
    stride,
    out_stride,
    targets,
    log_z,
    entropy,
    of_prob,
    of_target,
    of_every,
    of_entropy,
    first_column,
    slope,
    NUM_COLUMNS: tl.constexpr,  # noqa: N803
    HAS_EVERY: tl.constexpr,  # noqa: N803
    HAS_ENTROPY: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A row of head outputs becomes its gradient in 2 bytes a number, in the first half of the row's place.

    A block is written where blocks before it, or itself, were read: all threads have read theirs by then.
    """
    row = tl.program_id(0).to(tl.int64)
    for first in range(0, NUM_COLUMNS, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < NUM_COLUMNS
        z = tl.load(tile + row * stride + columns, mask=inside, other=0.0) * slope
        grad = gradient_of_block(
            z, columns + first_column, row, targets, log_z, entropy, of_prob, of_target, of_every, of_entropy,
            HAS_EVERY, HAS_ENTROPY,
        )  # fmt: skip
        tl.debug_barrier()
        place = out + row * out_stride + columns
        tl.store(place, (grad * slope).to(out.dtype.element_ty), mask=inside)
