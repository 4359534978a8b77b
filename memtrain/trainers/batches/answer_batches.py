"""Prompts with answers as a feed: pairs for DPO and reward models, single answers for KTO."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memtrain.trainers.batches.answer_batch import Answer, AnswerBatch, Group, collate_answers
from memtrain.trainers.batches.split_rows import SplitRows
from memtrain.trainers.data.packing.answer_rows import AnswerSequences, lay_out_answers
from memtrain.trainers.protocols.events import DataEvent

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class AnswerFeed:
    """Rows of a prompt with one or two answers: sequence s weighs its items (pairs, or single answers).

    I items of K answers each.
    """

    def __init__(self, split: SplitRows) -> None:
        self.split, self.store, self.settings, self.pad_id = split, split.store, split.settings, split.pad_id
        limits, is_shared = self.settings.row_limits, self.settings.shared_prompts
        self.sequences: AnswerSequences
        self.sequences, self.epoch_ptr = split.laid(
            lambda rows: lay_out_answers(self.store, rows, limits, is_shared=is_shared), len
        )
        self.reference_IK: Floats | None = None
        """Log-probs of the reference, once they are computed before training."""
        self.reference_of_mismatched: dict[tuple[int, int], float] | None = None
        """The same for (item of the prompt, item of the answer)."""

    @property
    def tokens(self) -> Ints:
        """Tokens of each sequence."""
        return self.sequences.tokens

    @property
    def weights(self) -> Ints:
        """Items of each sequence."""
        return self.sequences.weights

    @cached_property
    def loss_tokens(self) -> Ints:
        """Loss tokens of each sequence."""
        held = self.sequences
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(held.loss_tokens.sum(axis=1))])
        return np.diff(sums[held.item_ptr])

    @property
    def num_items(self) -> int:
        """Items of all sequences."""
        return len(self.sequences.row)

    @cached_property
    def prompts_of_items(self) -> Ints:
        """[I] number of each item's prompt: equal where prompts are."""
        hashes = self.store.prompts
        assert hashes is not None, "Rows with answers have prompts."
        return np.unique(hashes[self.sequences.row], return_inverse=True)[1].astype(np.int64)

    def items_of(self, sequences: Ints) -> Ints:
        """Numbers of the items of some sequences, in their order."""
        ptr = self.sequences.item_ptr
        spans = [np.arange(int(ptr[one]), int(ptr[one + 1])) for one in sequences.tolist()]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def loss_tokens_of(self, sequences: Ints, answer: int) -> int:
        """Loss tokens of the n-th answers of some sequences."""
        return int(self.sequences.loss_tokens[self.items_of(sequences), answer].sum())

    def micro_batch(self, sequences: Ints) -> AnswerBatch:
        """The sequences' prompts with their own answers."""
        items = self.items_of(sequences)
        ptr = self.sequences.item_ptr
        groups = [
            Group(self.prompt(int(ptr[one])), self._answers(range(int(ptr[one]), int(ptr[one + 1]))))
            for one in sequences.tolist()
        ]
        reference = None if self.reference_IK is None else self.reference_IK[items].reshape(-1).tolist()
        labels = self.store.labels[self.sequences.row[items]].tolist()
        return self._collated(groups, labels, reference)

    def mismatched(self, items: Ints, partners: Ints, *, is_trial: bool = False) -> AnswerBatch:
        """The prompts of `items`, each with the first answer of its partner item.

        The reference was asked for the pairs of every step; of others (`is_trial`) its log-prob counts as 0.
        """
        pairs = list(zip(items.tolist(), partners.tolist(), strict=True))
        groups = [Group(self.prompt(item), self._answers((partner,), of=1)) for item, partner in pairs]
        known = self.reference_of_mismatched
        reference = None
        if known is not None:
            reference = [known.get(pair, 0.0) if is_trial else known[pair] for pair in pairs]
        return self._collated(groups, [0.0] * len(groups), reference)

    def prompt(self, item: int) -> NDArray[np.int32]:
        """Tokens of the prompt of one item, as far as it is kept."""
        start = int(self.sequences.prompt_start[item])
        return self.store.row(int(self.sequences.row[item]))[start : start + int(self.sequences.prompt[item])]

    def whole_rows(self, item: int) -> list[NDArray[np.int32]]:
        """The tokens of the prompt of one item with each of its answers, as far as they are kept."""
        prompt = self.prompt(item)
        return [np.concatenate([prompt, answer.ids]) for answer in self._answers((item,))]

    def sample_prompt(self) -> Tensor:
        """int64 [T], the prompt of the shortest sequence, or a stand-in."""
        item = int(self.sequences.item_ptr[int(self.tokens.argmin())])
        ids = self.prompt(item)
        if not len(ids):
            ids = self._answers((item,), of=1)[0].ids[:1]
        return torch.from_numpy(ids.astype(np.int64))

    def made_of(self) -> dict[str, Any]:
        """Properties of the sequences: equal where all of the sequences are equal."""
        return {
            "store": self.store.folder.name,
            "rows": hashlib.sha256(self.sequences.row.tobytes()).hexdigest(),
            "length": asdict(self.settings.row_limits),
        }

    def data_event(self, split: str) -> DataEvent:
        """Effects of truncation on the rows."""
        return self.split.data_event(split, self.sequences.profile.report)

    def _collated(
        self, groups: list[Group], labels: list[float], reference: list[float] | None
    ) -> AnswerBatch:
        return collate_answers(
            groups,
            labels,
            reference,
            is_shared=self.settings.shared_prompts,
            is_flat=self.settings.padding_free,
            pad_id=self.pad_id,
            multiple=self.settings.pad_to_multiple_of,
            by_row=self.settings.positions_by_row,
        )

    def _answers(self, items: Sequence[int], *, of: int | None = None) -> tuple[Answer, ...]:
        """The (first `of`) answers of some items, item after item."""
        held = self.sequences
        made: list[Answer] = []
        for item in items:
            row = int(held.row[item])
            ids, mask = self.store.row(row), self.store.loss_mask(row)
            for k in range(of or held.num_answers):
                start = int(held.answer_start[item, k])
                end = start + int(held.answer[item, k])
                made.append(Answer(ids[start:end], mask[start:end]))
        return tuple(made)
