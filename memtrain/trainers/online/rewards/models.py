"""Reward models that judge completions: loaded by their own settings, asked without gradients."""

# A answers.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import nn

from memtrain.memory.model_shape.length_rules import length_rules, reached
from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.models_beside import reward_model_settings
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import READ_TOKENS
from memtrain.recipes.sections.rewards import RewardModel
from memtrain.trainers.batches.answer_batch import Answer as AnswerIds
from memtrain.trainers.batches.answer_batch import Group, collate_answers
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.model.loading.load import load_model, local_device
from memtrain.trainers.model.loading.locate import find_origin, read_config
from memtrain.trainers.model.loading.sharded_load import made_in_parts
from memtrain.trainers.online.rewards.answer import Answer
from memtrain.trainers.online.rewards.reading import Ids, RewardReader, model_of, reader_of
from memtrain.trainers.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True)
class RewardJudge:
    """A reward model with its own tokenizer and chat template."""

    scorer: RewardScorer
    reader: RewardReader
    settings: Settings
    pad_id: int
    max_length: int | None
    most_of: Callable[[int], int] = lambda count: count
    """Number of passes of the rank with most of them: where its weights are in shards, all ranks make as
    many."""

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        """The reward of each answer, read at its last token. Prompts are read once for their answers."""
        ids = [self._cut(*one) for one in self.reader.ids(answers)]
        order = sorted(range(len(ids)), key=lambda one: (-len(ids[one][0]) - len(ids[one][1]), one))
        if self.settings.shared_prompts:
            order = list(range(len(ids)))
        found = [0.0] * len(ids)
        batches = self._batches(order, ids)
        for some in batches:
            for answer, value in zip(some, self._asked([ids[one] for one in some]), strict=True):
                found[answer] = value
        for _ in range(self.most_of(len(batches)) - len(batches)):
            self._asked([((self.pad_id,), (self.pad_id,))])
        return found

    def _cut(self, prompt: Ids, completion: Ids) -> tuple[Ids, Ids]:
        """The same, cut at the beginning where they are too long."""
        if self.max_length is not None:
            completion = completion[-self.max_length :]
            room = self.max_length - len(completion)
            prompt = prompt[len(prompt) - room :] if room < len(prompt) else prompt
        if not completion:
            # An empty string without an end token: the score is that of the prompt's last token.
            prompt, completion = prompt[:-1], prompt[-1:]
        return prompt, completion

    def _batches(self, order: Sequence[int], ids: Sequence[tuple[Ids, Ids]]) -> list[list[int]]:
        made: list[list[int]] = [[]]
        longest = 0
        for one in order:
            longest = max(longest, sum(map(len, ids[one])))
            if made[-1] and (len(made[-1]) + 1) * longest > READ_TOKENS:
                made.append([])
                longest = sum(map(len, ids[one]))
            made[-1].append(one)
        return [some for some in made if some]

    def _asked(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[float]:
        groups: list[Group] = []
        for prompt, members in groupby(pairs, key=lambda pair: pair[0]):
            written = tuple(
                AnswerIds(np.array(ids, np.int32), np.ones(len(ids), np.bool_)) for _, ids in members
            )
            groups.append(Group(np.array(prompt, np.int32), written))
        batch = collate_answers(
            groups,
            [0.0] * len(pairs),
            None,
            is_shared=self.settings.shared_prompts,
            is_flat=self.settings.padding_free,
            pad_id=self.pad_id,
            by_row=self.settings.positions_by_row,
        ).to(local_device(self.settings))
        with torch.no_grad():
            return self.scorer(batch.micro_batch.model_inputs(), batch.last_A).cpu().tolist()


def load_reward_model(
    recipe: RewardModel,
    settings: Settings,
    *,
    model_type: str,
    lay: Callable[[nn.Module], None] = lambda scorer: None,
    ranks: Ranks | None = None,
) -> RewardJudge:
    """The reward model of a recipe: its own revision and precision, whatever the policy's are.

    Where its architecture is the policy's `model_type`, its rows lie as the policy's do; else padded. `lay`
    lays its weights over the `ranks`.
    Raises: LaunchError when there is no such model, or it is no reward model.
    """
    named = model_of(recipe)
    reader = reader_of(recipe)
    own = reader.tokenizer
    config = read_config(find_origin(recipe.path, recipe.revision))
    plain = reward_model_settings(
        settings,
        recipe.dtype,
        is_alike=config.model_type == model_type,
        follows_lengths=reached(length_rules(config.to_dict()), None, "row") is not None,
    )

    def made() -> RewardScorer:
        model = load_model(named, plain, seed=0, vocab_size=len(own), head="score", is_new=False)
        return RewardScorer(model.requires_grad_(False)).eval()

    scorer, _ = made_in_parts(plain, made)
    lay(scorer)
    in_step = ranks if shards_weights(plain) else None
    pad = own.pad_token_id
    return RewardJudge(
        scorer=scorer,
        reader=reader,
        settings=plain,
        pad_id=pad if isinstance(pad, int) else 0,
        max_length=recipe.max_length,
        most_of=(lambda count: count) if in_step is None else (lambda count: max(in_step.gather(count))),
    )
