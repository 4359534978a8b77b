"""A tile of logits: bending, log-probs and statistics, and the gradient with respect to it."""

# N scored tokens, T tokens of one tile, V vocabulary (or the columns of one tile of it), D width of one pair

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memtrain.memory.plan.sizes import TILE_BYTES, tile_tokens
from memtrain.trainers.losses.head.products import HALF, Products, sums_half_in_fp32, wide_dtype


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Rule of a model from head outputs to logits: `softcap * tanh(scale * x / softcap) / temperature`.

    Without a softcap: `scale * x / temperature`. Source: Gemma 2, arXiv:2408.00118, section 2 (softcap).
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    tile_bytes: int = TILE_BYTES
    kernel: str = "torch"
    """Kernels of a tile, as `Settings.loss_kernel`."""

    @property
    def slope(self) -> float:
        """d logit / d head output where tanh is not bending."""
        return self.scale / self.temperature


PLAIN_LOGITS = LogitRule()
"""Head outputs are the logits."""


class Operands(NamedTuple):
    """The head of one call: summed products `hidden_i @ weight_i.T`, plus a bias."""

    hidden: tuple[Tensor, ...]
    weight: tuple[Tensor, ...]
    bias_V: Tensor | None


class TileScores(NamedTuple):
    """Per-token results of one tile; None where not asked for."""

    logp_T: Tensor
    log_z_T: Tensor
    mean_logit_T: Tensor | None
    entropy_T: Tensor | None
    correct_T: Tensor | None
    log_sum_squares_T: Tensor | None


class ScoreOptions(NamedTuple):
    """Results of a scoring call besides log p and log Z, and the form of its backward pass."""

    rule: LogitRule
    dtypes: tuple[torch.dtype, ...]
    want_mean: bool = False
    want_entropy: bool = False
    want_correct: bool = False
    want_log_sum_squares: bool = False
    by_columns: bool = False


class Coefficients(NamedTuple):
    """Per token, the factors of p_v, 1[v = target], 1 and the entropy's slope in d loss / d logit_v."""

    prob_N: Tensor
    target_N: Tensor
    every_N: Tensor | None
    entropy_N: Tensor | None

    def rows(self, low: int, high: int) -> Coefficients:
        """The coefficients of tokens `low` to `high`."""
        return Coefficients(
            self.prob_N[low:high],
            self.target_N[low:high],
            None if self.every_N is None else self.every_N[low:high],
            None if self.entropy_N is None else self.entropy_N[low:high],
        )


def gather_operands(dtypes: Sequence[torch.dtype], bias_V: Tensor | None, flat: Sequence[Tensor]) -> Operands:
    """The head in the dtypes it is multiplied in; `flat` is hidden, weight, hidden, weight, ..."""
    hidden = tuple(x.to(dtype) for x, dtype in zip(flat[0::2], dtypes, strict=True))
    weight = tuple(w.to(dtype) for w, dtype in zip(flat[1::2], dtypes, strict=True))
    return Operands(hidden, weight, bias_V)


def products_for(operands: Operands, rule: LogitRule) -> Products:
    """Products of these operands on their device."""
    wide = wide_dtype(*operands.hidden, *operands.weight)
    dtypes = {tensor.dtype for tensor in (*operands.hidden, *operands.weight)}
    halves = dtypes.intersection(HALF)
    device = operands.hidden[0].device
    has_kernel = bool(halves) and all(sums_half_in_fp32(device, dtype) for dtype in halves)
    half = next(iter(halves)) if has_kernel and len(dtypes) == 1 else None
    return Products(wide, has_kernel, rule.tile_bytes // 4, half)


def num_tile_tokens(num_columns: int, num_buffers: int, rule: LogitRule, wide: torch.dtype) -> int:
    """Tokens whose logits over `num_columns`, `num_buffers` times, fill the scratch; at least 1."""
    return tile_tokens(rule.tile_bytes, num_columns, num_buffers, wide.itemsize)


def empty_scores(
    num_tokens: int, options: ScoreOptions, wide: torch.dtype, device: torch.device
) -> TileScores:
    """Room for the scores of all tokens, to be filled tile by tile."""

    def room(is_wanted: bool = True, dtype: torch.dtype = wide) -> Tensor | None:
        return torch.empty(num_tokens, dtype=dtype, device=device) if is_wanted else None

    return TileScores(
        torch.empty(num_tokens, dtype=wide, device=device),
        torch.empty(num_tokens, dtype=wide, device=device),
        room(options.want_mean),
        room(options.want_entropy),
        room(options.want_correct, torch.bool),
        room(options.want_log_sum_squares),
    )


def put_scores(into: TileScores, tile: TileScores, low: int, high: int) -> None:
    """Write the scores of the tokens `low` to `high`."""
    for all_N, part_T in zip(into, tile, strict=True):
        if all_N is not None and part_T is not None:
            all_N[low:high] = part_T


@contextlib.contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Dtypes are chosen by hand inside: autocast would round fp32 operands once more."""
    if not torch.amp.is_autocast_available(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


def head_outputs_(tile_TV: Tensor, operands: Operands, products: Products) -> None:
    """Fill the wide `tile_TV` with the sum of the products and the bias."""
    for i, (hidden_TD, weight_VD) in enumerate(zip(operands.hidden, operands.weight, strict=True)):
        products.add_logits_(tile_TV, hidden_TD, weight_VD, first=i == 0)
    if operands.bias_V is not None:
        tile_TV.add_(operands.bias_V)


def bend_(tile_TV: Tensor, rule: LogitRule, *, want_slope: bool) -> Tensor | None:
    """Turn head outputs into logits in place; returns (d logit / d output) / `rule.slope`, None if 1."""
    if rule.softcap is None:
        if rule.slope != 1.0:
            tile_TV.mul_(rule.slope)
        return None
    tile_TV.mul_(rule.scale / rule.softcap).tanh_()
    slope_TV = tile_TV.square().neg_().add_(1.0) if want_slope else None
    tile_TV.mul_(rule.softcap / rule.temperature)
    return slope_TV


def score_(logits_TV: Tensor, targets_T: Tensor, options: ScoreOptions) -> tuple[TileScores, Tensor, Tensor]:
    """(scores, exp(logits - max), its row sums). The logits are overwritten.

    Entropy is log sum e - sum(e * z) / sum e with z = logits - max; it costs one more tile of scratch.
    log sum_v p_v^2 is the log of e's squared length over the squared sum.
    """
    highest_T = logits_TV.amax(-1)
    target_T = logits_TV.gather(1, targets_T[:, None])[:, 0]
    mean_T = logits_TV.mean(-1) if options.want_mean else None
    correct_T = target_T >= highest_T if options.want_correct else None
    logits_TV.sub_(highest_T[:, None])
    if options.want_entropy:
        exp_TV = logits_TV.exp()
        sums_T = exp_TV.sum(-1)
        entropy_T = sums_T.log() - logits_TV.mul_(exp_TV).sum(-1) / sums_T
    else:
        exp_TV = logits_TV.exp_()
        sums_T = exp_TV.sum(-1)
        entropy_T = None
    log_sums_T = sums_T.log()
    # The maximum leaves both terms before they are subtracted: large logits would cost digits.
    logp_T = (target_T - highest_T) - log_sums_T
    squares_T = None
    if options.want_log_sum_squares:
        squares_T = 2.0 * (torch.linalg.vector_norm(exp_TV, dim=-1).log() - log_sums_T)
    scores = TileScores(logp_T, highest_T + log_sums_T, mean_T, entropy_T, correct_T, squares_T)
    return scores, exp_TV, sums_T


def gradient_of_logits_(
    logits_TV: Tensor, log_z_T: Tensor, entropy_T: Tensor | None, coefficients: Coefficients
) -> Tensor:
    """Gradient through p and the entropy, from recomputed logits (overwritten); targets are added later.

    d H / d z_v = -p_v (log p_v + H).
    """
    logp_TV = logits_TV.sub_(log_z_T[:, None])
    if coefficients.entropy_N is None:
        return logp_TV.exp_().mul_(coefficients.prob_N[:, None])
    assert entropy_T is not None, "an entropy gradient needs the entropies of the forward pass"
    p_TV = logp_TV.exp()
    grad_TV = logp_TV.add_(entropy_T[:, None]).mul_(p_TV).mul_(-coefficients.entropy_N[:, None])
    return grad_TV.addcmul_(p_TV, coefficients.prob_N[:, None])


def finish_gradient_(
    grad_TV: Tensor,
    coefficients: Coefficients,
    targets_T: Tensor,
    slope_TV: Tensor | None,
    rule: LogitRule,
    first_column: int = 0,
) -> Tensor:
    """Add the parts of targets and the mean logit, then go back through softcap, scale and temperature.

    `grad_TV` holds columns `first_column`...; targets outside them are left to the other tiles.
    """
    column_T = targets_T - first_column
    num_columns = grad_TV.shape[1]
    inside_T = (column_T >= 0) & (column_T < num_columns)
    added_T = torch.where(inside_T, coefficients.target_N, 0.0)
    grad_TV.scatter_add_(1, column_T.clamp(0, num_columns - 1)[:, None], added_T[:, None])
    if coefficients.every_N is not None:
        grad_TV.add_(coefficients.every_N[:, None])
    if rule.slope != 1.0:
        grad_TV.mul_(rule.slope)
    return grad_TV if slope_TV is None else grad_TV.mul_(slope_TV)
