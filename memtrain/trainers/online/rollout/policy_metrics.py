"""Metrics of policy methods: means over tokens, and the sampler's log-probs beside the trainer's."""

# N tokens of answers.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memtrain.recipes.sections.methods.online_base import MismatchMode, WithMismatch
from memtrain.trainers.losses.policy.importance_correction import Mismatch, mismatch, mismatch_facts
from memtrain.trainers.online.rollout.rollout_batches import PolicyMicro


@dataclass(slots=True)
class MismatchSeen:
    """Log-probs of trainer and sampler in one step of this rank."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def clear(self) -> None:
        """Forget them."""
        self.pairs.clear()

    def facts(self) -> dict[str, float]:
        """Mean, largest and quantiles of the raw difference; waits for the device."""
        if not self.pairs:
            return {}
        old, sampler = (torch.cat(parts).cpu() for parts in zip(*self.pairs, strict=True))
        return mismatch_facts(old, sampler)

    def difference(self) -> tuple[float, int]:
        """(sum of |log p trainer - log p sampler|, tokens that have both), and forget them."""
        if not self.pairs:
            return 0.0, 0
        old, sampler = (torch.cat(parts) for parts in zip(*self.pairs, strict=True))
        known = (old - sampler).abs().double()
        known = known[~known.isnan()]
        self.clear()
        return known.sum().item(), len(known)


def corrected(
    section: WithMismatch, mode: MismatchMode, old_N: Tensor, micro_batch: PolicyMicro, seen: MismatchSeen
) -> Mismatch:
    """The weights of the micro-batch's tokens; its log-probs are kept until the next step begins."""
    seen.pairs.append((old_N.detach(), micro_batch.sampler_N))
    return mismatch(
        old_N,
        micro_batch.sampler_N,
        micro_batch.answers.lengths_A,
        mode,
        lowest=section.importance_correction_min,
        highest=section.importance_correction_max,
    )


def token_sums(logp_N: Tensor, outside: Mismatch, mode: MismatchMode) -> dict[str, Tensor]:
    """The number of tokens, and of tokens whose ratio to the sampler is out of bounds."""
    sums = {"tokens": torch.tensor(float(len(logp_N)), device=logp_N.device)}
    if mode != "none":
        sums["mismatch/outside"] = outside.is_outside_N.float().sum()
    return sums


def means_of_tokens(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over tokens divided by their number; nothing where no token was forwarded."""
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    return {name: value / tokens for name, value in sums.items() if name != "tokens"}
