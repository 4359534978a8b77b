"""The next token of each row, from its logits and one uniform number of the row's own."""

# R rows, V vocabulary.

from __future__ import annotations

import torch
from torch import Tensor

from memtrain.memory.generation.decode_bytes import CHOICE_TILE
from memtrain.trainers.online.generation.protocol import Sampling


def choose(
    logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling, seen_RV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(token int64, its log-prob fp32) of each row.

    The token is where the cumulative distribution passes the uniform number: one number a token, drawn by
    the row's own seed, so that neither batch nor order matters. The log-prob is that of softmax(logits /
    temperature), before penalty and truncation. `seen_RV` (bool) marks tokens the penalty applies to.
    """
    rows = max(1, CHOICE_TILE // (4 * logits_RV.shape[1]))
    parts = [
        _choose_tile(
            logits_RV[start : start + rows],
            uniform_R[start : start + rows],
            sampling,
            None if seen_RV is None else seen_RV[start : start + rows],
        )
        for start in range(0, len(logits_RV), rows)
    ]
    return torch.cat([ids for ids, _ in parts]), torch.cat([logp for _, logp in parts])


def _choose_tile(
    logits_RV: Tensor, uniform_R: Tensor, sampling: Sampling, seen_RV: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits_RV = logits_RV.float()
    is_greedy = sampling.temperature == 0
    logp_RV = torch.log_softmax(logits_RV if is_greedy else logits_RV / sampling.temperature, -1)
    if seen_RV is not None:
        logits_RV = penalised(logits_RV, seen_RV, sampling.repetition_penalty)
    if is_greedy:
        ids_R = logits_RV.argmax(-1)
    else:
        probs_RV = (
            torch.softmax(logits_RV / sampling.temperature, -1) if seen_RV is not None else logp_RV.exp()
        )
        probs_RV = truncated(probs_RV, sampling)
        sums_RV = probs_RV.cumsum(-1)
        wanted_R1 = uniform_R.to(sums_RV.dtype)[:, None] * sums_RV[:, -1:]
        # The first token whose sum is above the wanted mass: never one of no mass, and rounding of the
        # uniform number up to 1 cannot lead past the last one.
        last_R1 = (
            (probs_RV > 0)
            .long()
            .mul_(torch.arange(probs_RV.shape[1], device=probs_RV.device))
            .amax(-1, keepdim=True)
        )
        ids_R = torch.minimum(torch.searchsorted(sums_RV, wanted_R1, right=True), last_R1)[:, 0]
    return ids_R, logp_RV.gather(-1, ids_R[:, None])[:, 0]


def penalised(logits_RV: Tensor, seen_RV: Tensor, penalty: float) -> Tensor:
    """Logits of tokens that were seen, divided by the penalty where positive and multiplied where negative.

    Source: Keskar et al. 2019 (CTRL), arXiv:1909.05858, section 4.1, in the form that transformers has.
    """
    lower_RV = torch.where(logits_RV > 0, logits_RV / penalty, logits_RV * penalty)
    return torch.where(seen_RV, lower_RV, logits_RV)


def truncated(probs_RV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities with unlikely tokens set to 0 by top-k, top-p and min-p in turn; not normalised again.

    Source: top-p: Holtzman et al. 2019, arXiv:1904.09751, section 3.1; min-p: Nguyen et al. 2024,
    arXiv:2407.01082, section 3.
    """
    if sampling.top_k is not None and sampling.top_k < probs_RV.shape[1]:
        least_R1 = probs_RV.topk(sampling.top_k, -1).values[:, -1:]
        probs_RV = probs_RV.masked_fill(probs_RV < least_R1, 0)
    if sampling.top_p < 1:
        sorted_RV, order_RV = probs_RV.sort(-1, descending=True)
        before_RV = sorted_RV.cumsum(-1) - sorted_RV
        is_out_RV = before_RV >= sampling.top_p * sorted_RV.sum(-1, keepdim=True)
        is_out_RV[:, 0] = False
        probs_RV = probs_RV.masked_fill(torch.zeros_like(is_out_RV).scatter(-1, order_RV, is_out_RV), 0)
    if sampling.min_p > 0:
        probs_RV = probs_RV.masked_fill(probs_RV < sampling.min_p * probs_RV.amax(-1, keepdim=True), 0)
    return probs_RV
