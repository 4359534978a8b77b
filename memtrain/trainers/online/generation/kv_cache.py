"""Keys and values while sampling: each prompt's once for its group, and those of what every row wrote."""

# G group slots, R row slots, K key heads, H query heads, P tokens of the longest prompt, T of a completion,
# D head width. Slots in use are the first ones.

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Standing:
    """Rows that are being written, and the place of each of them."""

    group_R: Tensor
    """int64: group slot of each row."""
    written_R: Tensor
    """int64: tokens of the row's completion that have keys."""
    prompt_G: Tensor
    """int64: tokens of each group's prompt."""
    longest_prompt: int
    longest_written: int
    place_R: Tensor
    """int64: place of each row in a [G, m] grid with one line for each group."""
    row_Gm: Tensor
    """int64: the row at each place of the grid; any row where there is none."""

    @property
    def num_rows(self) -> int:
        """Rows being written."""
        return len(self.group_R)


def standing(groups: list[int], written: list[int], prompts: list[int], device: torch.device) -> Standing:
    """The standing of rows that belong to `groups` (slots) and have `written` tokens."""
    counts = [0] * len(prompts)
    offsets: list[int] = []
    for group in groups:
        offsets.append(counts[group])
        counts[group] += 1
    widest = max(counts)
    grid = [[0] * widest for _ in prompts]
    for row, (group, offset) in enumerate(zip(groups, offsets, strict=True)):
        grid[group][offset] = row
    places = [group * widest + offset for group, offset in zip(groups, offsets, strict=True)]
    return Standing(
        group_R=torch.tensor(groups, device=device),
        written_R=torch.tensor(written, device=device),
        prompt_G=torch.tensor(prompts, device=device),
        longest_prompt=max(prompts),
        longest_written=max(written),
        place_R=torch.tensor(places, device=device),
        row_Gm=torch.tensor(grid, device=device),
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
        self, turn: int, key_KTD: Tensor, value_KTD: Tensor, bounds: list[int], first: int
    ) -> None:
        """Keep the keys of prompts that lie end to end, in group slots from `first` on."""
        if turn not in self.prompts:
            self._make(turn, key_KTD, value_KTD)
        kept_key, kept_value = self.prompts[turn]
        for index, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            kept_key[first + index, :, : end - start] = key_KTD[:, start:end]
            kept_value[first + index, :, : end - start] = value_KTD[:, start:end]

    def write(self, turn: int, key_RKD: Tensor, value_RKD: Tensor, at: Standing) -> Pair:
        """Append a token's keys to every row; views [R, K, t, D] of all keys, the new ones too."""
        kept_key, kept_value = self.rows[turn]
        row_R = torch.arange(at.num_rows, device=key_RKD.device)
        kept_key[row_R, :, at.written_R] = key_RKD
        kept_value[row_R, :, at.written_R] = value_RKD
        end = at.longest_written + 1
        return kept_key[: at.num_rows, :, :end], kept_value[: at.num_rows, :, :end]

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


def attend(query_RHD: Tensor, own: Pair, prompts: Pair, at: Standing, scale: float) -> Tensor:
    """Attention of one token a row to its group's prompt and to what the row wrote: [R, H, D].

    One softmax over both, in fp32. Prompt keys are never repeated: the rows of a group, and the query heads
    of a key head, are queries of one product.
    """
    key_RKtD, value_RKtD = own
    R, H, D = query_RHD.shape
    K = key_RKtD.shape[1]
    query_RKhD = query_RHD.view(R, K, H // K, D)
    G, m = at.row_Gm.shape
    P, t = at.longest_prompt, key_RKtD.shape[2]
    prompt_key, prompt_value = prompts[0][:G, :, :P], prompts[1][:G, :, :P]

    grid = query_RKhD[at.row_Gm.flatten()].view(G, m, K, H // K, D).transpose(1, 2).reshape(G, K, -1, D)
    to_prompt = (grid @ prompt_key.transpose(2, 3)).float() * scale
    hidden_GP = torch.arange(P, device=grid.device) >= at.prompt_G[:, None]
    to_prompt = to_prompt.masked_fill(hidden_GP[:, None, None], -torch.inf)
    to_prompt = to_prompt.view(G, K, m, H // K, P).transpose(1, 2).reshape(G * m, K, H // K, P)[at.place_R]

    to_own = (query_RKhD @ key_RKtD.transpose(2, 3)).float() * scale
    hidden_Rt = torch.arange(t, device=grid.device) > at.written_R[:, None]
    to_own = to_own.masked_fill(hidden_Rt[:, None, None], -torch.inf)

    weights = torch.softmax(torch.cat([to_prompt, to_own], -1), -1).to(query_RHD.dtype)
    on_prompt, on_own = weights.split([P, t], -1)
    grid = on_prompt[at.row_Gm.flatten()].view(G, m, K, H // K, P).transpose(1, 2).reshape(G, K, -1, P)
    from_prompt = (grid @ prompt_value).view(G, K, m, H // K, -1).transpose(1, 2)
    from_prompt = from_prompt.reshape(G * m, K, H // K, -1)[at.place_R]
    return (from_prompt + on_own @ value_RKtD).reshape(R, H, -1)
