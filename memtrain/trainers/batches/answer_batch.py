"""Micro-batches of prompts with their answers: each prompt once, or once for each answer."""

# A answers, I items (a pair is one item with two answers), T tokens of a row, N loss tokens.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memtrain.trainers.batches.collate import MicroBatch, Piece, lay_end_to_end, nothing, pad_right
from memtrain.trainers.model.attention.row_layout import shared_layout

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: its tokens, and its loss mask."""

    ids: Ids
    loss_mask: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt (it may be empty) and the answers to it."""

    prompt: Ids
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AnswerBatch:
    """Input of a forward pass over prompts with answers. Answers stand item after item.

    micro_batch: its scored tokens are the loss tokens of the answers, answer after answer.
    lengths_A: int64, loss tokens of each answer.
    last_A: int64, row of the flattened hidden states of each answer's last token.
    label_I: float32, label or margin of each item, NaN where it has none.
    reference_A: float32, the reference's log-probs where they were computed before training, else None.
    """

    micro_batch: MicroBatch
    lengths_A: Tensor
    last_A: Tensor
    label_I: Tensor
    reference_A: Tensor | None

    @property
    def num_loss_tokens(self) -> int:
        """Items, over which the loss is averaged."""
        return len(self.label_I)

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return self.micro_batch.num_tokens

    def to(self, device: torch.device | str) -> AnswerBatch:
        """The same batch with its tensors on `device`."""
        return AnswerBatch(
            micro_batch=self.micro_batch.to(device),
            lengths_A=self.lengths_A.to(device, non_blocking=True),
            last_A=self.last_A.to(device, non_blocking=True),
            label_I=self.label_I.to(device, non_blocking=True),
            reference_A=None if self.reference_A is None else self.reference_A.to(device, non_blocking=True),
        )


def collate_answers(
    groups: Sequence[Group],
    labels: Sequence[float],
    reference: Sequence[float] | None,
    *,
    is_shared: bool,
    is_flat: bool,
    pad_id: int,
    multiple: int | None = None,
    by_row: bool = False,
) -> AnswerBatch:
    """The groups as one batch: each prompt once in one flattened row, or a row for each answer.

    No groups give a batch that teaches nothing. `is_shared` needs `is_flat`. `by_row`: see `pad_right`.
    """
    if not groups:
        micro_batch, last = nothing(pad_id=pad_id, is_flat=is_flat, multiple=multiple), []
        lengths = []
    elif is_shared:
        groups = [apart for group in groups for apart in _with_prompt(group)]
        micro_batch, last = _shared(groups, pad_id, multiple)
        lengths = [int(answer.loss_mask.sum()) for group in groups for answer in group.answers]
    else:
        pieces = [_piece(group.prompt, answer) for group in groups for answer in group.answers]
        micro_batch = (
            lay_end_to_end(pieces, pad_id=pad_id, multiple=multiple)
            if is_flat
            else pad_right(pieces, pad_id=pad_id, multiple=multiple, by_row=by_row)
        )
        width = micro_batch.input_ids.shape[1]
        ends = list(accumulate(len(piece) for piece in pieces))
        last = [
            end - 1 if is_flat else row * width + len(piece) - 1
            for row, (piece, end) in enumerate(zip(pieces, ends, strict=True))
        ]
        lengths = [int(piece.loss_mask[1:].sum()) for piece in pieces]
    return AnswerBatch(
        micro_batch=micro_batch,
        lengths_A=torch.tensor(lengths, dtype=torch.int64),
        last_A=torch.tensor(last, dtype=torch.int64),
        label_I=torch.tensor(labels, dtype=torch.float32),
        reference_A=None if reference is None else torch.tensor(reference, dtype=torch.float32),
    )


def _piece(prompt: Ids, answer: Answer) -> Piece:
    return Piece(
        np.concatenate([prompt, answer.ids]),
        np.concatenate([np.zeros(len(prompt), np.bool_), answer.loss_mask]),
    )


def _shared(groups: Sequence[Group], pad_id: int, multiple: int | None) -> tuple[MicroBatch, list[int]]:
    """(batch, last token of each answer) of one row: prompts first, then the answers group by group."""
    groups = list(groups)
    total = sum(len(g.prompt) + sum(len(a.ids) for a in g.answers) for g in groups)
    padding = _padding(total, multiple)
    if padding:
        # A group of its own, so that it costs no attention to anybody.
        pad = np.full(padding, pad_id, np.int32)
        groups.append(Group(pad[:1], (Answer(pad[1:], np.zeros(padding - 1, np.bool_)),)))
    answers = [answer for group in groups for answer in group.answers]
    layout = shared_layout([(len(g.prompt), [len(a.ids) for a in g.answers]) for g in groups])
    ids = np.concatenate([*(group.prompt for group in groups), *(answer.ids for answer in answers)])
    is_loss_token_N = torch.from_numpy(np.concatenate([answer.loss_mask for answer in answers]))
    input_T = torch.from_numpy(ids.astype(np.int64))
    micro_batch = MicroBatch(
        input_ids=input_T[None],
        position_ids=layout.position_ids,
        layout=layout,
        scored_index=layout.predicting_rows[is_loss_token_N],
        targets=input_T[layout.predicted_rows[is_loss_token_N]],
        num_tokens=len(ids) - padding,
        runs_R2=torch.tensor(_runs(groups, padding)),
    )
    ends = accumulate((len(answer.ids) for answer in answers), initial=layout.num_prompt_tokens)
    last = [end - 1 for end in ends][1:]
    return micro_batch, last[:-1] if padding else last


def _runs(groups: Sequence[Group], padding: int) -> tuple[tuple[int, int], ...]:
    """Prompts, each of as many rows as it has answers, then the answers; the last group is padding's own."""
    own = groups[:-1] if padding else groups
    prompts = [(len(group.prompt), len(group.answers)) for group in own]
    answers = sum(len(answer.ids) for group in own for answer in group.answers)
    if not padding:
        return (*prompts, (answers, 1))
    return (*prompts, (1, 0), (answers, 1), (padding - 1, 0))


def _with_prompt(group: Group) -> list[Group]:
    """The group; without a prompt, each answer alone after its own first token, which nothing predicts."""
    if len(group.prompt):
        return [group]
    return [
        Group(answer.ids[:1], (replace(answer, ids=answer.ids[1:], loss_mask=answer.loss_mask[1:]),))
        for answer in group.answers
    ]


def _padding(total: int, multiple: int | None) -> int:
    """Tokens up to the next multiple; none, or at least a prompt's and an answer's."""
    padding = -total % multiple if multiple else 0
    return padding + (multiple or 0) if padding == 1 else padding
