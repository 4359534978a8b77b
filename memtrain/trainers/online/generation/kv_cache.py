"""Keys and values while sampling: each prompt's once for its group, and each row's own."""

# G group slots, R row slots, K key heads, H query heads, P tokens of the longest prompt, T of a completion,
# D head width. Slots in use are the first ones.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


class Widths(NamedTuple):
    """Sizes of a pass that writes tokens, rounded up so that many passes have the same."""

    rows: int
    groups: int
    of_group: int
    """Rows of the largest group."""
    prompt: int
    """Places of prompt keys that are looked at."""
    written: int
    """Places of written keys that are looked at."""


@dataclass(slots=True)
class RowPositions:
    """Rows that are being written, and where each of them stands.

    Made for `Widths`, rows past the real ones stand at the start of group 0: free slots are theirs, and
    nobody reads their tokens.
    """

    group_R: Tensor
    """int64: group slot of each row."""
    written_R: Tensor
    """int64: tokens of the row's completion that have keys."""
    prompt_G: Tensor
    """int64: tokens of each group's prompt."""
    place_R: Tensor
    """int64: place of each row in a [G, m] grid with one line for each group."""
    row_Gm: Tensor
    """int64: the row at each place of the grid; any row where there is none."""
    row_R: Tensor
    """int64: 0, 1, 2, ..."""
    longest_prompt: int
    longest_written: int
    num_prompt: int
    """Places of prompt keys that are looked at."""
    num_written: int | None
    """Places of written keys that are looked at; None: as many as the longest row has."""
    is_in_order: bool
    """Rows stand in the grid one after another, with no place left free."""
    hidden_RS: Tensor | None = None
    """bool [R, P + t]: places that a row does not look at; made anew by each pass."""

    @property
    def num_rows(self) -> int:
        """Rows being written."""
        return len(self.group_R)

    @property
    def own_places(self) -> int:
        """Places of written keys that this pass looks at."""
        return self.num_written if self.num_written is not None else self.longest_written + 1

    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that a pass reads of where the rows stand."""
        return (self.group_R, self.written_R, self.prompt_G, self.place_R, self.row_Gm, self.row_R)

    def take(self, other: RowPositions) -> None:
        """Stand where `other`, of the same widths, stands; the tensors keep their places in memory."""
        for own, its in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(its)
        self.longest_prompt, self.longest_written = other.longest_prompt, other.longest_written

    def look(self) -> None:
        """The masks of each row, once a pass for all layers."""
        prompt_P = torch.arange(self.num_prompt, device=self.row_R.device)
        own_t = torch.arange(self.own_places, device=self.row_R.device)
        of_prompt_RP = prompt_P >= self.prompt_G[self.group_R][:, None]
        self.hidden_RS = torch.cat([of_prompt_RP, own_t > self.written_R[:, None]], -1)


def row_positions(
    groups: list[int],
    written: list[int],
    prompts: list[int],
    device: torch.device,
    widths: Widths | None = None,
) -> RowPositions:
    """Positions of rows that belong to `groups` (slots) and have `written` tokens."""
    counts = [0] * len(prompts)
    offsets: list[int] = []
    for group in groups:
        offsets.append(counts[group])
        counts[group] += 1
    longest_prompt, longest_written = max(prompts), max(written)
    widest = max(counts) if widths is None else widths.of_group
    num_groups = len(prompts) if widths is None else widths.groups
    grid = [[0] * widest for _ in range(num_groups)]
    for row, (group, offset) in enumerate(zip(groups, offsets, strict=True)):
        grid[group][offset] = row
    places = [group * widest + offset for group, offset in zip(groups, offsets, strict=True)]
    spare = 0 if widths is None else widths.rows - len(groups)
    is_in_order = widths is None and places == list(range(num_groups * widest))
    return RowPositions(
        group_R=torch.tensor(groups + [0] * spare, device=device),
        written_R=torch.tensor(written + [0] * spare, device=device),
        prompt_G=torch.tensor(prompts + [0] * (num_groups - len(prompts)), device=device),
        place_R=torch.tensor(places + [0] * spare, device=device),
        row_Gm=torch.tensor(grid, device=device),
        row_R=torch.arange(len(groups) + spare, device=device),
        longest_prompt=longest_prompt,
        longest_written=longest_written,
        num_prompt=longest_prompt if widths is None else widths.prompt,
        num_written=None if widths is None else widths.written,
        is_in_order=is_in_order,
    )


@dataclass(slots=True)
class KVCache:
    """Keys and values of every layer. Buffers are made when the first prompt shows their shapes."""

    num_groups: int
    num_rows: int
    max_prompt: int
    max_written: int
    prompts: dict[int, Pair] = field(default_factory=dict)
    """By turn: [G, K, P, D] each."""
    rows: dict[int, Pair] = field(default_factory=dict)
    """By turn: [R, K, T, D] each."""
    turn: int = 0
    """Number of attentions of the model so far in this pass. Every pass attends in the same order, and a
    layer may do so several times: layers that are run in cycles, or twice with other values."""
    window: int | None = None
    """Tokens of the smallest sliding window that was met."""

    def begin_pass(self) -> None:
        """From now on the model attends for the first time again."""
        assert self.turn in (0, len(self.prompts)), "Every pass attends as often as the first one."
        self.turn = 0

    def next_turn(self) -> int:
        """Number of this attention in the pass."""
        self.turn += 1
        return self.turn - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        pairs = [*self.prompts.values(), *self.rows.values()]
        return sum(tensor.numel() * tensor.element_size() for pair in pairs for tensor in pair)

    def put_prompts(
        self, turn: int, key_KSD: Tensor, value_KSD: Tensor, bounds: list[int], first: int, begin: int = 0
    ) -> None:
        """Keep the keys of prompts that lie end to end, in group slots from `first` on.

        S: tokens of the row from `begin` on, all of them or a slice; `bounds`: of the prompts in the row.
        """
        if turn not in self.prompts:
            self._make(turn, key_KSD, value_KSD)
        kept_key, kept_value = self.prompts[turn]
        for index, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            low, high = max(start, begin), min(end, begin + key_KSD.shape[1])
            if low < high:
                there, here = slice(low - start, high - start), slice(low - begin, high - begin)
                kept_key[first + index, :, there] = key_KSD[:, here]
                kept_value[first + index, :, there] = value_KSD[:, here]

    def write(self, turn: int, key_RKD: Tensor, value_RKD: Tensor, at: RowPositions) -> Pair:
        """Append a token's keys to every row; views [R, K, t, D] of all keys, the new ones too."""
        kept_key, kept_value = self.rows[turn]
        kept_key[at.row_R, :, at.written_R] = key_RKD
        kept_value[at.row_R, :, at.written_R] = value_RKD
        rows, places = at.num_rows, at.own_places
        return kept_key[:rows, :, :places], kept_value[:rows, :, :places]

    def move_row(self, source: int, target: int, written: int) -> None:
        """Put the keys of row slot `source` into slot `target`."""
        for pair in self.rows.values():
            for kept in pair:
                kept[target, :, :written] = kept[source, :, :written]

    def move_group(self, source: int, target: int, prompt: int) -> None:
        """Put the prompt keys of group slot `source` into slot `target`."""
        for pair in self.prompts.values():
            for kept in pair:
                kept[target, :, :prompt] = kept[source, :, :prompt]

    def _make(self, turn: int, key_KTD: Tensor, value_KTD: Tensor) -> None:
        def empty(like_KTD: Tensor, slots: int, tokens: int) -> Tensor:
            # Zeros: places that a mask hides are multiplied by 0, and 0 * what was there before may be NaN.
            return like_KTD.new_zeros(slots, like_KTD.shape[0], tokens, like_KTD.shape[2])

        self.prompts[turn] = (
            empty(key_KTD, self.num_groups, self.max_prompt),
            empty(value_KTD, self.num_groups, self.max_prompt),
        )
        self.rows[turn] = (
            empty(key_KTD, self.num_rows, self.max_written),
            empty(value_KTD, self.num_rows, self.max_written),
        )


def attend(query_RHD: Tensor, own: Pair, prompts: Pair, at: RowPositions, scale: float) -> Tensor:
    """Attention of one token a row to its group's prompt and to the row's own tokens: [R, H, D].

    One softmax over both, in fp32. Prompt keys are never repeated: the rows of a group, and the query heads
    of a key head, are queries of one product.
    """
    key_RKtD, value_RKtD = own
    R, H, D = query_RHD.shape
    K = key_RKtD.shape[1]
    query_RKhD = query_RHD.view(R, K, H // K, D)
    G = len(at.prompt_G)
    P, t = at.num_prompt, key_RKtD.shape[2]
    assert at.hidden_RS is not None, "A pass begins with a look at what is hidden."
    prompt_key, prompt_value = prompts[0][:G, :, :P], prompts[1][:G, :, :P]

    to_prompt = _off_grid(_on_grid(query_RKhD, at) @ prompt_key.transpose(2, 3), at, H // K)
    to_own = query_RKhD @ key_RKtD.transpose(2, 3)
    scores = torch.cat([to_prompt, to_own], -1).float() * scale
    scores = scores.masked_fill_(at.hidden_RS[:, None, None], -torch.inf)

    weights = torch.softmax(scores, -1).to(query_RHD.dtype)
    on_prompt, on_own = weights.split([P, t], -1)
    from_prompt = _off_grid(_on_grid(on_prompt, at) @ prompt_value, at, H // K)
    return (from_prompt + on_own @ value_RKtD).reshape(R, H, -1)


def _on_grid(held_RKhx: Tensor, at: RowPositions) -> Tensor:
    """[G, K, m * h, x]: the queries of a group's rows, for one product."""
    _, K, h, x = held_RKhx.shape
    G, m = at.row_Gm.shape
    held = held_RKhx if at.is_in_order else held_RKhx[at.row_Gm.flatten()]
    return held.reshape(G, m, K, h, x).transpose(1, 2).reshape(G, K, m * h, x)


def _off_grid(held_GKqx: Tensor, at: RowPositions, heads: int) -> Tensor:
    """[R, K, h, x]: the rows' own again."""
    G, K, _, x = held_GKqx.shape
    m = at.row_Gm.shape[1]
    held = held_GKqx.view(G, K, m, heads, x).transpose(1, 2).reshape(G * m, K, heads, x)
    return held if at.is_in_order else held[at.place_R]
