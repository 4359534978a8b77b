"""Head losses from hidden states and head weights: log-probs or weighted NLL, logits never held whole."""

# N scored tokens, T tokens of one tile, V vocabulary, K vocabulary columns of one tile, D width of one pair
# N scored tokens, V vocabulary, D width of one pair
# N scored tokens, T tokens of one tile, V vocabulary, D width of one pair
# N scored tokens, V vocabulary, D width of one pair (hidden size, or the rank of an adapter)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from memtrain.memory.plan.sizes import tile_columns
from memtrain.trainers.losses.head.tiles import (
    PLAIN_LOGITS,
    Coefficients,
    LogitRule,
    Operands,
    Products,
    ScoreOptions,
    TileScores,
    bend_,
    empty_scores,
    finish_gradient_,
    fused_gradient_,
    fused_scores,
    gather_operands,
    gradient_of_logits_,
    head_outputs_,
    is_fused,
    num_tile_tokens,
    products_for,
    put_scores,
    score_,
    spans,
    wide_dtype,
    without_autocast,
)

# Counts of a whole optimizer step that losses divide by: Python's numbers, or scalars on the device. A pass
# that is captured reads them from a fixed place, where each step writes its own. The arithmetic is that of
# Python's numbers, in float64, so that no bit moves.


Count = float | Tensor
"""A number, or a float64 scalar on the device."""


@dataclass(slots=True, eq=False)
class StepCount:
    """A count of each step at one place of the device; no copy of the host's numbers is waited for."""

    value: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))

    def write(self, count: float, device: torch.device) -> None:
        """The count of the coming step."""
        if self.value.device != device:
            self.value = torch.ones((), dtype=torch.float64, device=device)
        self.value.fill_(count)


def on_device(count: Count, device: torch.device) -> Tensor:
    """A number as a scalar of the device, which it is not sent to."""
    return count if isinstance(count, Tensor) else torch.full((), count, dtype=torch.float64, device=device)


def at_least_one(count: Count) -> Count:
    """The count, 1 where there is nothing to divide."""
    return count.clamp(min=1.0) if isinstance(count, Tensor) else max(count, 1.0)


def over(total: Tensor, count: Count) -> Tensor:
    """A sum over a count, in the sum's own precision: two scalars on a device would be divided in float64."""
    return total / (count.to(total.dtype) if isinstance(count, Tensor) else count)


def one_over(count: Count, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """float32 `shape`: 1 / count everywhere."""
    if isinstance(count, Tensor):
        return (1.0 / count).float().expand(shape).contiguous()
    return torch.full(shape, 1.0 / count, dtype=torch.float32, device=device)


# Gradients of a head loss, tile by tile: over tokens, or over vocabulary and tokens.


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


# Log-probs of targets straight from hidden states; the backward pass forms each tile of logits again.


def scores_by_tokens(operands: Operands, targets_N: Tensor, options: ScoreOptions) -> TileScores:
    """Per-token scores of the whole call, one [T, V] tile of logits at a time; nothing is differentiated."""
    products, rule = products_for(operands, options.rule), options.rule
    num_tokens, num_columns = operands.hidden[0].shape[0], operands.weight[0].shape[0]
    fuses = is_fused(rule, products.wide, targets_N.device)
    step = num_tile_tokens(num_columns, 1 if fuses else 1 + options.want_entropy, rule, products.wide)
    scratch = torch.empty(min(step, num_tokens), num_columns, dtype=products.wide, device=targets_N.device)
    all_scores = empty_scores(num_tokens, options, products.wide, targets_N.device)
    for low, high in spans(num_tokens, step):
        tile_TV = scratch[: high - low]
        head_outputs_(
            tile_TV, operands._replace(hidden=tuple(x[low:high] for x in operands.hidden)), products
        )
        if fuses:
            scores = fused_scores(tile_TV, targets_N[low:high], options)
        else:
            bend_(tile_TV, rule, want_slope=False)
            scores = score_(tile_TV, targets_N[low:high], options)[0]
        put_scores(all_scores, scores, low, high)
    return all_scores


class TokenScores(torch.autograd.Function):
    """`TileScores` of all tokens: log p, log Z, mean logit and entropy are differentiable, the rest is not.

    Saves the hidden states, the weights, and two numbers a token.
    """

    @staticmethod
    def forward(
        ctx: Any, options: ScoreOptions, targets_N: Tensor, bias_V: Tensor | None, *flat: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Scores of all tokens; see `scores_by_tokens`."""
        with without_autocast(targets_N.device):
            operands = gather_operands(options.dtypes, bias_V, flat)
            scores = scores_by_tokens(operands, targets_N, options)
        ctx.options = options
        ctx.hidden_dtypes = [x.dtype for x in flat[0::2]]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            targets_N, scores.log_z_T, scores.entropy_T, bias_V, *operands.hidden, *flat[1::2]
        )
        constants = (scores.correct_T, scores.log_sum_squares_T)
        ctx.mark_non_differentiable(*(c for c in constants if c is not None))
        return tuple(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of the pairs and the bias."""
        targets_N, log_z_N, entropy_N, bias_V, *saved = ctx.saved_tensors
        options: ScoreOptions = ctx.options
        num_pairs = len(saved) // 2
        hidden, weight = saved[:num_pairs], saved[num_pairs:]
        flat = [t for pair in zip(hidden, weight, strict=True) for t in pair]
        asked = ctx.needs_input_grad
        needs = Needs(tuple(asked[3::2]), tuple(asked[4::2]), asked[2])
        with without_autocast(targets_N.device):
            operands = gather_operands(options.dtypes, bias_V, flat)
            coefficients = _coefficients(grads, log_z_N, num_columns=weight[0].shape[0])
            tokens = ScoredTokens(targets_N, log_z_N, entropy_N, coefficients)
            form = gradients_by_columns if options.by_columns else gradients_by_tokens
            pairs, bias = form(operands, tokens, options.rule, needs, products_for(operands, options.rule))
        dtypes = [d for pair in zip(ctx.hidden_dtypes, (w.dtype for w in weight), strict=True) for d in pair]
        return (
            None,
            None,
            None if bias is None else bias.to(bias_V.dtype),
            *(None if g is None else g.to(dtype) for g, dtype in zip(pairs, dtypes, strict=True)),
        )


def _coefficients(grads: tuple[Tensor | None, ...], like_N: Tensor, num_columns: int) -> Coefficients:
    """d log p = 1[v = y] - p, d log Z = p, d mean logit = 1 / V, and the entropy's own term."""
    logp_N, log_z_N, mean_N, entropy_N, *_ = grads
    nothing_N = torch.zeros_like(like_N)
    target_N = nothing_N if logp_N is None else logp_N
    prob_N = (nothing_N if log_z_N is None else log_z_N) - target_N
    return Coefficients(prob_N, target_N, None if mean_N is None else mean_N / num_columns, entropy_N)


# Weighted NLL straight from hidden states, its gradients formed in the forward pass.


class NllOptions(NamedTuple):
    """Terms of the weighted NLL, and the results that are asked beside the sum."""

    label_smoothing: float = 0.0
    """Epsilon of `weighted_nll`."""
    z_loss: float = 0.0
    """Coefficient of its z-loss."""
    want_stats: bool = False
    """Log p, entropy and top-1 hit of each token."""
    weight_of_all: Count | None = None
    """The weight, where every token has the same; Liger's kernel then makes gradients in the forward pass."""


SUM_ALONE = NllOptions()
"""The plain NLL, and nothing beside its sum."""


def weighted_nll(scores: TileScores, weights_N: Tensor, terms: NllOptions) -> Tensor:
    """Sum over tokens of w * [(1 - eps) * -log p_y + eps * mean_v(-log p_v) + z * (log Z)^2], a scalar.

    mean_v(-log p_v) = log Z - mean logit.
    Source: label smoothing Szegedy et al. 2015, arXiv:1512.00567, section 7 (as torch's cross_entropy);
    z-loss Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5.
    """
    loss_N = -scores.logp_T
    if terms.label_smoothing:
        assert scores.mean_logit_T is not None, "label smoothing needs the mean logit"
        uniform_N = scores.log_z_T - scores.mean_logit_T
        loss_N = (1.0 - terms.label_smoothing) * loss_N + terms.label_smoothing * uniform_N
    if terms.z_loss:
        loss_N = loss_N + terms.z_loss * scores.log_z_T.square()
    return (loss_N * weights_N).sum()


def nll_coefficients(log_z_N: Tensor, weights_N: Tensor, terms: NllOptions, num_columns: int) -> Coefficients:
    """The gradient of `weighted_nll`: d/dz_v = w * [(1 + 2 z log Z) p_v - (1 - eps) 1[v = y] - eps / V]."""
    prob_N = weights_N * (1.0 + 2.0 * terms.z_loss * log_z_N)
    every_N = weights_N * (-terms.label_smoothing / num_columns) if terms.label_smoothing else None
    return Coefficients(prob_N, weights_N * (terms.label_smoothing - 1.0), every_N, None)


class NllInForward(torch.autograd.Function):
    """(loss, log p, entropy, correct); the last three are per token, detached, and only when asked.

    The gradients wait in plain attributes of the context: saved-tensor hooks (offloading) never ship them
    to the host, and nobody else owns them, so scaling them in place is safe. They can be spent once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        options: ScoreOptions,
        terms: NllOptions,
        is_training: bool,
        targets_N: Tensor,
        weights_N: Tensor,
        bias_V: Tensor | None,
        *flat: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """The loss, and the gradients when `is_training`."""
        asked = ctx.needs_input_grad
        needs = Needs(tuple(asked[6::2]), tuple(asked[7::2]), asked[5])
        with without_autocast(targets_N.device):
            operands = gather_operands(options.dtypes, bias_V, flat)
            if is_training and needs.any():
                scores, gradients = _forward_and_gradients(
                    operands, targets_N, weights_N, options, terms, needs
                )
                ctx.pairs, ctx.bias_V = gradients.flat(), gradients.bias_V
                ctx.dtypes = [t.dtype for t in flat]
                ctx.bias_dtype = None if bias_V is None else bias_V.dtype
            else:
                scores = scores_by_tokens(operands, targets_N, options)
            loss = weighted_nll(scores, weights_N, terms)
        ctx.set_materialize_grads(False)
        stats = (scores.logp_T, scores.entropy_T, scores.correct_T)
        ctx.mark_non_differentiable(*(s for s in stats if s is not None))
        return loss, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients of the forward pass, scaled in place."""
        pairs, bias_V, grad_loss = ctx.pairs, ctx.bias_V, grads[0]
        assert pairs is not None, (
            "linear_nll forms its gradients in the forward pass and can be backpropagated once; "
            "use linear_logprob where a graph is kept"
        )
        ctx.pairs = ctx.bias_V = None
        if grad_loss is None:
            return (None,) * (6 + len(pairs))
        scaled = [
            None if g is None else g.mul_(grad_loss).to(d) for g, d in zip(pairs, ctx.dtypes, strict=True)
        ]
        bias = None if bias_V is None else bias_V.mul_(grad_loss).to(ctx.bias_dtype)
        return None, None, None, None, None, bias, *scaled


def _forward_and_gradients(
    operands: Operands,
    targets_N: Tensor,
    weights_N: Tensor,
    options: ScoreOptions,
    terms: NllOptions,
    needs: Needs,
) -> tuple[TileScores, HeadGradients]:
    """Scores and gradients from one pass: each tile of logits becomes its own gradient."""
    products, rule = products_for(operands, options.rule), options.rule
    gradients = HeadGradients(operands, needs, products)
    num_tokens, num_columns = operands.hidden[0].shape[0], operands.weight[0].shape[0]
    fuses = is_fused(rule, products.wide, targets_N.device)
    num_buffers = 1 if fuses else 1 + options.want_entropy + (rule.softcap is not None)
    narrow = None if needs.bias else products.half
    step = num_tile_tokens(num_columns, num_buffers, rule, products.wide)
    scratch = torch.empty(min(step, num_tokens), num_columns, dtype=products.wide, device=targets_N.device)
    all_scores = empty_scores(num_tokens, options, products.wide, targets_N.device)
    for low, high in spans(num_tokens, step):
        tile_TV, rows = scratch[: high - low], tuple(x[low:high] for x in operands.hidden)
        head_outputs_(tile_TV, operands._replace(hidden=rows), products)
        given = (tile_TV, targets_N[low:high], weights_N[low:high], options, terms)
        scores, grad_TV = _fused_gradient_of_tile_(*given, narrow) if fuses else _gradient_of_tile_(*given)
        gradients.take(grad_TV, operands, low, high)
        put_scores(all_scores, scores, low, high)
        # The next tile makes its own: with this one it would be a tile more than the scratch is meant to be.
        del grad_TV
    return all_scores, gradients


def _gradient_of_tile_(
    tile_TV: Tensor, targets_T: Tensor, weights_T: Tensor, options: ScoreOptions, terms: NllOptions
) -> tuple[TileScores, Tensor]:
    """The scores of a tile of head outputs (overwritten), and the loss's gradient with respect to it."""
    slope_TV = bend_(tile_TV, options.rule, want_slope=True)
    scores, exp_TV, sums_T = score_(tile_TV, targets_T, options)
    part = nll_coefficients(scores.log_z_T, weights_T, terms, tile_TV.shape[1])
    grad_TV = exp_TV.mul_((part.prob_N / sums_T)[:, None])
    return scores, finish_gradient_(grad_TV, part, targets_T, slope_TV, options.rule)


def _fused_gradient_of_tile_(
    tile_TV: Tensor,
    targets_T: Tensor,
    weights_T: Tensor,
    options: ScoreOptions,
    terms: NllOptions,
    narrow: torch.dtype | None,
) -> tuple[TileScores, Tensor]:
    """The same by Triton's kernels, without another tile; in the dtype `narrow` where one is given."""
    scores = fused_scores(tile_TV, targets_T, options)
    part = nll_coefficients(scores.log_z_T, weights_T, terms, tile_TV.shape[1])
    given = (targets_T, scores.log_z_T, None, part, options.rule)
    return scores, fused_gradient_(tile_TV, *given, narrow=narrow)


Pairs = Sequence[tuple[Tensor, Tensor]]
"""(hidden [N, D_i], weight [V, D_i]): head outputs are the sum of hidden_i @ weight_i.T. An adapter on the
head is one more pair, so the merged weight never exists."""


class LogprobResult(NamedTuple):
    """Per scored token, fp32: log p of the target and, when asked, entropy and log sum_v p_v^2.

    The first two are differentiable, the last is a constant.
    """

    logp_N: Tensor
    entropy_N: Tensor | None = None
    log_sum_squares_N: Tensor | None = None


class NllResult(NamedTuple):
    """The weighted sum (fp32 scalar), and per token when asked, detached: log p, entropy, top-1 hit."""

    loss: Tensor
    logp_N: Tensor | None
    entropy_N: Tensor | None
    correct_N: Tensor | None


class LogprobOptions(NamedTuple):
    """Results that are asked of each token beside its log p."""

    want_entropy: bool = False
    want_log_sum_squares: bool = False
    learns_entropy: bool = True
    """Gradients of the entropies are asked for. Without, the full logits are not copied for them."""


LOGPROBS_ALONE = LogprobOptions()


def linear_logprob(
    pairs: Pairs,
    targets_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    options: LogprobOptions = LOGPROBS_ALONE,
    *,
    bias: Tensor | None = None,
) -> LogprobResult:
    """log p(target) of each token under softmax(softcap * tanh(scale * x / softcap) / temperature).

    Any loss may follow, on log p and on the entropy: the backward pass forms each tile of logits
    again (four matrix products in all). Saved: hidden states, weights and two numbers a token. Under
    autocast the products take autocast's dtype, the weight is cast once a pass, sums stay fp32.
    """
    asked = _score_options(pairs, rule)._replace(
        want_entropy=options.want_entropy, want_log_sum_squares=options.want_log_sum_squares
    )
    scores = TileScores(*TokenScores.apply(asked, targets_N, bias, *_flat(pairs)))
    return LogprobResult(scores.logp_T, scores.entropy_T, scores.log_sum_squares_T)


def linear_nll(
    pairs: Pairs,
    targets_N: Tensor,
    weights_N: Tensor,
    rule: LogitRule = PLAIN_LOGITS,
    options: NllOptions = SUM_ALONE,
    *,
    bias: Tensor | None = None,
) -> NllResult:
    """Sum over tokens of weight * (NLL, smoothed, plus z-loss): see `weighted_nll` for the formula.

    Weights are constants known before the pass, so gradients are formed in it (three products, and the
    result can be backpropagated once). Where that would cost more than it saves - a trainable weight
    narrower than fp32, fp16 whose gradients must be scaled before rounding - the backward pass recomputes.
    """
    assert not weights_N.requires_grad, "the weights of linear_nll are constants"
    asked = _score_options(pairs, rule)._replace(
        want_mean=options.label_smoothing > 0,
        want_entropy=options.want_stats,
        want_correct=options.want_stats,
    )
    flat = _flat(pairs)
    if asked.by_columns or torch.float16 in asked.dtypes:
        scores = TileScores(*TokenScores.apply(asked, targets_N, bias, *flat))
        loss = weighted_nll(scores, weights_N, options)
        stats = scores.logp_T.detach(), _detached(scores.entropy_T), scores.correct_T
    else:
        loss, *stats = NllInForward.apply(
            asked, options, torch.is_grad_enabled(), targets_N, weights_N, bias, *flat
        )
    return NllResult(loss, *stats) if options.want_stats else NllResult(loss, None, None, None)


def _score_options(pairs: Pairs, rule: LogitRule) -> ScoreOptions:
    """Dtypes of the products, and the order of the backward pass."""
    device = pairs[0][0].device
    if torch.is_autocast_enabled(device.type):
        dtypes = (torch.get_autocast_dtype(device.type),) * len(pairs)
    else:
        dtypes = tuple(torch.promote_types(hidden.dtype, weight.dtype) for hidden, weight in pairs)
    wide = wide_dtype(*(t for pair in pairs for t in pair))
    narrow = [weight for _, weight in pairs if weight.requires_grad and weight.dtype != wide]
    # Summing a narrow weight's gradient wide costs a wide copy of it; below one tile that copy is free.
    by_columns = sum(weight.numel() * wide.itemsize for weight in narrow) > rule.tile_bytes
    return ScoreOptions(rule, dtypes, by_columns=by_columns and torch.is_grad_enabled())


def _flat(pairs: Pairs) -> list[Tensor]:
    return [tensor for pair in pairs for tensor in pair]


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
