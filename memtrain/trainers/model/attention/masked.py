"""The masked back end: every score, then a T x T mask. The reference that the others are tested against.

It runs on any device in any dtype and costs T x T x H numbers per layer: the last resort, and the definition.
"""

# T: tokens (I: as query, J: as key), H: query heads, K: key heads, G = H / K, D: head width.

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memtrain.trainers.model.attention.row_layout import Layout, Part
from memtrain.trainers.model.attention.two_part import PLAIN, ScoreRule

# The mask is the same for all layers of one forward with one window, and dies with its layout.
_masks: WeakKeyDictionary[Layout, dict[int | None, Tensor]] = WeakKeyDictionary()


def attend(
    query_THD: Tensor,
    key_TKD: Tensor,
    value_TKD: Tensor,
    layout: Layout,
    scale: float,
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """`out_THD` of the row by plain autograd; softmax in fp32 at least."""
    score_KGIJ = _scores(query_THD, key_TKD, scale, is_causal=False, softcap=rule.softcap or 0.0)
    known = _masks.setdefault(layout, {})
    if rule.window not in known:
        known[rule.window] = mask_of(layout, rule.window)
    weight_KGIJ = _softmax(score_KGIJ.masked_fill(~known[rule.window], float("-inf")), rule.sinks_H)
    weight_KGIJ = weight_KGIJ.to(value_TKD.dtype)
    return torch.einsum("kgij,jkd->ikgd", weight_KGIJ, value_TKD).flatten(1, 2)


def _softmax(score_KGIJ: Tensor, sinks_H: Tensor | None) -> Tensor:
    """The softmax over the keys, and over a head's sink where there is one."""
    if sinks_H is None:
        return score_KGIJ.softmax(-1)
    sinks_KG11 = sinks_H.to(score_KGIJ.dtype).unflatten(0, score_KGIJ.shape[:2])[..., None, None]
    sinks_KGI1 = sinks_KG11.expand(*score_KGIJ.shape[:3], 1)
    return torch.cat([score_KGIJ, sinks_KGI1], -1).softmax(-1)[..., :-1]


class MaskedScores:
    """Segment by segment, every score of a segment at once: in any dtype, on any device."""

    softcap = 0.0
    """Cap of the scores; 0: none."""

    @classmethod
    def forward(
        cls, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, part: Part, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `two_part.Kernel`."""
        T, H, _ = query_THD.shape
        wide = torch.promote_types(query_THD.dtype, torch.float32)
        out_THD = query_THD.new_empty(T, H, value_TKD.shape[-1])
        lse_HT = query_THD.new_empty(H, T, dtype=wide)
        for q0, q1, k0, k1 in part.spans():
            score_KGIJ = cls._scores(query_THD[q0:q1], key_TKD[k0:k1], part, scale)
            lse_KGI = score_KGIJ.logsumexp(-1)
            weight_KGIJ = score_KGIJ.sub_(lse_KGI[..., None]).exp_().to(value_TKD.dtype)
            out_THD[q0:q1] = torch.einsum("kgij,jkd->ikgd", weight_KGIJ, value_TKD[k0:k1]).flatten(1, 2)
            lse_HT[:, q0:q1] = lse_KGI.flatten(0, 1)
        return out_THD, lse_HT

    @classmethod
    def backward(
        cls,
        grad_THD: Tensor,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        part: Part,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `two_part.Kernel`.

        Source: Dao et al. 2022, arXiv:2205.14135, appendix B.2: dS = P * (dP - rowsum(dO * O)).
        """
        K = key_TKD.shape[1]
        wide, narrow = lse_HT.dtype, query_THD.dtype
        dq_THD = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        dk_TKD = torch.empty_like(key_TKD, memory_format=torch.contiguous_format)
        dv_TKD = torch.empty_like(value_TKD, memory_format=torch.contiguous_format)
        sum_HT = (grad_THD.to(wide) * out_THD.to(wide)).sum(-1).t()
        for q0, q1, k0, k1 in part.spans():
            query_IKGD, grad_IKGD = (one[q0:q1].unflatten(1, (K, -1)) for one in (query_THD, grad_THD))
            lse_KGI, sum_KGI = (one[:, q0:q1].unflatten(0, (K, -1)) for one in (lse_HT, sum_HT))
            key_JKD, value_JKD = key_TKD[k0:k1], value_TKD[k0:k1]
            weight_KGIJ = cls._scores(query_THD[q0:q1], key_JKD, part, scale)
            slope_KGIJ = (weight_KGIJ / cls.softcap).square_().neg_().add_(1) if cls.softcap else None
            weight_KGIJ = weight_KGIJ.sub_(lse_KGI[..., None]).exp_()
            dv_TKD[k0:k1] = torch.einsum("kgij,ikgd->jkd", weight_KGIJ.to(narrow), grad_IKGD)
            ds_KGIJ = torch.einsum("ikgd,jkd->kgij", grad_IKGD, value_JKD).to(wide)
            ds_KGIJ = ds_KGIJ.sub_(sum_KGI[..., None]).mul_(weight_KGIJ).mul_(scale)
            if slope_KGIJ is not None:
                # Where no query may look, the slope is that of minus infinity and the weight zero.
                ds_KGIJ = ds_KGIJ.mul_(slope_KGIJ.nan_to_num_(neginf=0.0))
            ds_KGIJ = ds_KGIJ.to(narrow)
            dq_THD[q0:q1] = torch.einsum("kgij,jkd->ikgd", ds_KGIJ, key_JKD).flatten(1, 2)
            dk_TKD[k0:k1] = torch.einsum("kgij,ikgd->jkd", ds_KGIJ, query_IKGD)
        return dq_THD, dk_TKD, dv_TKD

    @classmethod
    def _scores(cls, query_IHD: Tensor, key_JKD: Tensor, part: Part, scale: float) -> Tensor:
        return _scores(query_IHD, key_JKD, scale, is_causal=part.is_causal, softcap=cls.softcap)


def _scores(
    query_IHD: Tensor, key_JKD: Tensor, scale: float, *, is_causal: bool, softcap: float = 0.0
) -> Tensor:
    """[K, G, I, J] scaled scores, in float32 at least; if causal, -inf where no query may look."""
    query_IKGD = query_IHD.unflatten(1, (key_JKD.shape[1], -1))
    score_KGIJ = torch.einsum("ikgd,jkd->kgij", query_IKGD, key_JKD).mul(scale)
    score_KGIJ = score_KGIJ.to(torch.promote_types(score_KGIJ.dtype, torch.float32))
    if softcap:
        score_KGIJ = score_KGIJ.div(softcap).tanh().mul(softcap)
    if is_causal:
        later_IJ = torch.ones(score_KGIJ.shape[-2:], dtype=torch.bool, device=query_IHD.device).triu(1)
        score_KGIJ = score_KGIJ.masked_fill(later_IJ, float("-inf"))
    return score_KGIJ


def mask_of(layout: Layout, window: int | None = None) -> Tensor:
    """bool [I, J]: True where query i attends to key j. On the layout's device."""
    mask_IJ = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool, device=layout.device)
    _allow(mask_IJ, layout.within)
    if layout.to_prompt is not None:
        _allow(mask_IJ[layout.num_prompt_tokens :, : layout.num_prompt_tokens], layout.to_prompt)
    if window is not None:
        mask_IJ &= layout.places[:, None] - layout.places < window
    return mask_IJ


def _allow(mask_IJ: Tensor, part: Part) -> None:
    for q0, q1, k0, k1 in part.spans():
        block = mask_IJ[q0:q1, k0:k1]
        block.fill_(True)
        if part.is_causal:
            block.tril_()
