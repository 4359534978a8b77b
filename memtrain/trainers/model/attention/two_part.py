"""Attention over a flattened row in one autograd node: segments to themselves, completions to their prompt.

With windows (`windows`), caps and sinks (`score_rule`).

Source: the log-sum-exp merge is that of blockwise softmax (Dao et al. 2022, arXiv:2205.14135, section 3.1);
the backward is flash attention's (its Algorithm 4) run once per part with the *merged* output and
log-sum-exp, so that P = exp(s - lse) and D = rowsum(dO * O) are those of the whole row.
"""

# H: query heads, T: tokens.
# T: tokens of the row, w: tokens of the window.
# T: tokens, H: query heads, K: key heads, D: head width. lse: log-sum-exp of the scores.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, Part, Rows, part_of

# Rule of one attention call beside its layout: a sliding window, a cap of the scores, sinks.


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRule:
    """A layer's own rule of its scores; without any, plain causal attention.

    window: a token attends to so many tokens, itself counted; None: to all before it. softcap: scores are
    `softcap * tanh(score / softcap)`. sinks_H: a score a head that every query meets, with a value of zero.
    Source: Gemma 2, arXiv:2408.00118, section 2 (softcap); gpt-oss, arXiv:2508.10925, section 2.2 (sinks).
    """

    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

    def of_rank(self, index: int, size: int) -> ScoreRule:
        """The same for the heads that one of `size` ranks takes."""
        if self.sinks_H is None:
            return self
        return replace(self, sinks_H=self.sinks_H.unflatten(0, (size, -1))[index])


PLAIN = ScoreRule()


def rule_of(others: dict[str, Any], longest_span: int) -> ScoreRule:
    """The rule among the keyword arguments of transformers; a window that no query comes to is none."""
    window, softcap, sinks_H = others.get("sliding_window"), others.get("softcap"), others.get("s_aux")
    if window is not None and window >= longest_span:
        window = None
    return PLAIN if (window, softcap, sinks_H) == (None,) * 3 else ScoreRule(window, softcap, sinks_H)


def merge_sinks(out_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> None:
    """`out` and `lse` become those of a softmax over the sinks as well; the sinks' values are zero."""
    merged_HT = torch.logaddexp(lse_HT, sinks_H.to(lse_HT.dtype)[:, None])
    weight_TH1 = (lse_HT - merged_HT).exp().t()[..., None]
    out_THD.copy_(out_THD.to(lse_HT.dtype).mul_(weight_TH1))
    lse_HT.copy_(merged_HT)


def sinks_gradient(grad_THD: Tensor, out_THD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> Tensor:
    """[H], given the final output and log-sum-exp of all parts.

    A sink's value is zero, so that its score's gradient is P * (0 - rowsum(dO * O)).
    """
    wide = lse_HT.dtype
    sum_HT = (grad_THD.to(wide) * out_THD.to(wide)).sum(-1).t()
    weight_HT = (sinks_H.to(wide)[:, None] - lse_HT).exp()
    return -(weight_HT * sum_HT).sum(-1).to(sinks_H.dtype)


# Sliding windows as calls of kernels that know none: causal squares, squares turned round, and rectangles.
#
# A segment is cut into blocks of the window's length. A block attends to itself causally: no token in it is
# out of reach. What its queries see of the tokens before it is a triangle, the nearer keys to more queries:
# read from its end to its beginning it is a causal square. Where the keys or the queries are fewer than a
# window, a rectangle of full attention lies beside the triangle. Parts are merged by their log-sum-exp.
#
# So every back end that gives the log-sum-exp of its scores has windows, on whole rows and on slices of them.


class Reach(NamedTuple):
    """Queries that attend to some keys outside their own part, segment by segment."""

    queries: Rows
    """Rows of the queries."""
    keys: Rows
    """Rows of the keys."""
    part: Part


@dataclass(frozen=True, slots=True)
class Windowed:
    """Pattern of attention inside a window: blocks to themselves, causally, and the reaches between them."""

    within: Part
    reaches: tuple[Reach, ...]


class Piece(NamedTuple):
    """Rows of queries and keys that meet in one span of a call."""

    query: int
    num_queries: int
    key: int
    num_keys: int


# The same for all layers of one pass with one window; dies with the layout.
_known: WeakKeyDictionary[Layout, dict[tuple[int, int, int], Windowed]] = WeakKeyDictionary()


def pattern_of(layout: Layout, window: int | None) -> Windowed:
    """Pattern of a whole row: segments to themselves, completions to their prompt."""
    if window is not None:
        return windowed(layout, window, 0, layout.num_tokens)
    P, T = layout.num_prompt_tokens, layout.num_tokens  # noqa: N806
    to_prompt = layout.to_prompt
    reaches = () if to_prompt is None else (Reach(slice(P, T), slice(0, P), to_prompt),)
    return Windowed(layout.within, reaches)


def windowed(layout: Layout, window: int, begin: int, end: int) -> Windowed:
    """The pattern of the queries in rows `begin:end` of `layout`, whose rows count from `begin`; keys are
    rows of the whole layout."""
    known = _known.setdefault(layout, {})
    if (window, begin, end) not in known:
        known[window, begin, end] = _windowed(layout, window, begin, end)
    return known[window, begin, end]


def _windowed(layout: Layout, window: int, begin: int, end: int) -> Windowed:
    pieces = list(pieces_between(layout, begin, end))
    edges = Edges()
    for start, first, stop in pieces:
        prompt = prompt_of(layout, start)
        if prompt is not None:
            edges.add((first, stop - first), (prompt[1], prompt[1] - prompt[0]), window - (first - start))
    return inside(pieces, window, begin, end, edges, layout.device)


def inside(
    pieces: Iterable[tuple[int, int, int]],
    window: int,
    begin: int,
    end: int,
    edges: Edges,
    device: torch.device,
) -> Windowed:
    """The pattern of some pieces, each (begin of its segment, first row, row after the last) of rows
    `begin:end`, to themselves and to what lies before them, beside some `edges`."""
    lengths: list[int] = []
    for start, first, stop in pieces:
        for block in range(first, stop, window):
            num = min(window, stop - block)
            lengths.append(num)
            edges.add((block, num), (block, block - start), window)
    bounds = tuple(accumulate(lengths, initial=0))
    within = part_of(bounds, bounds, device=device, is_causal=True)
    return Windowed(within, edges.reaches(begin, end - begin, device))


def pieces_between(layout: Layout, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(begin of the segment, first row, row after the last) of the segments between two rows."""
    bounds = layout.within.query_bounds
    for number in range(bisect_right(bounds, begin) - 1, len(bounds) - 1):
        if bounds[number] >= end:
            return
        yield bounds[number], max(begin, bounds[number]), min(end, bounds[number + 1])


def prompt_of(layout: Layout, start: int) -> tuple[int, int] | None:
    """Rows of the prompt of the completion that begins at row `start`; None where it has none."""
    part = layout.to_prompt
    if part is None or start < layout.num_prompt_tokens:
        return None
    group = bisect_right(part.query_bounds, start - layout.num_prompt_tokens) - 1
    return part.key_bounds[group], part.key_bounds[group + 1]


class Edges:
    """Queries and the keys before them that lie within a window: triangles and rectangles."""

    def __init__(self) -> None:
        self.turned: list[Piece] = []
        """Triangles, read from their ends to their beginnings."""
        self.full: list[Piece] = []
        """Rectangles."""

    def add(self, queries: tuple[int, int], keys: tuple[int, int], window: int) -> None:
        """Add what queries (first row, number) see of the keys (row after the last, number) before them.

        `window` tokens, of which those between the last key and the first query are taken off. Query i sees
        keys from `i - shift` on.
        """
        query, num_queries = queries[0], min(queries[1], window - 1)
        num_keys = min(keys[1], window - 1)
        if num_queries <= 0 or num_keys <= 0:
            return
        key = keys[0] - num_keys
        shift = window - 1 - num_keys
        if shift > 0:
            self.full.append(Piece(query, min(shift, num_queries), key, num_keys))
        side = num_queries - shift
        if side > 0:
            self.turned.append(Piece(query + shift, side, key, side))
            if num_keys > side:
                self.full.append(Piece(query + shift, side, key + side, num_keys - side))

    def key_spans(self) -> Iterator[tuple[int, int]]:
        """First row of the keys of each piece, and the row after the last."""
        for piece in (*self.turned, *self.full):
            yield piece.key, piece.key + piece.num_keys

    def moved(self, place: Callable[[int], int]) -> Edges:
        """The same with the keys at other rows, as `place` says of each piece's first."""
        made = Edges()
        made.turned, made.full = (
            [piece._replace(key=place(piece.key)) for piece in pieces] for pieces in (self.turned, self.full)
        )
        return made

    def reaches(self, begin: int, most: int, device: torch.device) -> tuple[Reach, ...]:
        """The pieces by calls of a kernel: rows of queries count from `begin`, rectangles have at most `most`
        keys."""
        calls = [(pieces, True) for pieces in _apart(self.turned)]
        calls += [(pieces, False) for pieces in _apart(_cut(self.full, most))]
        return tuple(_reach(pieces, begin, device, is_turned=is_turned) for pieces, is_turned in calls)


def _cut(pieces: Iterable[Piece], most: int) -> Iterator[Piece]:
    """Pieces of at most `most` keys each: a kernel makes gradients of keys for every query head before it
    sums them, and the number of keys bounds these."""
    for piece in pieces:
        for key in range(0, piece.num_keys, most):
            yield Piece(piece.query, piece.num_queries, piece.key + key, min(most, piece.num_keys - key))


def _apart(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Pieces by calls in which no row of a query and no row of a key is met twice."""
    calls: list[list[Piece]] = []
    for piece in pieces:
        for call in calls:
            last = call[-1]
            if last.query + last.num_queries <= piece.query and last.key + last.num_keys <= piece.key:
                call.append(piece)
                break
        else:
            calls.append([piece])
    return calls


def _reach(pieces: list[Piece], begin: int, device: torch.device, *, is_turned: bool) -> Reach:
    queries = [(one.query - begin, one.num_queries) for one in pieces]
    keys = [(one.key, one.num_keys) for one in pieces]
    query_bounds, key_bounds = (
        tuple(accumulate((count for _, count in rows), initial=0)) for rows in (queries, keys)
    )
    return Reach(
        _rows(queries, device, is_turned=is_turned),
        _rows(keys, device, is_turned=is_turned),
        part_of(query_bounds, key_bounds, device=device, is_causal=is_turned),
    )


def _rows(ranges: list[tuple[int, int]], device: torch.device, *, is_turned: bool) -> Rows:
    """The rows of some (first row, number), each range from its end where it is turned round."""
    if len(ranges) == 1 and not is_turned:
        first, count = ranges[0]
        return slice(first, first + count)
    rows = [torch.arange(first, first + count) for first, count in ranges]
    index: Tensor = torch.cat([one.flip(0) for one in rows] if is_turned else rows)
    return index.to(device, non_blocking=True)


class Kernel(Protocol):
    """Attention of a back end from query to key segments, without autograd. Heads may be grouped (H > K)."""

    @staticmethod
    def forward(
        query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`out_THD` in the query's dtype, and `lse_HT` in fp32 (fp64 for fp64)."""
        ...

    @staticmethod
    def backward(
        grad_THD: Tensor,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        part: Part,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key, value, given the final output and (contiguous) lse of the row."""
        ...


class TwoPartAttention(torch.autograd.Function):
    """Exact attention of a `Layout` under a `ScoreRule`; saves query, key, value, output and lse once.

    Differentiating through each part's own (out, lse) and merging those in autograd is the trap to avoid: the
    flash kernels drop the gradient of lse, which leaves the forward perfect and dq, dk about 20 % wrong
    (measured: CPU).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        sinks_H: Tensor | None,
        pattern: Windowed,
        scale: float,
        kernel: type[Kernel],
    ) -> Tensor:
        """`out_THD`, in the query's dtype."""
        out_THD, lse_HT = kernel.forward(query_THD, key_TKD, value_TKD, pattern.within, scale)
        for queries, keys, part in pattern.reaches:
            there = kernel.forward(query_THD[queries], key_TKD[keys], value_TKD[keys], part, scale)
            merge_rows(out_THD, lse_HT, *there, queries)
        if sinks_H is not None:
            merge_sinks(out_THD, lse_HT, sinks_H)
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, sinks_H, out_THD, lse_HT)
        ctx.pattern, ctx.scale, ctx.kernel = pattern, scale, kernel
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and sinks; none for the rest."""
        query_THD, key_TKD, value_TKD, sinks_H, out_THD, lse_HT = ctx.saved_tensors
        pattern: Windowed = ctx.pattern
        kernel: type[Kernel] = ctx.kernel
        grad_THD = grads[0].contiguous()
        dq_THD, dk_TKD, dv_TKD = kernel.backward(
            grad_THD, query_THD, key_TKD, value_TKD, out_THD, lse_HT, pattern.within, ctx.scale
        )
        for queries, keys, part in pattern.reaches:
            dq_there, dk_there, dv_there = kernel.backward(
                grad_THD[queries],
                query_THD[queries],
                key_TKD[keys],
                value_TKD[keys],
                out_THD[queries],
                lse_HT[:, queries].contiguous(),
                part,
                ctx.scale,
            )
            dq_THD[queries] += dq_there
            dk_TKD[keys] += dk_there
            dv_TKD[keys] += dv_there
        d_sinks_H = None if sinks_H is None else sinks_gradient(grad_THD, out_THD, lse_HT, sinks_H)
        return dq_THD, dk_TKD, dv_TKD, d_sinks_H, None, None, None


def attend_in_parts(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    layout: Layout,
    scale: float,
    rule: ScoreRule,
    kernel: type[Kernel],
) -> Tensor:
    """`out_THD` of the row by a kernel, differentiable."""
    pattern = pattern_of(layout, rule.window)
    out_THD: Tensor = TwoPartAttention.apply(
        query_THD, key_TKD, value_TKD, rule.sinks_H, pattern, scale, capped(kernel, rule.softcap)
    )
    return out_THD


class RowAttention(Protocol):
    """Attention of a row under a rule, differentiable."""

    def __call__(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        layout: Layout,
        scale: float,
        rule: ScoreRule = PLAIN,
    ) -> Tensor:
        """`out_THD` of the row."""
        ...


def attend_by(kernel: type[Kernel]) -> RowAttention:
    """The attention of a back end, by its kernel."""

    def attend(
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        layout: Layout,
        scale: float,
        rule: ScoreRule = PLAIN,
    ) -> Tensor:
        return attend_in_parts(query_THD, key_TKD, value_TKD, layout, scale, rule, kernel)

    return attend


def capped(kernel: type[Kernel], softcap: float | None) -> type[Kernel]:
    """The kernel with a cap of its scores, which it must have a form for."""
    if softcap is None:
        return kernel
    assert hasattr(kernel, "softcap"), f"{kernel.__name__} caps no scores."
    return cast(type[Kernel], type(kernel.__name__, (kernel,), {"softcap": softcap}))


def merge_rows(
    out_THD: Tensor, lse_HT: Tensor, other_out_THD: Tensor, other_lse_HT: Tensor, rows: Rows
) -> None:
    """`rows` of out and lse become the softmax over their own and the others' keys, summed in lse's dtype."""
    own_lse_HT = lse_HT[:, rows]
    merged_lse_HT = torch.logaddexp(own_lse_HT, other_lse_HT)
    own_weight_TH1 = (own_lse_HT - merged_lse_HT).exp().t()[..., None]
    other_weight_TH1 = (other_lse_HT - merged_lse_HT).exp().t()[..., None]
    merged_THD = other_out_THD.to(lse_HT.dtype).mul_(other_weight_TH1)
    merged_THD.addcmul_(out_THD[rows].to(lse_HT.dtype), own_weight_TH1)
    out_THD[rows] = merged_THD.to(out_THD.dtype)
    lse_HT[:, rows] = merged_lse_HT
