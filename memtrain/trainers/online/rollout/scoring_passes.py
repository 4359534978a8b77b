"""Passes without gradients over the answers of a rollout: log-probs before the update, the reference's."""

# N tokens of answers.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.sections.methods.online_base import Needs
from memtrain.trainers.losses.head.linear import LogprobResult
from memtrain.trainers.losses.head.request import LogprobRequest
from memtrain.trainers.losses.policy.ratios import entropy_threshold
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.heads.value_head import Valued, ValuedRequest
from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed, PolicyMicro
from memtrain.trainers.online.rollout.rollout_buffer import Rollout
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
