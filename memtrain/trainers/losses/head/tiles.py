"""A tile of logits: bending, log-probs and statistics, and the gradient with respect to it."""

# T tokens of one tile, V vocabulary rows, D width of one pair (hidden size, or the rank of an adapter)
# N scored tokens, T tokens of one tile, V vocabulary (or the columns of one tile of it), D width of one pair
# T tokens of one tile, K columns of it

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memtrain.errors import LaunchError
from memtrain.memory.plan.sizes import TILE_BYTES, tile_tokens

# The runs that a tiled loss walks through: all of them, or the four that a trace needs.


def spans(total: int, step: int) -> list[tuple[int, int]]:
    """(first, after the last) of consecutive runs of `step`; the last one may be shorter.

    A loop over these holds the same memory at the start of every run but the first.
    """
    return _every_span(total, step)


def _every_span(total: int, step: int) -> list[tuple[int, int]]:
    return [(low, min(low + step, total)) for low in range(0, total, step)]


def logit_spans(total: int, step: int) -> list[tuple[int, int]]:
    """The first two and the last two of `spans`: spans between them hold the same as the second, at each
    moment. It stands in the place of `spans` in a trace, and so asks another."""
    found = _every_span(total, step)
    return found if len(found) <= 4 else [*found[:2], *found[-2:]]


# Matrix products of half-precision operands summed in fp32, with no fp32 copy of a whole matrix.


HALF = (torch.bfloat16, torch.float16)


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype sums are kept in: fp32, or fp64 when an operand is fp64."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


@functools.cache
def sums_half_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device's own kernel adds a product of `dtype` matrices to an fp32 one: found by a trial.

    The kernel exists on CUDA only, some torch releases refuse an fp32 addend, and GPUs before Ampere may have
    it for float16 alone. Where torch sees no such device (a CPU build tracing a CUDA run with fake tensors)
    the answer is no.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    with _disable_current_modes(), torch.no_grad():
        ones = torch.ones(16, 16, dtype=dtype, device=device)
        total = torch.ones(16, 16, dtype=torch.float32, device=device)
        try:
            torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        except (RuntimeError, NotImplementedError, TypeError):
            return False
        return bool((total == 17).all())


@dataclass(frozen=True, slots=True)
class Products:
    """Products on one device: sums in `wide`, weights widened `block_bytes` at a time."""

    wide: torch.dtype
    half_kernel: bool
    block_bytes: int
    half: torch.dtype | None = None
    """Of every operand, where products of halves are summed wide: gradients are rounded to it for them."""

    def add_logits_(self, logits_TV: Tensor, hidden_TD: Tensor, weight_VD: Tensor, *, first: bool) -> None:
        """Write (`first`) or add `hidden @ weight.T` to the wide `logits_TV`."""
        hidden_TD = self._ready(hidden_TD)
        for low, high, block_VD in self._blocks(weight_VD):
            _multiply_(logits_TV[:, low:high], hidden_TD, block_VD.t(), add=not first)

    def add_hidden_gradient_(self, total_TD: Tensor, grad_TV: Tensor, weight_VD: Tensor) -> None:
        """Add `grad @ weight` to the wide `total_TD`."""
        for low, high, block_VD in self._blocks(weight_VD):
            _multiply_(total_TD, grad_TV[:, low:high].to(block_VD.dtype), block_VD, add=True)

    def write_hidden_gradient_(self, out_TD: Tensor, grad_TV: Tensor, weight_VD: Tensor) -> None:
        """Write `grad @ weight` to `out_TD`, summed wide and rounded once to the dtype of `out_TD`."""
        if weight_VD.dtype == self.wide == out_TD.dtype:
            torch.mm(grad_TV, weight_VD, out=out_TD)
            return
        total_TD = torch.zeros(out_TD.shape, dtype=self.wide, device=out_TD.device)
        self.add_hidden_gradient_(total_TD, grad_TV, weight_VD)
        out_TD.copy_(total_TD)

    def add_weight_gradient_(self, total_VD: Tensor, grad_TV: Tensor, hidden_TD: Tensor) -> None:
        """Add `grad.T @ hidden` to the wide `total_VD`."""
        hidden_TD = self._ready(hidden_TD)
        _multiply_(total_VD, grad_TV.to(hidden_TD.dtype).t(), hidden_TD, add=True)

    def _ready(self, tensor: Tensor) -> Tensor:
        return tensor if self._as_is(tensor) else tensor.to(self.wide)

    def _as_is(self, tensor: Tensor) -> bool:
        return tensor.dtype == self.wide or (self.half_kernel and tensor.dtype in HALF)

    def _blocks(self, weight_VD: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, row after the last, rows) of the weight, each block ready to be multiplied."""
        num_rows, width = weight_VD.shape
        if self._as_is(weight_VD):
            yield 0, num_rows, weight_VD
            return
        step = max(1, self.block_bytes // (width * self.wide.itemsize))
        for low, high in spans(num_rows, step):
            yield low, high, weight_VD[low:high].to(self.wide)


def _multiply_(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    if left.dtype == out.dtype:
        if add:
            out.addmm_(left, right)
        else:
            torch.mm(left, right, out=out)
    elif add:
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


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


# A tile of logits scored, and turned into its gradient, by Triton's kernels where the plan says so.


def is_fused(rule: LogitRule, wide: torch.dtype, device: torch.device) -> bool:
    """Whether tiles go through Triton's kernels: float32 on CUDA, by a rule without a softcap."""
    return (
        rule.kernel == "triton" and rule.softcap is None and device.type == "cuda" and wide == torch.float32
    )


def fused_scores(tile_TV: Tensor, targets_T: Tensor, options: ScoreOptions) -> TileScores:
    """Scores of a tile of head outputs, which stay as they are; as `tiles.score_` gives them."""
    from memtrain.trainers.losses.head.triton_tiles import BLOCK, NUM_WARPS, score_rows

    found = empty_scores(len(tile_TV), options, tile_TV.dtype, tile_TV.device)
    # A kernel takes some tensor in the place of each that is not asked for.
    given = [found.logp_T if one is None else one for one in found]
    rows: Any = score_rows
    rows[(len(tile_TV),)](
        tile_TV,
        tile_TV.stride(0),
        targets_T,
        *given,
        options.rule.slope,
        NUM_COLUMNS=tile_TV.shape[1],
        WANT_MEAN=options.want_mean,
        WANT_ENTROPY=options.want_entropy,
        WANT_CORRECT=options.want_correct,
        WANT_SQUARES=options.want_log_sum_squares,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return found


def fused_gradient_(
    tile_TK: Tensor,
    targets_T: Tensor,
    log_z_T: Tensor,
    entropy_T: Tensor | None,
    coefficients: Coefficients,
    rule: LogitRule,
    first_column: int = 0,
    narrow: torch.dtype | None = None,
) -> Tensor:
    """The gradient with respect to head outputs, in their place; as the torch form of `tiles.py` gives it.

    narrow: rounded to this dtype, of 2 bytes, in the first half of each row's place: products read it there,
        and no copy of the tile is made for them.
    """
    from memtrain.trainers.losses.head.triton_tiles import BLOCK, NUM_WARPS, gradient_rows, narrow_rows

    every_T, slope_T = coefficients.every_N, coefficients.entropy_N
    num_columns = tile_TK.shape[1]
    out_TK = tile_TK if narrow is None else tile_TK.view(narrow)[:, :num_columns]
    rows: Any = gradient_rows if narrow is None else narrow_rows
    grid = (len(tile_TK), -(-num_columns // BLOCK)) if narrow is None else (len(tile_TK),)
    rows[grid](
        tile_TK,
        out_TK,
        tile_TK.stride(0),
        out_TK.stride(0),
        targets_T,
        log_z_T,
        log_z_T if entropy_T is None else entropy_T,
        coefficients.prob_N.contiguous(),
        coefficients.target_N.contiguous(),
        log_z_T if every_T is None else every_T.contiguous(),
        log_z_T if slope_T is None else slope_T.contiguous(),
        first_column,
        rule.slope,
        NUM_COLUMNS=num_columns,
        HAS_EVERY=every_T is not None,
        HAS_ENTROPY=slope_T is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out_TK


def check_kernels(device: torch.device) -> None:
    """Run all kernels on a few tokens, before the first step.

    Raises: LaunchError where triton cannot compile them here, or their numbers are not those of torch.
    """
    tile_TV = torch.linspace(-9.0, 9.0, 2 * 5000, device=device).view(2, 5000)
    targets_T = torch.tensor([7, 4900], device=device)
    try:
        log_z_T = fused_scores(tile_TV, targets_T, ScoreOptions(LogitRule(), ())).log_z_T
        ones_T = torch.ones_like(log_z_T)
        factors = Coefficients(ones_T, -ones_T, None, None)
        given = (targets_T, log_z_T, None, factors, LogitRule())
        grad_TV = fused_gradient_(tile_TV.clone(), *given)
        narrow_TV = fused_gradient_(tile_TV.clone(), *given, narrow=torch.float16)
    except Exception as fault:  # A compiler can fail in any way; the error says in which.
        raise _cannot(f"{type(fault).__name__}: {fault}") from None
    expected_TV = tile_TV.softmax(-1)
    expected_TV[torch.arange(2, device=device), targets_T] -= 1.0
    error = ((grad_TV - expected_TV).norm() / expected_TV.norm()).item()
    if not error < 1e-5:
        raise _cannot(f"their gradient is off by {error:.1e}")
    if not torch.equal(narrow_TV, grad_TV.to(narrow_TV.dtype)):
        raise _cannot("their rounded gradient is not their gradient, rounded")


def _cannot(reason: str) -> LaunchError:
    return LaunchError(
        f"the Triton kernels of the loss do not work here: {reason[:300]}",
        "model.kernels",
        "set model.kernels: transformers, which computes the loss with torch's operators too",
    )
