"""A fixed rollout in place of generation and rewards: both sides learn from the same answers."""

# A answers, F reward functions (one).

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from memtrain.memory.plan.plan import Plan
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.rewards import RewardFunction, Rewards
from memtrain.trainers.batches.collate import Piece, pad_right
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.build.components import Built
from memtrain.trainers.losses.head.request import LogprobRequest
from memtrain.trainers.memory_meter.phase_watch import MemoryWatch
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.online.generation.completions_log import COMPLETIONS_FILE
from memtrain.trainers.online.generation.distributed_sampler import Generating
from memtrain.trainers.online.generation.protocol import Group, OnDone, Sample, Sampling
from memtrain.trainers.online.rewards.functions import load_functions
from memtrain.trainers.online.rewards.score import Early
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.online.rollout.reward_scoring import RewardScoring
from memtrain.trainers.online.rollout.rollout_batches import Rollout
from memtrain.trainers.protocols.feed import StepSource
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.reference.reference import evaluating
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.seed import numpy_generator

LONGEST_TOKENS = 48
"""Tokens of the longest dummy completion: enough for groups of unlike lengths. Taste."""


@dataclass(slots=True)
class Rollouts:
    """The answers that all sides share, with log-probs of the side that asks first."""

    known: dict[tuple[int, int], Sample] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FixedSampler:
    """Writes the same random tokens for the same group, whatever the weights are."""

    scorer: nn.Module
    vocab_size: int
    device: torch.device
    rollouts: Rollouts
    name: str = "fixed"

    def generate(
        self, groups: Sequence[Group], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[list[Sample]]:
        """The completions of each group; with `on_done` told at once."""
        made = [[self._sample(group, number, sampling) for number in range(group.count)] for group in groups]
        for number, samples in enumerate(made):
            if on_done is not None:
                on_done(number, samples)
        return made

    def _sample(self, group: Group, number: int, sampling: Sampling) -> Sample:
        key = (group.seed, number)
        if key not in self.rollouts.known:
            draw = numpy_generator(0, "completion", group.seed, number)
            length = int(draw.integers(2, max(3, min(sampling.max_tokens, LONGEST_TOKENS) + 1)))
            ids = draw.integers(0, self.vocab_size, length)
            logps = self._logps(group.prompt_ids, ids, sampling.temperature)
            self.rollouts.known[key] = Sample(tuple(ids.tolist()), tuple(logps), "stop")
        return self.rollouts.known[key]

    def _logps(self, prompt: Sequence[int], ids: NDArray[np.int64], temperature: float) -> list[float]:
        """Log-probs of a completion under the scorer, in a padded row of its own."""
        tokens = np.concatenate([np.array(prompt, np.int32), ids.astype(np.int32)])
        loss_mask = np.arange(len(tokens)) >= len(prompt)
        micro_batch = pad_right([Piece(tokens, loss_mask)], pad_id=0).to(self.device)
        request = LogprobRequest(micro_batch.targets, temperature=temperature)
        model = base_model(getattr(self.scorer, "model", self.scorer))
        before = str(model.config._attn_implementation)
        model.set_attn_implementation("eager")
        with torch.no_grad(), evaluating(self.scorer):
            made = self.scorer(micro_batch.model_inputs(), micro_batch.scored_index, request)
        model.set_attn_implementation(before)
        return made.logp_N.float().tolist()


class FixedJudging(RewardScoring):
    """Gives every answer a reward that only its tokens decide; calls none of the recipe's rewards."""

    def score(
        self,
        feed: PromptFeed,
        rows: Sequence[int],
        samples: Sequence[Sequence[Sample]],
        early: Early | None = None,
        environments: Sequence[Sequence[Any]] | None = None,
    ) -> tuple[NDArray[np.float64], dict[str, float]]:
        """(rewards [A, 1] between -1 and 1, nothing that is told)."""
        flat = [sample for group in samples for sample in group]
        rewards = [numpy_generator(0, "reward", *sample.token_ids).uniform(-1, 1) for sample in flat]
        return np.array(rewards)[:, None], {}

    def show(self, window: Rollout, step: int, count: int) -> None:
        """Nothing is shown."""


def online_source(plan: Plan, built: Built, rollouts: Rollouts) -> StepSource | None:
    """The steps of a method that learns from its own completions, over the fixed ones; None for others."""
    if not METHODS[plan.recipe.method].is_online:
        return None
    rewards = Rewards(functions=(RewardFunction(function="length"),))
    ranks, device = Ranks(), local_device(plan.settings)
    vocab_size = base_model(built.model).config.get_text_config().vocab_size
    vocab_size = min(vocab_size, len(built.tokenizer))

    def sampler(rows: int) -> FixedSampler:
        return FixedSampler(built.scorer, vocab_size, device, rollouts)

    judging = FixedJudging(
        rewards=rewards,
        functions=load_functions(rewards),
        models={},
        tokenizer=built.tokenizer,
        ranks=ranks,
        path=Path(plan.run_dir) / COMPLETIONS_FILE,
        print_line=lambda text: None,
    )
    return OnlineSteps(
        plan=plan,
        built=built,
        ranks=ranks,
        watch=MemoryWatch(device, 0, lambda *values: None, is_on=False),
        emit=lambda event: None,
        generating=Generating(make=sampler, max_rows=max(1, plan.settings.rollout_rows), ranks=ranks),
        judging=judging,
        prompts=cast(PromptFeed, built.train),
        held_out=None,
        position=TrainState(),
    )
