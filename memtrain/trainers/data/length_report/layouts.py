"""Counted rows as the sequences of a run, by the code that training lays them out with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from memtrain.memory.plan.length_profile import LengthProfile, LengthReport
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.length import Length, limits_of, truncations
from memtrain.trainers.data.length_report.counts import Counts
from memtrain.trainers.data.length_report.result import PackingKind
from memtrain.trainers.data.packing.answer_rows import AnswerSequences, lay_out_answers
from memtrain.trainers.data.packing.token_rows import Sequences, count_loss_tokens, lay_out
from memtrain.trainers.data.store.token_store import TokenStore

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Padded:
    """Items as a padded micro-batch takes them: `slots` rows each, as wide as the longest of the batch."""

    widest_I: Ints
    """Tokens of the longest row of each item."""
    real_I: Ints
    """Tokens of all its rows."""
    slots: int


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Rows at one max_length."""

    report: LengthReport
    profile: LengthProfile | None
    """Profile for the planner; None where it plans nothing from these rows."""
    tokens: Ints
    """Tokens of each sequence."""
    padded: Padded
    lost_R: Ints
    """Loss tokens lost of each counted row (of prompts: tokens), as often as the row is in an epoch."""
    held_R: Ints
    """Lengths before truncation: the field of `Laying`."""


class RowLayout(Protocol):
    """Rows of one kind of method."""

    packings: tuple[PackingKind, ...]
    truncations: tuple[str, ...]
    """The ways to truncate, the method's default first."""
    held_R: Ints
    """Loss tokens of each counted row (of prompts: tokens), as often as the row is in an epoch."""

    @property
    def longest_of_rows(self) -> Ints:
        """Length that is compared with max_length, for each row of an epoch."""
        ...

    def at(self, length: Length) -> LaidOut:
        """The rows of an epoch, laid out as a `length:` section says."""
        ...


class TokenRows:
    """Rows that are trained on whole: supervised fine-tuning."""

    packings: tuple[PackingKind, ...] = ("bfd", "bfd_split", "wrapped")
    truncations: tuple[str, ...] = truncations(has_prompts=False)

    def __init__(self, counts: Counts, rows: Ints) -> None:
        self.rows, self.lengths, self.spans = rows, counts.lengths, counts.spans
        nowhere = np.zeros_like(rows)
        loss_tokens = count_loss_tokens(self.spans, rows, nowhere, self.lengths[rows])
        self.held_R = sums(rows, loss_tokens, counts.num_rows)

    @property
    def longest_of_rows(self) -> Ints:
        """Tokens of each row of an epoch."""
        return self.lengths[self.rows]

    def at(self, length: Length) -> LaidOut:
        """The rows of an epoch, truncated or packed."""
        laid: Sequences = lay_out(self.lengths, self.spans, self.rows, limits_of(length, has_prompts=False))
        kept = sums(laid.row, laid.loss_tokens, len(self.held_R)) if length.packing == "none" else self.held_R
        return LaidOut(
            report=laid.profile.report,
            profile=laid.profile,
            tokens=laid.tokens,
            padded=Padded(laid.tokens, laid.tokens, 1),
            lost_R=self.held_R - kept,
            held_R=self.held_R,
        )


class AnswerRows:
    """Prompts with one or two answers: preference methods. Where the back end computes prompts once."""

    packings: tuple[PackingKind, ...] = ()
    truncations: tuple[str, ...] = truncations(has_prompts=True)

    def __init__(self, counts: Counts, rows: Ints) -> None:
        self.store, self.rows = CountedRows(counts), rows
        whole = self.at(Length(max_length=None))
        self.held_R = whole.held_R

    @property
    def longest_of_rows(self) -> Ints:
        """Tokens of each prompt with its longer answer."""
        parts = self.store.part_lengths[self.rows]
        return parts[:, 0] + parts[:, 1:].max(axis=1)

    def at(self, length: Length) -> LaidOut:
        """The rows of an epoch, truncated; each a sequence of its own."""
        alone = replace(limits_of(length, has_prompts=True), group_prompts=False)
        laid: AnswerSequences = lay_out_answers(
            cast(TokenStore, self.store), self.rows, alone, is_shared=length.shared_prompts is not False
        )
        kept = sums(laid.row, laid.loss_tokens.sum(axis=1), self.store.num_rows)
        held = kept if length.max_length is None else self.held_R
        return LaidOut(
            report=laid.profile.report,
            profile=laid.profile,
            tokens=laid.tokens,
            padded=Padded(
                widest_I=laid.prompt + laid.answer.max(axis=1, initial=0),
                real_I=laid.prompt * laid.num_answers + laid.answer.sum(axis=1),
                slots=laid.num_answers,
            ),
            lost_R=held - kept,
            held_R=held,
        )


class PromptRows:
    """Prompts alone, for methods that write the answers themselves: max_length is the limit of the prompt."""

    packings: tuple[PackingKind, ...] = ()
    truncations: tuple[str, ...] = truncations(has_prompts=True)

    def __init__(self, counts: Counts, rows: Ints) -> None:
        self.rows, self.lengths = rows, counts.lengths
        self.held_R = sums(rows, self.lengths[rows], counts.num_rows)

    @property
    def longest_of_rows(self) -> Ints:
        """Tokens of each prompt of an epoch."""
        return self.lengths[self.rows]

    def at(self, length: Length) -> LaidOut:
        """The prompts of an epoch within a limit."""
        whole = self.longest_of_rows
        limit = length.max_length or int(whole.max(initial=1))
        drops = length.truncation == "drop"
        kept = np.where(whole > limit, 0 if drops else limit, whole)
        longer, lost = int((whole > limit).sum()), int((whole - kept).sum())
        tokens = kept[kept > 0]
        report = LengthReport(
            num_rows=len(whole),
            num_tokens=int(whole.sum()),
            num_loss_tokens=0,
            rows_cut=0 if drops else longer,
            rows_dropped=longer if drops else 0,
            rows_split=0,
            pieces=len(tokens),
            tokens_cut=0 if drops else lost,
            tokens_dropped=lost if drops else 0,
            tokens_idle=0,
            loss_tokens_cut=0,
            loss_tokens_dropped=0,
            num_sequences=len(tokens),
            fill=1.0,
        )
        held = self.held_R
        return LaidOut(
            report=report,
            profile=None,
            tokens=tokens,
            padded=Padded(tokens, tokens, 1),
            lost_R=sums(self.rows, whole - kept, len(held)),
            held_R=held,
        )


class CountedRows:
    """Counts that stand in for a token store where answers are laid out.

    The ids are made up, and as equal as the real ones: those of a prompt and of what both answers begin with
    are 0, those of the rest of the second answer are 1.
    """

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self.num_rows = counts.num_rows
        spans = counts.spans
        self.span_ptr, self.span_starts, self.span_ends = spans.ptr, spans.starts, spans.ends

    @cached_property
    def part_lengths(self) -> Ints:
        """int64 [R, P]: tokens of each part of each row."""
        return self.counts.part_tokens_RP.astype(np.int64)

    def row(self, i: int) -> NDArray[np.int32]:
        """Made-up ids of a pair."""
        prompt, chosen, rejected = self.part_lengths[i].tolist()
        ids = np.zeros(prompt + chosen + rejected, np.int32)
        ids[prompt + chosen + int(self.counts.alike_R[i]) :] = 1
        return ids


def sums(rows: Ints, values: Ints, num_rows: int) -> Ints:
    """int64 [R]: the values of each row put together."""
    return np.bincount(rows, weights=values, minlength=num_rows).astype(np.int64)


def row_layout_of(method: str, counts: Counts, rows: Ints) -> RowLayout:
    """The rows as a method lays them out."""
    return ROW_LAYOUTS[method](counts, rows)


ROW_LAYOUTS: dict[str, type[TokenRows] | type[AnswerRows] | type[PromptRows]] = {
    name: PromptRows if method.is_online else AnswerRows if method.num_answers else TokenRows
    for name, method in METHODS.items()
}
"""Layouts of the rows as sequences, by method."""
