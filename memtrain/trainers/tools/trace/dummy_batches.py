"""The heaviest batch of each method, without content, for the trace of its step."""

# K answers of an item, A answers, N loss tokens

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.trainers.batches.answer_batch import Answer, AnswerBatch, Group, collate_answers
from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.batches.collate import MicroBatch, Piece, TokenFeed, lay_end_to_end, pad_right
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.batches.taught_batches import TaughtBatch, TaughtFeed, taught
from memtrain.trainers.losses.distill.teachers import TopKTeacher
from memtrain.trainers.losses.policy.registry import Norms
from memtrain.trainers.online.rollout.rollout_batches import PolicyMicro

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of a made-batch."""

    recipe: Recipe
    settings: Settings


def token_micro_batch(subject: Subject, batch: HeaviestBatch) -> MicroBatch:
    """Rows of zeros laid out like `batch`; the last `scored_tokens` of them are learnt."""
    is_packed = subject.settings.padding_free and batch.num_segments > batch.rows
    lengths = _evenly(batch.tokens, batch.num_segments) if is_packed else spread(batch)
    masks = _loss_tokens(lengths, batch.scored_tokens, first=1)
    pieces = [Piece(np.zeros(n, np.int32), mask) for n, mask in zip(lengths, masks, strict=True)]
    settings = subject.settings
    lay = lay_end_to_end if settings.padding_free else pad_right
    return lay(pieces, pad_id=0, multiple=settings.pad_to_multiple_of)


def taught_micro_batch(subject: Subject, batch: HeaviestBatch) -> TaughtBatch:
    """The same with a teacher's likeliest tokens, where they come from a file."""
    rows, kept = token_micro_batch(subject, batch), subject.settings.teacher_top_k
    if not kept:
        return taught(rows, None)
    count = rows.num_loss_tokens
    ids = torch.arange(kept, dtype=torch.int32).repeat(count, 1)
    return taught(rows, TopKTeacher(ids, torch.zeros(count, kept), torch.zeros(count)))


def answer_micro_batch(subject: Subject, batch: HeaviestBatch) -> AnswerBatch:
    """Items of one answer (KTO) or two, every prompt one token long; the last `scored_tokens` are learnt."""
    return _answers(subject, batch, num_answers=METHODS[subject.recipe.method].num_answers)


def policy_micro_batch(subject: Subject, batch: HeaviestBatch) -> PolicyMicro:
    """Groups of completions, or pairs of them, with the numbers that the loss of the method reads."""
    section, method = subject.recipe.online, METHODS[subject.recipe.method]
    assert section is not None, "These methods write completions."
    needs = section.needs
    num_of_prompt = 2 if method.in_pairs else subject.recipe.generation.num_generations
    answers = _answers(subject, batch, num_answers=num_of_prompt)
    num_answers, num_tokens = len(answers.lengths_A), answers.micro_batch.num_loss_tokens

    def numbers(is_there: bool) -> torch.Tensor | None:
        return torch.zeros(num_tokens) if is_there else None

    is_masked = needs.top_entropy_fraction is not None
    return PolicyMicro(
        answers=answers,
        advantage_A=torch.ones(num_answers),
        sampler_N=torch.zeros(num_tokens),
        old_N=numbers(needs.old),
        reference_N=numbers(needs.reference),
        is_kept_N=torch.ones(num_tokens, dtype=torch.bool) if is_masked else None,
        norms=Norms(
            num_answers=num_answers,
            num_tokens=num_tokens,
            rollout_tokens=num_tokens,
            max_tokens=subject.recipe.generation.max_tokens,
            kept_tokens=num_tokens if is_masked else None,
        ),
        value_N=numbers(needs.values),
        token_advantage_N=numbers(method.has_value),
        return_N=numbers(method.has_value),
    )


def reward_model_micro_batch(subject: Subject, batch: HeaviestBatch) -> AnswerBatch:
    """Completions that a reward model reads, every prompt one token long."""
    return _answers(subject, batch, num_answers=1)


DUMMIES: dict[Any, Callable[[Subject, HeaviestBatch], Any]] = {
    TokenFeed: token_micro_batch,
    TaughtFeed: taught_micro_batch,
    AnswerFeed: answer_micro_batch,
    PromptFeed: policy_micro_batch,
}
"""Makers of a method's made-batch, by the feed that its module names."""


@dataclass(frozen=True, slots=True)
class DummyFeed:
    """The part of a feed that a method reads before a step: each made-batch is one sequence."""

    made: Any

    @property
    def weights(self) -> Ints:
        """Items of each sequence: the single sequence's, for all."""
        return np.full(2, self.made.num_loss_tokens, np.int64)

    @property
    def num_items(self) -> int:
        """Items of all sequences."""
        return 2 * self.made.num_loss_tokens

    @property
    def prompts_of_items(self) -> Ints:
        """Number of each item's prompt: all differ."""
        return np.arange(self.num_items)

    def micro_batch(self, sequences: Ints) -> Any:
        """The made-batch itself, whichever is asked for."""
        return self.made

    def items_of(self, sequences: Ints) -> Ints:
        """Numbers of the items of some sequences."""
        per = self.made.num_loss_tokens
        return np.concatenate([np.arange(one * per, (one + 1) * per) for one in sequences.tolist()])

    def loss_tokens_of(self, sequences: Ints, answer: int) -> int:
        """Loss tokens of the n-th answers, roughly."""
        return self.made.micro_batch.num_loss_tokens // 2 * len(sequences)

    def mismatched(self, items: Ints, partners: Ints, *, is_trial: bool = False) -> Any:
        """Prompts with answers of others: as heavy as with their own, in a trial too."""
        return self.made


def spread(batch: HeaviestBatch) -> list[int]:
    """Lengths of `rows` sequences, `longest` among them, that sum to `tokens`."""
    if batch.rows == 1:
        return [batch.tokens]
    rest, rows = batch.tokens - batch.longest, batch.rows - 1
    base, extra = divmod(max(rest, rows), rows)
    return [batch.longest, *(base + (row < extra) for row in range(rows))]


def _evenly(tokens: int, parts: int) -> list[int]:
    """Lengths of `parts` sequences that sum to `tokens`."""
    base, extra = divmod(tokens, parts)
    return [base + (part < extra) for part in range(parts)]


def _loss_tokens(lengths: Sequence[int], scored_tokens: int, *, first: int = 0) -> list[NDArray[np.bool_]]:
    """Masks of the last tokens of sequences from token number `first`: `scored_tokens` in all, where there
    are enough."""
    masks: list[NDArray[np.bool_]] = []
    for length in lengths:
        loss_tokens = min(length - first, scored_tokens)
        scored_tokens -= loss_tokens
        masks.append(np.arange(length) >= length - loss_tokens)
    return masks


def _answers(subject: Subject, batch: HeaviestBatch, *, num_answers: int) -> AnswerBatch:
    settings = subject.settings
    num_items = max(1, batch.rows // num_answers)
    rows = num_items * num_answers
    if settings.shared_prompts:
        lengths = _evenly(max(batch.tokens - num_items, rows), rows)
    else:
        lengths = [length - 1 for length in spread(batch._replace(rows=rows))]
    lengths = [max(1, length) for length in lengths]
    masks = _loss_tokens(lengths, batch.scored_tokens or batch.tokens)
    answers = [Answer(np.zeros(n, np.int32), mask) for n, mask in zip(lengths, masks, strict=True)]
    prompt = np.zeros(1, np.int32)
    groups = [
        Group(prompt, tuple(answers[item * num_answers : (item + 1) * num_answers]))
        for item in range(num_items)
    ]
    is_precomputed = settings.reference == "precomputed"
    return collate_answers(
        groups,
        [1.0] * num_items,
        [0.0] * rows if is_precomputed else None,
        is_shared=settings.shared_prompts,
        is_flat=settings.padding_free,
        pad_id=0,
        multiple=settings.pad_to_multiple_of,
    )
