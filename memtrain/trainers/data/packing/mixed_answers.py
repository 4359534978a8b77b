"""Prompts with the answers of other rows, as KTO's baseline reads them, and the heaviest of an evaluation.

No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from memtrain.memory.plan.heaviest_batch import MixedRows
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.data.packing.answer_rows import AnswerSequences
from memtrain.trainers.data.packing.epochs import joined, of_epoch
from memtrain.trainers.data.packing.step_order import longest_first_order, micro_batches
from memtrain.trainers.data.store.token_store import TokenStore

Ints = NDArray[np.int64]

MOST_SHIFTS = 64
"""Places that are tried for partners of other prompts. Taste: few steps hold more rows of one prompt."""


def partners(items: Ints, prompts: Ints, *, least: int, num_items: int) -> Ints:
    """For each item of a step, in the step's order, the item whose answer it is mismatched with.

    The one `least` before it in the step, the last for the first: every answer stands once, as among the
    matched. Where a prompt would meet an answer to itself, all partners are further places before, the first
    at which none does, or fewest do. A step too small for that takes its partners from all `num_items` items
    in the same way. `prompts`: [I] number of each item's prompt.
    """
    if len(items) > least:
        shifts = range(least, min(len(items), least + MOST_SHIFTS))
        return _least_alike(items, prompts, (np.roll(items, shift) for shift in shifts))
    shifts = range(least, min(max(num_items, least + 1), least + MOST_SHIFTS))
    return _least_alike(items, prompts, ((items - shift) % num_items for shift in shifts))


def _least_alike(items: Ints, prompts: Ints, candidates: Iterable[Ints]) -> Ints:
    """The first of the candidates in which fewest items meet an answer to their own prompt."""
    best, fewest = items, len(items) + 1
    for found in candidates:
        count = int((prompts[items] == prompts[found]).sum())
        if count < fewest:
            best, fewest = found, count
        if not count:
            break
    return best


@dataclass(frozen=True, slots=True)
class MixedAnswers:
    """The rows of an evaluation, each prompt with the answer of its partner."""

    sequences: AnswerSequences
    set_ptr: Ints
    """[E + 1] where the sequences of each evaluation set begin."""
    prompts: Ints
    """[I] number of each item's prompt."""
    found: dict[tuple[int, int | None, int, bool], MixedRows] = field(
        default_factory=dict[tuple[int, int | None, int, bool], MixedRows]
    )
    """Answers by what decides on micro-batches: a search asks thousands of times."""

    def heaviest(self, settings: Settings) -> MixedRows:
        """Rows, tokens and longest row of the heaviest micro-batch, and the most scored tokens of any."""
        rows, tokens = settings.micro_batch_size, settings.micro_tokens
        key = rows, tokens, settings.num_replicas, settings.padding_free
        if key not in self.found:
            every = [one for number in range(len(self.set_ptr) - 1) for one in self._of_set(number, settings)]
            heaviest = max(every, key=lambda one: one.num_tokens(padding_free=settings.padding_free))
            self.found[key] = heaviest._replace(scored_tokens=max(one.scored_tokens for one in every))
        return self.found[key]

    def _of_set(self, number: int, settings: Settings) -> list[MixedRows]:
        """The micro-batches of an evaluation set, in the order that a run takes them."""
        held, (first, end) = self.sequences, of_epoch(self.set_ptr, number)
        order = first + longest_first_order(held.tokens[first:end])
        dealt = micro_batches(
            order,
            held.tokens,
            num_ranks=settings.num_replicas,
            micro_batch_size=settings.micro_batch_size,
            micro_tokens=settings.micro_tokens,
        )
        items = self._items_of(order)
        least = int(held.weights[order].max(initial=1))
        matched = partners(items, self.prompts, least=least, num_items=len(held.row))
        partner = np.zeros(len(held.row), np.int64)
        partner[items] = matched
        made = (self._items_of(one) for of_rank in dealt for one in of_rank if len(one))
        return [self._rows(own, partner[own]) for own in made]

    def _items_of(self, sequences: Ints) -> Ints:
        ptr = self.sequences.item_ptr
        return np.concatenate([np.arange(int(ptr[one]), int(ptr[one + 1])) for one in sequences.tolist()])

    def _rows(self, items: Ints, matched: Ints) -> MixedRows:
        held = self.sequences
        tokens = held.prompt[items] + held.answer[matched, 0]
        scored = held.loss_tokens[matched, 0]
        return MixedRows(len(items), int(tokens.sum()), int(tokens.max()), int(scored.sum()))


def mixed_answers(store: TokenStore, sets: Sequence[AnswerSequences]) -> MixedAnswers:
    """The rows of the evaluation sets of a store, one set after the other."""
    assert store.prompts is not None, "Rows with answers have prompts."
    sequences = joined(sets)
    prompts = np.unique(store.prompts[sequences.row], return_inverse=True)[1].astype(np.int64)
    return MixedAnswers(sequences, np.cumsum([0, *map(len, sets)]).astype(np.int64), prompts)
