"""Reward models beside a traced policy: whole, without gradients, and a pass over a batch of theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from memtrain.memory.plan.models_beside import reward_model_settings
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.batches.tensors import with_tensors
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.tools.trace.client import RewardModelJob
from memtrain.trainers.tools.trace.dummy_batches import Subject, reward_model_micro_batch
from memtrain.trainers.tools.trace.fake_model import bare_model


@dataclass(frozen=True, slots=True)
class BareRewardModel:
    """A reward model with the most that it reads at once."""

    scorer: RewardScorer
    micro_batch: Any

    @property
    def weights(self) -> list[Tensor]:
        """All that it holds between its passes."""
        return [*self.scorer.parameters(), *self.scorer.buffers()]

    def without_data(self, made: Callable[[Tensor], Tensor]) -> BareRewardModel:
        """The same with a batch without data."""
        return replace(self, micro_batch=with_tensors(self.micro_batch, made))


def bare_reward_model(
    recipe: Recipe, settings: Settings, judged: RewardModelJob, device: str
) -> BareRewardModel:
    """A reward model of a run, as load_reward_model puts it beside the policy of `settings`."""
    own = reward_model_settings(settings, judged.dtype, is_alike=judged.is_alike)
    model = bare_model(judged.config, own, device=device, head="score")
    scorer = RewardScorer(model.requires_grad_(False)).eval()
    return BareRewardModel(scorer, reward_model_micro_batch(Subject(recipe, own), judged.batch))


def one_scoring(judge: BareRewardModel) -> None:
    """Pass of a reward model over one batch of completions (see RewardJudge)."""
    with torch.no_grad():
        judge.scorer(judge.micro_batch.micro_batch.model_inputs(), judge.micro_batch.last_A)
