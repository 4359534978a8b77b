"""Prompts with their answers as sequences: truncated, grouped by prompt, counted. An index plan and no copy.

An item is a row of the store: a prompt with two answers (a pair) or with one. Its answers are never parted:
an item of which one answer has nothing left to learn is left out whole, and counted. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memtrain.memory.plan.length_profile import NUM_LONGEST, LengthProfile, LengthReport, longest_first
from memtrain.recipes.sections.length import RowLimits
from memtrain.trainers.data.packing.token_rows import Spans, count_loss_tokens, highest_share
from memtrain.trainers.data.store.token_store import TokenStore

Ints = NDArray[np.int64]

MOST_IN_A_GROUP = 8
"""Items of one prompt that share a sequence. Taste: the prompt's share of the work is small by then."""


@dataclass(frozen=True, slots=True)
class AnswerSequences:
    """Sequences of the model: sequence s is the items `item_ptr[s]:item_ptr[s + 1]`, which share a prompt.

    I items of K answers each.
    """

    row: Ints
    """[I] row of each item in the store."""
    prompt_start: Ints
    """[I] first token of the prompt that is kept."""
    prompt: Ints
    """[I] tokens of the prompt that are kept; 0 where answers have none."""
    answer_start: Ints
    """[I, K] first token of each answer, counted in its row."""
    answer: Ints
    """[I, K] tokens of each answer that are kept: its first ones."""
    loss_tokens: Ints
    """[I, K] loss tokens of each answer."""
    item_ptr: Ints
    tokens: Ints
    """Tokens of each sequence, each prompt counted once (or once for each answer, where it is not shared)."""
    weights: Ints
    """Items of each sequence."""
    profile: LengthProfile

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_answers(self) -> int:
        """Answers of an item."""
        return self.answer.shape[1]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Tokens of prompts and answers after truncation."""

    prompt_start: Ints
    prompt: Ints
    answer: Ints
    fits: NDArray[np.bool_]
    """Whether there is room for the item at all."""


def lay_out_answers(store: TokenStore, rows: Ints, length: RowLimits, *, is_shared: bool) -> AnswerSequences:
    """Truncate `rows` of a store as `length` says, and group them by prompt.

    A pure function: the launcher and every rank make the same.
    """
    parts = store.part_lengths[rows]
    whole_prompt, whole = parts[:, 0], parts[:, 1:]
    starts = whole_prompt[:, None] + np.cumsum(whole, axis=1) - whole
    kept = truncated(whole_prompt, whole, length)
    spans = Spans(store.span_ptr, store.span_starts, store.span_ends)
    loss_tokens_whole = _loss_tokens(spans, rows, starts, whole, whole_prompt)
    loss_tokens = _loss_tokens(spans, rows, starts, kept.answer, whole_prompt)
    stays = kept.fits & (loss_tokens.min(axis=1) > 0)
    stays &= ~_became_alike(store, rows, starts, kept.answer, (kept.answer < whole).any(axis=1) & stays)
    report = _report(whole_prompt, whole, kept, loss_tokens_whole, loss_tokens, stays)
    at = np.flatnonzero(stays)
    order, item_ptr = _grouped(store, rows[at], kept.prompt_start[at], kept.prompt[at], length.group_prompts)
    at = at[order]
    prompt, answer = kept.prompt[at], kept.answer[at]
    tokens = _tokens(prompt, answer, item_ptr, is_shared=is_shared)
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(loss_tokens[at].sum(axis=1))])
    loss_tokens_each = np.diff(sums[item_ptr])
    # A prompt that is shared is a piece of its own.
    pieces = np.diff(item_ptr) * whole.shape[1] + is_shared
    longest_row = int((prompt + answer.max(axis=1)).max(initial=0)) if len(at) else 0
    return AnswerSequences(
        row=rows[at],
        prompt_start=kept.prompt_start[at],
        prompt=prompt,
        answer_start=starts[at],
        answer=answer,
        loss_tokens=loss_tokens[at],
        item_ptr=item_ptr,
        tokens=tokens,
        weights=np.diff(item_ptr),
        profile=LengthProfile(
            report=report.model_copy(update={"num_sequences": len(tokens)}),
            total_tokens=int(tokens.sum()),
            longest=longest_first(np.sort(tokens)[::-1][:NUM_LONGEST]),
            longest_piece=longest_row,
            most_loss_tokens=longest_first(np.sort(loss_tokens_each)[::-1][:NUM_LONGEST]),
            loss_token_share=highest_share(loss_tokens_each, tokens),
            rows_per_sequence=int(np.diff(item_ptr).max(initial=1)) * whole.shape[1],
            most_pieces=longest_first(np.sort(pieces)[::-1][:NUM_LONGEST]),
            attended_tokens=_squares(prompt, answer, item_ptr, is_shared=is_shared) / max(1, tokens.sum()),
        ),
    )


def truncated(prompt: Ints, answer: Ints, length: RowLimits) -> _Kept:
    """Prompts [I] and answers [I, K] within the limits, answers whole where that can be.

    `keep_end`: a prompt gives way to its longest answer, from its beginning, down
    to one token; then the answer loses its end. `keep_start`: answers lose their ends, and an item whose
    prompt leaves no room has none. `drop`: an item over a limit has no room.
    """
    short_prompt = _at_most(prompt, length.max_prompt)
    short = _at_most(answer, length.max_completion)
    limit = length.max_length
    if length.truncation == "drop":
        fits = (short_prompt == prompt) & (short == answer).all(axis=1)
        if limit is not None:
            fits &= prompt + answer.max(axis=1) <= limit
        return _Kept(np.zeros_like(prompt), prompt, answer, fits)
    fits = np.ones(len(prompt), np.bool_)
    keeps_start = length.truncation == "keep_start"
    if limit is not None:
        if not keeps_start:
            room = np.maximum(limit - short.max(axis=1), 1)
            short_prompt = np.minimum(short_prompt, room)
        short = np.minimum(short, (limit - short_prompt).clip(0)[:, None])
        fits = short.min(axis=1) > 0
    start = np.zeros_like(prompt) if keeps_start else prompt - short_prompt
    return _Kept(start, short_prompt, short, fits)


def _at_most(tokens: Ints, limit: int | None) -> Ints:
    return tokens if limit is None else np.minimum(tokens, limit)


def _loss_tokens(spans: Spans, rows: Ints, starts: Ints, kept: Ints, prompt: Ints) -> Ints:
    """[I, K] loss tokens of each answer; the first one counts where a prompt predicts it."""
    before = (prompt > 0).astype(np.int64)
    columns = [
        count_loss_tokens(spans, rows, starts[:, k] - before, kept[:, k] + before)
        for k in range(kept.shape[1])
    ]
    return np.stack(columns, axis=1)


def _became_alike(
    store: TokenStore, rows: Ints, starts: Ints, kept: Ints, is_cut: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Mask of the cut pairs that have two equal answers left: they prefer nothing any more."""
    alike = np.zeros(len(rows), np.bool_)
    if kept.shape[1] < 2:
        return alike
    for i in np.flatnonzero(is_cut & (kept[:, 0] == kept[:, 1])).tolist():
        ids = store.row(int(rows[i]))
        one, other = (ids[start : start + kept[i, 0]] for start in starts[i].tolist())
        alike[i] = bool((one == other).all())
    return alike


def _grouped(store: TokenStore, rows: Ints, start: Ints, prompt: Ints, by_prompt: bool) -> tuple[Ints, Ints]:
    """(order of the items, item_ptr): one item a sequence, or several with the same prompt."""
    count = len(rows)
    if not by_prompt:
        return np.arange(count), np.arange(count + 1)
    groups: dict[bytes | int, list[int]] = {}
    closed: list[list[int]] = []
    for i, (row, first, size) in enumerate(zip(rows.tolist(), start.tolist(), prompt.tolist(), strict=True)):
        key = store.row(row)[first : first + size].tobytes() if size else i
        group = groups.setdefault(key, [])
        if not group:
            closed.append(group)
        group.append(i)
        if len(group) == MOST_IN_A_GROUP:
            del groups[key]
    order = np.array([i for group in closed for i in group], np.int64)
    return order, np.cumsum([0, *(len(group) for group in closed)]).astype(np.int64)


def _tokens(prompt: Ints, answer: Ints, item_ptr: Ints, *, is_shared: bool) -> Ints:
    if not len(prompt):
        return np.zeros(0, np.int64)
    answers = np.add.reduceat(answer.sum(axis=1), item_ptr[:-1])
    if is_shared:
        return answers + prompt[item_ptr[:-1]]
    return answers + np.add.reduceat(prompt * answer.shape[1], item_ptr[:-1])


def _squares(prompt: Ints, answer: Ints, item_ptr: Ints, *, is_shared: bool) -> float:
    """Sum of the squared lengths of rows; of a prompt that is shared its own square is there once."""
    whole = ((prompt[:, None] + answer) ** 2).sum()
    if not is_shared:
        return float(whole)
    return float(whole - answer.shape[1] * (prompt**2).sum() + (prompt[item_ptr[:-1]] ** 2).sum())


def _report(
    prompt: Ints,
    answer: Ints,
    kept: _Kept,
    loss_tokens_whole: Ints,
    loss_tokens: Ints,
    stays: NDArray[np.bool_],
) -> LengthReport:
    total = prompt + answer.sum(axis=1)
    left = kept.prompt + kept.answer.sum(axis=1)
    lost = (loss_tokens_whole - loss_tokens)[stays].sum(axis=0)
    return LengthReport(
        num_rows=len(prompt),
        num_tokens=int(total.sum()),
        num_loss_tokens=int(loss_tokens_whole.sum()),
        rows_cut=int((left < total)[stays].sum()),
        rows_dropped=int((~stays).sum()),
        rows_split=0,
        pieces=int(stays.sum()),
        tokens_cut=int((total - left)[stays].sum()),
        tokens_dropped=int(total[~stays].sum()),
        tokens_idle=0,
        loss_tokens_cut=int(lost.sum()),
        loss_tokens_dropped=int(loss_tokens_whole[~stays].sum()),
        num_sequences=0,
        fill=1.0,
        loss_tokens_cut_by_answer=tuple(int(one) for one in lost),
    )
