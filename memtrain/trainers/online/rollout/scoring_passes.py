"""Passes without gradients over the answers of a rollout: log-probs before the update, the reference's."""

# N tokens of answers.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.methods.grpo_rloo import Grpo, Rloo
from memtrain.recipes.sections.methods.online_base import MismatchMode, Needs, WithMismatch
from memtrain.recipes.sections.methods.ppo import Ppo
from memtrain.trainers.losses.head.linear import LogprobResult
from memtrain.trainers.losses.head.request import LogprobRequest
from memtrain.trainers.losses.policy.registry import (
    Clip,
    Mismatch,
    entropy_threshold,
    mismatch,
    mismatch_facts,
)
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.heads.value_head import Valued, ValuedRequest
from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed, PolicyMicro, Rollout
from memtrain.trainers.protocols.method import StepPreview
from memtrain.trainers.reference.reference import Reference, evaluating
from memtrain.trainers.runtime.ranks import Ranks

Ints = NDArray[np.int64]


def answer_scores(
    model: nn.Module,
    micro_batch: PolicyMicro,
    *,
    temperature: float,
    want_entropy: bool,
    learns_entropy: bool = False,
) -> LogprobResult:
    """Log-probs (and entropies) of the tokens of all answers [N]; entropies with gradients where the loss
    learns from them.

    Tokens go to the experts that the sampler chose, where the model can be told them.
    """
    inside = micro_batch.answers.micro_batch
    _send(model, micro_batch.routes_TLK)
    request = LogprobRequest(
        inside.targets, temperature=temperature, want_entropy=want_entropy, learns_entropy=learns_entropy
    )
    return model(inside.model_inputs(), inside.scored_index, request)


def valued_scores(
    model: nn.Module,
    micro_batch: PolicyMicro,
    *,
    temperature: float,
    want_entropy: bool,
    learns_entropy: bool = False,
) -> Valued:
    """The same, with the values [N] that a value model expects before each token."""
    inside = micro_batch.answers.micro_batch
    _send(model, micro_batch.routes_TLK)
    request = LogprobRequest(
        inside.targets, temperature=temperature, want_entropy=want_entropy, learns_entropy=learns_entropy
    )
    return model(inside.model_inputs(), inside.scored_index, ValuedRequest(request))


def _send(model: nn.Module, routes_TLK: Tensor | None) -> None:
    """Tell a policy's routers their choices, until the next pass: its backward pass computes layers again."""
    if isinstance(model, Scorer) and model.replay is not None:
        model.replay.send(routes_TLK)


@dataclass(frozen=True, slots=True)
class Passes:
    """Models that are asked for log-probs and values, and their settings."""

    model: nn.Module
    reference: Reference | None
    settings: Settings
    ranks: Ranks
    device: torch.device
    temperature: float

    def fill(self, feed: PolicyFeed, needs: Needs) -> None:
        """Fill the window of `feed` with the needed scores; called by all ranks together, which share the
        work."""
        window = feed.window
        assert window is not None, "A rollout is at hand."
        if not needs.passes:
            return
        found = self._shared(feed, needs)
        window.old_N = found.get("old", window.old_N)
        window.reference_N = found.get("reference", window.reference_N)
        window.value_N = found.get("values", window.value_N)
        if needs.top_entropy_fraction is not None:
            window.is_kept_N = kept_tokens(window, found["entropy"], needs.top_entropy_fraction)

    def _shared(self, feed: PolicyFeed, needs: Needs) -> dict[str, NDArray[np.float32]]:
        """float32 [N] of each that is needed, NaN for tokens of answers that are not trained on."""
        window = feed.window
        assert window is not None, "A rollout is at hand."
        answers = np.flatnonzero(window.is_trained_A)
        settings = self.settings
        micro_batches = feed.deal(
            answers,
            micro_batch_size=settings.pass_factor * settings.micro_batch_size,
            micro_tokens=None
            if settings.micro_tokens is None
            else settings.pass_factor * settings.micro_tokens,
        )
        rounds = -(-len(micro_batches) // self.ranks.world)
        micro_batches += [np.zeros(0, np.int64)] * (rounds * self.ranks.world - len(micro_batches))
        own = [
            (micro_batch, self._ask(feed.micro_batch(micro_batch).to(self.device), needs))
            for micro_batch in micro_batches[self.ranks.rank :: self.ranks.world]
            if len(micro_batch) or is_sharded(settings)
        ]
        found = {name: np.full(len(window.ids_N), np.nan, np.float32) for name in needs.passes}
        for of_rank in self.ranks.gather(own):
            for micro_batch, values in of_rank:
                places = window.tokens_of(feed.answers_of(micro_batch))
                for name in needs.passes:
                    found[name][places] = values[name]
        return found

    def _ask(self, micro_batch: PolicyMicro, needs: Needs) -> dict[str, NDArray[np.float32]]:
        found: dict[str, NDArray[np.float32]] = {}
        if needs.asks_policy:
            asked = policy_pass(self.model, micro_batch, needs, self.temperature)
            found = {name: _numbers(tensor_N) for name, tensor_N in asked.items()}
        if needs.reference:
            assert self.reference is not None, "What asks for a reference has one."
            found["reference"] = _numbers(reference_pass(self.reference, micro_batch, self.temperature))
        return found


def policy_pass(
    model: nn.Module, micro_batch: PolicyMicro, needs: Needs, temperature: float
) -> dict[str, Tensor]:
    """[N] of each: `old` log-probs, and `values` and `entropy` where they are needed; without gradients."""
    wants_entropy = needs.top_entropy_fraction is not None
    found: dict[str, Tensor] = {}
    with torch.no_grad(), evaluating(model):
        if needs.values:
            made, found["values"] = valued_scores(
                model, micro_batch, temperature=temperature, want_entropy=wants_entropy
            )
        else:
            made = answer_scores(model, micro_batch, temperature=temperature, want_entropy=wants_entropy)
    found["old"] = made.logp_N
    if made.entropy_N is not None:
        found["entropy"] = made.entropy_N
    return found


def reference_pass(reference: Reference, micro_batch: PolicyMicro, temperature: float) -> Tensor:
    """[N], log-probs of the reference at the temperature of the sampler."""

    # A reference has routers of its own mind, and so has the policy without its adapter.
    micro_batch = replace(micro_batch, routes_TLK=None)

    def ask(model: nn.Module, batch: Any) -> Tensor:
        return answer_scores(model, batch, temperature=temperature, want_entropy=False).logp_N

    return reference.logps(micro_batch, ask)  # pyright: ignore[reportArgumentType]


def kept_tokens(window: Rollout, entropy_N: NDArray[np.float32], share: float) -> NDArray[np.bool_]:
    """bool [N]: of the tokens that each step learns from, the `share` with the highest entropy."""
    kept = np.zeros(len(entropy_N), np.bool_)
    for part in np.unique(window.part_A).tolist():
        places = window.tokens_of(np.flatnonzero((window.part_A == part) & window.is_trained_A))
        threshold = float(entropy_threshold(torch.from_numpy(entropy_N[places]), share))
        kept[places] = entropy_N[places] >= threshold
    return kept


def _numbers(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().cpu().numpy()


# Metrics of policy methods: means over tokens, and the sampler's log-probs beside the trainer's.


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


def corrected(section: WithMismatch, mode: MismatchMode, old_N: Tensor, micro_batch: PolicyMicro) -> Mismatch:
    """The weights of the micro-batch's tokens."""
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
    sums = {"tokens": logp_N.new_full((), len(logp_N))}
    if mode != "none":
        sums["mismatch/outside"] = outside.is_outside_N.float().sum()
    return sums


def means_of_tokens(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums over tokens divided by their number; nothing where no token was forwarded."""
    tokens = sums.get("tokens", 0.0)
    if not tokens:
        return {}
    return {name: value / tokens for name, value in sums.items() if name != "tokens"}


# The common part of methods that train a policy on its own completions: fields, ratio bounds, means.


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
        return old_N, corrected(self.section, self.mismatch, old_N, micro_batch)

    def saw(self, *seen: Tensor) -> None:
        """Keep the log-probs of policy and sampler until the next step begins."""
        old_N, sampler_N = seen
        self.seen.pairs.append((old_N, sampler_N))

    def means(self, sums: dict[str, float], count: float) -> dict[str, float]:
        """Means over the tokens that were forwarded, and the facts of the rollout where it is new."""
        return means_of_tokens(sums) | self.seen.facts() | self.metrics
