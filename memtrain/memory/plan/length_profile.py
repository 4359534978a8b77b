"""The length profile of a dataset: number of sequences, their lengths, and the heaviest of them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate

from memtrain.memory.plan.prompt_groups import PromptGroups
from memtrain.recipes.sections.base import Section

NUM_LONGEST = 4096
"""Longest sequences that are remembered singly: more rows than a device takes at once."""


class LengthReport(Section):
    """Effects of truncation and packing on the rows: every loss is counted here."""

    num_rows: int
    """Rows of the data that training sees."""
    num_tokens: int
    """Tokens of these rows."""
    num_loss_tokens: int
    """Loss tokens of these rows (tokens that something predicts and the loss counts)."""
    rows_cut: int
    """Rows that lost tokens to truncation."""
    rows_dropped: int
    """Rows that are left out: longer than max_length (`drop`), or no loss token is left of them."""
    rows_split: int
    """Rows that go on in another sequence, whole."""
    pieces: int
    """Pieces that the rows were made into; equal to the rows where nothing is split or dropped."""
    tokens_cut: int
    """Tokens lost by cutting rows."""
    tokens_dropped: int
    """Tokens of the rows that are left out."""
    tokens_idle: int
    """Tokens of split-off pieces (`wrapped`: of sequences) that are left out as they have no loss token."""
    loss_tokens_cut: int
    """Loss tokens lost by cutting rows."""
    loss_tokens_dropped: int
    """Loss tokens of the rows that are left out."""
    num_sequences: int
    """Sequences that enter the model: packed rows, or pieces."""
    fill: float
    """Tokens kept, divided by the room of the packed sequences; 1 without packing."""
    loss_tokens_cut_by_answer: tuple[int, ...] = ()
    """Of rows with answers, `learnt_cut` for each of them: of chosen and of rejected ones."""

    @property
    def tokens_lost(self) -> int:
        """Tokens cut or dropped."""
        return self.tokens_cut + self.tokens_dropped

    @property
    def loss_tokens_lost(self) -> int:
        """Loss tokens cut or dropped."""
        return self.loss_tokens_cut + self.loss_tokens_dropped


class LengthProfile(Section):
    """The lengths of the sequences that enter the model."""

    report: LengthReport
    total_tokens: int
    """Tokens of all sequences."""
    longest: tuple[int, ...]
    """Tokens of the longest sequences, longest first, at most NUM_LONGEST of them."""
    longest_piece: int
    """Tokens of the longest piece within a sequence: attention never looks back further."""
    most_loss_tokens: tuple[int, ...] = ()
    """Loss tokens of the sequences that have most of them, most first; none where it is not known."""
    loss_token_share: float = 1.0
    """Highest share of loss tokens in a sequence."""
    rows_per_sequence: int = 1
    """Most rows of a sequence where rows are padded: as many as it has answers."""
    groups: PromptGroups | None = None
    """The completions of a prompt; None where rows are read, not written."""
    most_pieces: tuple[int, ...] = ()
    """Pieces that attention keeps apart, of the sequences that have most of them, most first: documents, or
    prompts and answers; none where every sequence is one."""
    attended_tokens: float = 0.0
    """Length of the piece that a token is in, mean over tokens, which is more than that of a mean piece: what
    attention takes time for. 0 where it is not known: every sequence is one piece, of mean length."""

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a sequence."""
        return self.total_tokens / max(1, self.report.num_sequences)

    def heaviest(self, rows: int, tokens: int | None) -> tuple[int, int]:
        """(sequences, tokens) of the heaviest micro-batch within the limits: a bound on every real one."""
        count = min(rows, self.report.num_sequences)
        taken = self.longest[:count]
        if self.groups is not None and self.groups.is_shared and count:
            groups = self.groups
            written = self.longest[: count * groups.written : groups.written]
            total = groups.most_tokens([length - groups.own_tokens for length in written], count)
        else:
            total = sum(taken)
            if len(taken) < count:
                total += (count - len(taken)) * taken[-1]
        if tokens is not None:
            total = max(min(total, tokens), self.longest[0])
        return count, total

    def most_scored(self, sequences: int, tokens: int) -> int:
        """Most loss tokens of a micro-batch of so many sequences and tokens: a bound on every real one."""
        most = min(tokens, math.ceil(self.loss_token_share * tokens))
        if len(self.most_loss_tokens) < min(sequences, self.report.num_sequences):
            return most
        return min(most, sum(self.most_loss_tokens[:sequences]))

    def most_segments(self, sequences: int, tokens: int | None) -> int:
        """Most pieces of a micro-batch of at most so many sequences, and of so many tokens where that is a
        limit: a bound on every real one."""
        count = min(sequences, self.report.num_sequences)
        if tokens is not None and len(self.longest) == self.report.num_sequences:
            count = min(count, max(1, bisect_right(_shortest_together(self.longest), tokens)))
        if self.groups is not None and self.groups.is_shared and count:
            return count + self.groups.most_prompts(count)
        pieces = self.most_pieces[:count]
        return sum(pieces) + (count - len(pieces)) * (pieces[-1] if pieces else 1)


@lru_cache(maxsize=4)
def _shortest_together(longest: tuple[int, ...]) -> list[int]:
    """Tokens of the last, of the last two, and so on: a search asks for them thousands of times."""
    return list(accumulate(reversed(longest)))


def joined_profile(profiles: Sequence[LengthProfile]) -> LengthProfile:
    """Several epochs as one: the rows of the first, and the heaviest batch of any."""
    first = profiles[0]
    return first.model_copy(
        update={
            "longest": longest_first(length for one in profiles for length in one.longest),
            "longest_piece": max(one.longest_piece for one in profiles),
            "most_loss_tokens": longest_first(length for one in profiles for length in one.most_loss_tokens),
            "loss_token_share": max(one.loss_token_share for one in profiles),
            "rows_per_sequence": max(one.rows_per_sequence for one in profiles),
            "most_pieces": longest_first(count for one in profiles for count in one.most_pieces),
        }
    )


def summed_report(reports: Sequence[LengthReport]) -> LengthReport:
    """Losses of several parts of a split together; `fill` is that of all their sequences."""
    counts = {
        name: sum(getattr(one, name) for one in reports)
        for name, field in LengthReport.model_fields.items()
        if field.annotation is int
    }
    kept = [one.num_tokens - one.tokens_lost - one.tokens_idle for one in reports]
    room = sum(tokens / one.fill for tokens, one in zip(kept, reports, strict=True) if one.fill)
    by_answer = zip(*(one.loss_tokens_cut_by_answer for one in reports), strict=True)
    return reports[0].model_copy(
        update={
            **counts,
            "fill": sum(kept) / room if room else 1.0,
            "loss_tokens_cut_by_answer": tuple(map(sum, by_answer)),
        }
    )


def longest_first(lengths: Iterable[int]) -> tuple[int, ...]:
    """The NUM_LONGEST longest, longest first."""
    return tuple(sorted((int(length) for length in lengths), reverse=True)[:NUM_LONGEST])


def by_answer_words(loss_tokens: Sequence[int]) -> str:
    """Loss tokens of chosen and of rejected answers, in words; empty where rows have no two answers, or no
    token is lost."""
    return (
        f": {loss_tokens[0]:,} of chosen, {loss_tokens[1]:,} of rejected answers"
        if len(loss_tokens) == 2 and any(loss_tokens)
        else ""
    )
