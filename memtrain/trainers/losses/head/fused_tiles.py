"""A tile of logits scored, and turned into its gradient, by Triton's kernels where the plan says so."""

# T tokens of one tile, K columns of it

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memtrain.errors import LaunchError
from memtrain.trainers.losses.head.tiles import (
    Coefficients,
    LogitRule,
    ScoreOptions,
    TileScores,
    empty_scores,
)


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
