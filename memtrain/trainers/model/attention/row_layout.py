"""The layout of one flattened row: attention between tokens, positions, and targets.

A packed row is a run of segments, each causal and blind to the others. A row of shared prompts puts the
prompts
first: `[P1|P2|..|Pg | c11..c1k | c21..c2k | ..]`; each segment attends to itself (part A, `within`), and all
completions of a group attend to the group's prompt besides (part B, `to_prompt`).
"""

# T: tokens of the row, S: segments, N: predicted tokens.
# Only numbers per segment go to the device; what is per token is counted there, without synchronising.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

Rows = slice | Tensor
"""Rows of a tensor, no row twice: a range, or int64 numbers in any order."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Query segments and the key segment that each of them attends to.

    Segment i is `bounds[i]:bounds[i + 1]`; the `cu_` tensors are the same numbers, int32, on the layout's
    device.
    """

    query_bounds: tuple[int, ...]
    key_bounds: tuple[int, ...]
    cu_query: Tensor
    cu_key: Tensor
    max_query: int
    max_key: int
    is_causal: bool
    calls: dict[int, Any] = field(default_factory=dict, repr=False)
    """What a back end has worked out of the bounds, once for all layers."""

    def spans(self) -> list[tuple[int, int, int, int]]:
        """Bounds of each segment: `(query start, query end, key start, key end)`."""
        pairs = zip(pairwise(self.query_bounds), pairwise(self.key_bounds), strict=True)
        return [(*query, *key) for query, key in pairs]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Part:
        """The same part with its tensors on `device`."""
        return replace(
            self,
            cu_query=self.cu_query.to(device, non_blocking=non_blocking),
            cu_key=self.cu_key.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Layout:
    """Attention pattern of a flattened row of `num_tokens` tokens: the keys of each query.

    within: part A, every segment to itself, causal.
    to_prompt: part B, the completions of each group to their prompt; None for a packed row. Its query bounds
        count from `num_prompt_tokens`, its key bounds from 0: both are plain slices of the row.
    position_ids: int64 [1, T]; a completion continues from its prompt.
    longest_span: most tokens that a query can look back on, itself counted.
    """

    within: Part
    to_prompt: Part | None
    num_prompt_tokens: int
    position_ids: Tensor
    longest_span: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return self.within.query_bounds[-1]

    @property
    def places(self) -> Tensor:
        """int64 [T], the place of each token in its own row."""
        return self.position_ids[0]

    @property
    def predicted_rows(self) -> Tensor:
        """int64 [N], tokens that are predicted: of a packed row every token but the first of each segment.

        Of shared prompts: every completion token. Counted where a batch is laid out: no layer needs them.
        """
        bounds = self.within.query_bounds
        if self.to_prompt is not None:
            return torch.arange(self.num_prompt_tokens, bounds[-1], device=self.device)
        # A segment's first token has no neighbour before it, and those of all segments before are left out.
        lengths = [end - start - 1 for start, end in pairwise(bounds)]
        return _counted(lengths, range(1, len(lengths) + 1), self.device)

    @property
    def predicting_rows(self) -> Tensor:
        """int64 [N], the token whose hidden state predicts each of `predicted_rows`: the one before it.

        A completion's first token is predicted by the last one of its prompt.
        """
        row_N = self.predicted_rows - 1
        if self.to_prompt is None:
            return row_N
        ends, before = self.to_prompt.key_bounds, self.num_prompt_tokens
        firsts = [start - before for start in self.within.query_bounds[len(ends) - 1 : -1]]
        groups = [bisect_right(self.to_prompt.query_bounds, first) for first in firsts]
        last_of_prompt = torch.tensor([ends[group] - 1 for group in groups], device=self.device)
        row_N[torch.tensor(firsts, device=self.device)] = last_of_prompt
        return row_N

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.position_ids.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Layout:
        """The same layout with its tensors on `device`: once per batch, not once per layer."""
        return replace(
            self,
            within=self.within.to(device, non_blocking),
            to_prompt=self.to_prompt and self.to_prompt.to(device, non_blocking),
            position_ids=self.position_ids.to(device, non_blocking=non_blocking),
        )


def packed_layout(lengths: Sequence[int], device: torch.device | str = "cpu") -> Layout:
    """Rows of `lengths` tokens one after another, each blind to the others. No length may be 0."""
    assert len(lengths) > 0, "A packed row needs at least one segment."
    assert min(lengths) > 0, f"A segment of a packed row must hold a token; the lengths are {list(lengths)}."
    bounds = _bounds(lengths)
    return Layout(
        within=part_of(bounds, bounds, device=device, is_causal=True),
        to_prompt=None,
        num_prompt_tokens=0,
        position_ids=_counted(lengths, [-start for start in bounds[:-1]], device)[None],
        longest_span=max(lengths),
    )


def even_layout(num_rows: int, length: int, device: torch.device | str) -> Layout:
    """`packed_layout` of rows of one length, counted on the device: nothing is sent to it."""
    bounds = tuple(range(0, (num_rows + 1) * length, length))
    cu = torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=device)
    return Layout(
        within=Part(bounds, bounds, cu, cu, length, length, is_causal=True),
        to_prompt=None,
        num_prompt_tokens=0,
        position_ids=torch.arange(length, device=device).repeat(num_rows)[None],
        longest_span=length,
    )


def shared_layout(groups: Sequence[tuple[int, Sequence[int]]], device: torch.device | str = "cpu") -> Layout:
    """Groups of `(prompt length, completion lengths)`: prompts first, then the completions group by group.

    The row's tokens are `prompt 1, .., prompt g, completions of group 1, .., completions of group g`. Neither
    a prompt nor a completion may be empty: without a prompt nothing would predict a completion's first token.
    """
    assert len(groups) > 0, "A row of shared prompts needs at least one group."
    prompts = [prompt for prompt, _ in groups]
    assert min(prompts) > 0, f"A shared prompt must hold a token; the prompt lengths are {prompts}."
    sizes = [len(completions) for _, completions in groups]
    assert min(sizes) > 0, f"A shared prompt needs a completion; the groups' sizes are {sizes}."
    completions = [length for _, group in groups for length in group]
    assert min(completions) > 0, f"A completion must hold a token; the completion lengths are {completions}."

    bounds = _bounds([*prompts, *completions])
    num_prompt_tokens = sum(prompts)
    owner = [group for group, size in enumerate(sizes) for _ in range(size)]
    first_positions = [0] * len(groups) + [prompts[group] for group in owner]
    shifts = [position - start for position, start in zip(first_positions, bounds[:-1], strict=True)]
    return Layout(
        within=part_of(bounds, bounds, device=device, is_causal=True),
        to_prompt=part_of(
            _bounds([sum(group) for _, group in groups]), _bounds(prompts), device=device, is_causal=False
        ),
        num_prompt_tokens=num_prompt_tokens,
        position_ids=_counted([*prompts, *completions], shifts, device)[None],
        longest_span=max(prompt + max(group) for prompt, group in groups),
    )


def _bounds(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(lengths, initial=0))


def _counted(lengths: Sequence[int], shifts: Sequence[int], device: torch.device | str) -> Tensor:
    """int64 [sum of lengths]: 0, 1, 2, .. plus the shift of the segment that each place falls in."""
    length_S, shift_S = torch.tensor(lengths, device=device), torch.tensor(shifts, device=device)
    total = sum(lengths)
    return torch.arange(total, device=device) + shift_S.repeat_interleave(length_S, output_size=total)


def part_of(
    query_bounds: tuple[int, ...], key_bounds: tuple[int, ...], *, device: torch.device | str, is_causal: bool
) -> Part:
    """Query segments with a key segment each, by where they begin and end."""
    return Part(
        query_bounds=query_bounds,
        key_bounds=key_bounds,
        cu_query=torch.tensor(query_bounds, dtype=torch.int32, device=device),
        cu_key=torch.tensor(key_bounds, dtype=torch.int32, device=device),
        max_query=max(end - start for start, end in pairwise(query_bounds)),
        max_key=max(end - start for start, end in pairwise(key_bounds)),
        is_causal=is_causal,
    )
