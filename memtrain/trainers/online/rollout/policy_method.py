"""The common part of methods that train a policy on its own completions: fields, ratio bounds, means."""

# N tokens of answers.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor, nn

from memtrain.recipes.sections.methods.grpo_rloo import Grpo, Rloo
from memtrain.recipes.sections.methods.online_base import MismatchMode
from memtrain.recipes.sections.methods.ppo import Ppo
from memtrain.trainers.losses.policy.importance_correction import Mismatch
from memtrain.trainers.losses.policy.surrogates import Clip
from memtrain.trainers.online.rollout.policy_metrics import MismatchSeen, corrected, means_of_tokens
from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed, PolicyMicro
from memtrain.trainers.protocols.method import StepPreview
from memtrain.trainers.reference.reference import Reference

Section = TypeVar("Section", Grpo, Rloo, Ppo)


@dataclass(slots=True)
class PolicyMethod(Generic[Section]):
    """A method whose loss weighs the tokens of completions by advantages."""

    section: Section
    reference: Reference | None
    temperature: float = 1.0
    mismatch: MismatchMode = "none"
    """Correction for the sampler's log-probs."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Facts of the rollout, where it is new."""
    seen: MismatchSeen = field(default_factory=MismatchSeen)
    answer_feed: type[PolicyFeed] = PolicyFeed

    @property
    def clip(self) -> Clip:
        """The bounds of the ratio."""
        high = self.section.clip_high
        return Clip(self.section.clip_low, high if high is not None else self.section.clip_low)

    def before_step(self, model: nn.Module, ahead: StepPreview) -> None:
        """Forget the mismatch of the step before."""
        self.seen.clear()

    def old_and_mismatch(self, logp_N: Tensor, micro_batch: PolicyMicro) -> tuple[Tensor, Mismatch]:
        """Log-probs [N] of the policy that is corrected from, and the weights of tokens of another sampler.

        Where no pass was made before the step, the policy is that of the step itself.
        """
        old_N = micro_batch.old_N if micro_batch.old_N is not None else logp_N.detach()
        return old_N, corrected(self.section, self.mismatch, old_N, micro_batch, self.seen)

    def means(self, sums: dict[str, float], count: float) -> dict[str, float]:
        """Means over the tokens that were forwarded, and the facts of the rollout where it is new."""
        return means_of_tokens(sums) | self.seen.facts() | self.metrics
