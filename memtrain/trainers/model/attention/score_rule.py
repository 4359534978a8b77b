"""Rule of one attention call beside its layout: a sliding window, a cap of the scores, sinks."""

# H: query heads, T: tokens.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


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
