"""Gradients of a head loss, tile by tile: over tokens, or over vocabulary and tokens."""

# N scored tokens, T tokens of one tile, V vocabulary, K vocabulary columns of one tile, D width of one pair

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.memory.plan.sizes import tile_columns
from memtrain.trainers.losses.head.fused_tiles import fused_gradient_, is_fused
from memtrain.trainers.losses.head.products import Products
from memtrain.trainers.losses.head.spans import spans
from memtrain.trainers.losses.head.tiles import (
    Coefficients,
    LogitRule,
    Operands,
    bend_,
    finish_gradient_,
    gradient_of_logits_,
    head_outputs_,
    num_tile_tokens,
)


class Needs(NamedTuple):
    """Gradients that are asked for."""

    hidden: tuple[bool, ...]
    weight: tuple[bool, ...]
    bias: bool

    def any(self) -> bool:
        """Whether a backward pass has anything to do."""
        return any(self.hidden) or any(self.weight) or self.bias


class ScoredTokens(NamedTuple):
    """Results of the forward pass for each token, and the derivative of the loss by them."""

    targets_N: Tensor
    log_z_N: Tensor
    entropy_N: Tensor | None
    coefficients: Coefficients

    def rows(self, low: int, high: int) -> ScoredTokens:
        """The tokens `low` to `high`."""
        entropy_T = None if self.entropy_N is None else self.entropy_N[low:high]
        return ScoredTokens(
            self.targets_N[low:high], self.log_z_N[low:high], entropy_T, self.coefficients.rows(low, high)
        )


class HeadGradients:
    """Buffers for the requested gradients, none for a frozen weight; filled one tile after another.

    Weights and bias are summed wide over tiles of tokens; a hidden state belongs to one tile, so its
    gradient is rounded once.
    """

    def __init__(self, operands: Operands, needs: Needs, products: Products) -> None:
        self.products = products
        wide, device = products.wide, operands.hidden[0].device
        pairs = list(zip(operands.hidden, operands.weight, strict=True))
        self.hidden = [
            torch.empty_like(x) if n else None for (x, _), n in zip(pairs, needs.hidden, strict=True)
        ]
        self.weight = [
            torch.zeros(w.shape, dtype=wide, device=device) if n else None
            for (_, w), n in zip(pairs, needs.weight, strict=True)
        ]
        num_rows = operands.weight[0].shape[0]
        self.bias_V = torch.zeros(num_rows, dtype=wide, device=device) if needs.bias else None

    def take(self, grad_TV: Tensor, operands: Operands, low: int, high: int) -> None:
        """Add the tile of tokens `low` to `high`, whose gradient over the whole vocabulary is `grad_TV`."""
        for hidden, weight, total_ND, total_VD in zip(
            operands.hidden, operands.weight, self.hidden, self.weight, strict=True
        ):
            if total_ND is not None:
                self.products.write_hidden_gradient_(total_ND[low:high], grad_TV, weight)
            if total_VD is not None:
                self.products.add_weight_gradient_(total_VD, grad_TV, hidden[low:high])
        if self.bias_V is not None:
            self.bias_V.add_(grad_TV.sum(0))

    def flat(self) -> list[Tensor | None]:
        """hidden, weight, hidden, weight, ... as the head was given."""
        return [g for pair in zip(self.hidden, self.weight, strict=True) for g in pair]


def gradients_by_tokens(
    operands: Operands, tokens: ScoredTokens, rule: LogitRule, needs: Needs, products: Products
) -> tuple[list[Tensor | None], Tensor | None]:
    """(pair gradients, bias gradient), tokens outer: scratch is one [T, V] tile, sums are wide [V, D].

    The right choice when weights are frozen, or kept in the dtype of the sums.
    """
    gradients = HeadGradients(operands, needs, products)
    num_tokens, num_columns = operands.hidden[0].shape[0], operands.weight[0].shape[0]
    form = _Form.of(operands, tokens, rule, needs, products)
    step = num_tile_tokens(num_columns, form.num_buffers, rule, products.wide)
    scratch = _scratch(min(step, num_tokens), num_columns, operands, products)
    for low, high in spans(num_tokens, step):
        grad_TV = _gradient_tile(scratch[: high - low], operands, tokens.rows(low, high), low, form)
        gradients.take(grad_TV, operands, low, high)
    return gradients.flat(), gradients.bias_V


def gradients_by_columns(
    operands: Operands, tokens: ScoredTokens, rule: LogitRule, needs: Needs, products: Products
) -> tuple[list[Tensor | None], Tensor | None]:
    """The same, vocabulary outer and tokens inner: wide sums are [K, D] and [N, D], never [V, D].

    The right choice when a trainable weight is narrower than the sums: its gradient is written once, in its
    own dtype. Measured (fake tensors, 16384 x 4096 x 151936 bf16): 1826 MiB of peak against 3785.
    """
    num_tokens, num_columns = operands.hidden[0].shape[0], operands.weight[0].shape[0]
    totals = _WideHiddenTotals(operands, needs, products)
    weight_grads = [
        torch.empty_like(w) if n else None for w, n in zip(operands.weight, needs.weight, strict=True)
    ]
    bias_V = operands.hidden[0].new_empty(num_columns, dtype=products.wide) if needs.bias else None
    columns = _num_columns(operands, rule, products)
    form = _Form.of(operands, tokens, rule, needs, products)
    step = num_tile_tokens(columns, 2 * form.num_buffers, rule, products.wide)
    scratch = _scratch(min(step, num_tokens), columns, operands, products)
    only_weights = needs._replace(hidden=(False,) * len(needs.hidden))
    for first, last in spans(num_columns, columns):
        part = _columns(operands, first, last, products)
        sums = HeadGradients(part, only_weights, products)
        for low, high in spans(num_tokens, step):
            tile_TK = scratch[: high - low, : last - first]
            grad_TK = _gradient_tile(tile_TK, part, tokens.rows(low, high), low, form, first)
            sums.take(grad_TK, part, low, high)
            totals.take(grad_TK, part, low, high)
        for grad_VD, sum_KD in zip(weight_grads, sums.weight, strict=True):
            if grad_VD is not None and sum_KD is not None:
                grad_VD[first:last] = sum_KD
        if bias_V is not None and sums.bias_V is not None:
            bias_V[first:last] = sums.bias_V
        # The next columns make their own: two blocks of sums would be twice the scratch of one.
        del part, sums
        sum_KD = None
    pairs = zip(totals.narrow(operands), weight_grads, strict=True)
    return [g for pair in pairs for g in pair], bias_V


class _WideHiddenTotals:
    """Gradients of the hidden states, summed wide over tiles of columns."""

    def __init__(self, operands: Operands, needs: Needs, products: Products) -> None:
        self.products = products
        self.totals = [
            torch.zeros(x.shape, dtype=products.wide, device=x.device) if n else None
            for x, n in zip(operands.hidden, needs.hidden, strict=True)
        ]

    def take(self, grad_TK: Tensor, part: Operands, low: int, high: int) -> None:
        """Add the tile of tokens `low` to `high` and the columns of `part`."""
        for total_ND, weight_KD in zip(self.totals, part.weight, strict=True):
            if total_ND is not None:
                self.products.add_hidden_gradient_(total_ND[low:high], grad_TK, weight_KD)

    def narrow(self, operands: Operands) -> list[Tensor | None]:
        """The gradients in the dtypes of the hidden states."""
        pairs = zip(self.totals, operands.hidden, strict=True)
        return [None if total is None else total.to(x.dtype) for total, x in pairs]


class _Form(NamedTuple):
    """The way in which a tile of head outputs becomes its gradient."""

    rule: LogitRule
    products: Products
    fuses: bool
    """By Triton's kernels."""
    narrow: torch.dtype | None
    """Dtype that these round to."""
    num_buffers: int
    """Tiles alive at once: the logits, the softcap's slope, p beside the entropy's gradient."""

    @classmethod
    def of(
        cls, operands: Operands, tokens: ScoredTokens, rule: LogitRule, needs: Needs, products: Products
    ) -> _Form:
        """The form on this device. Gradients of a bias are sums of numbers that are not rounded."""
        fuses = is_fused(rule, products.wide, operands.hidden[0].device)
        torchs = 1 + (rule.softcap is not None) + (tokens.coefficients.entropy_N is not None)
        return cls(rule, products, fuses, None if needs.bias else products.half, 1 if fuses else torchs)


def _gradient_tile(
    tile_TK: Tensor, operands: Operands, part: ScoredTokens, low: int, form: _Form, first_column: int = 0
) -> Tensor:
    """Gradient of the loss with respect to the head outputs of the tokens `part`, the first of which is
    `low`; fills `tile_TK`."""
    rows = operands._replace(hidden=tuple(x[low : low + len(tile_TK)] for x in operands.hidden))
    head_outputs_(tile_TK, rows, form.products)
    scored = (part.log_z_N, part.entropy_N, part.coefficients)
    if form.fuses:
        return fused_gradient_(tile_TK, part.targets_N, *scored, form.rule, first_column, narrow=form.narrow)
    slope_TK = bend_(tile_TK, form.rule, want_slope=True)
    grad_TK = gradient_of_logits_(tile_TK, *scored)
    return finish_gradient_(grad_TK, part.coefficients, part.targets_N, slope_TK, form.rule, first_column)


def _columns(operands: Operands, first: int, last: int, products: Products) -> Operands:
    """The head of some vocabulary columns, widened once where the device cannot multiply halves wide."""
    weight = tuple(w[first:last] for w in operands.weight)
    if not products.half_kernel:
        weight = tuple(w.to(products.wide) for w in weight)
    return Operands(operands.hidden, weight, None if operands.bias_V is None else operands.bias_V[first:last])


def _num_columns(operands: Operands, rule: LogitRule, products: Products) -> int:
    """Columns whose wide weight gradients fill half of the scratch."""
    width = sum(w.shape[1] for w in operands.weight)
    return tile_columns(rule.tile_bytes, width, operands.weight[0].shape[0], products.wide.itemsize)


def _scratch(num_rows: int, num_columns: int, operands: Operands, products: Products) -> Tensor:
    return torch.empty(num_rows, num_columns, dtype=products.wide, device=operands.hidden[0].device)
