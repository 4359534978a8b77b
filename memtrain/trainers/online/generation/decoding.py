"""Tokens written on the device, several before the host looks at them."""

# R rows in use, V vocabulary, T tokens of a completion, n tokens of a block.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.experts.router_replay import OWN, RouterReplay
from memtrain.trainers.model.offload.weights import compute_device
from memtrain.trainers.online.generation.decode_graphs import DecodeGraphs
from memtrain.trainers.online.generation.forward import write_tokens
from memtrain.trainers.online.generation.kv_cache import KVCache, RowPositions, Widths, row_positions
from memtrain.trainers.online.generation.protocol import Sampling
from memtrain.trainers.online.generation.token_sampling import choose
from memtrain.trainers.runtime.cuda_graphs import Run

LEAST_WIDTH = 16
"""Fewest places or rows that a recording is made for, where there are so many. Taste."""

Written = list[list[tuple[int, float]]]
"""Of each row, its new tokens with their log-probs."""


@dataclass(slots=True)
class Frame:
    """Passes of some widths: where their rows stand, and their recording once there is one."""

    at: RowPositions
    start: Run | None = None


@dataclass(slots=True)
class Decoder:
    """Buffers of the rows, and the passes that write into them.

    Without `graphs` a pass is exactly as wide as its rows need. With them widths are rounded up, so that few
    recordings serve all passes: places that a row does not look at have no weight.
    """

    model: nn.Module
    backend: AttentionBackend
    keys: KVCache
    sampling: Sampling
    graphs: DecodeGraphs | None = None
    replay: RouterReplay | None = None
    routes_RTLK: Tensor | None = None
    """int16, the experts of every token that was read, where they are recorded."""
    ids_RT: Tensor = field(init=False)
    logp_RT: Tensor = field(init=False)
    uniform_RT: Tensor = field(init=False)
    seen_RV: Tensor | None = None
    at: RowPositions | None = None
    """Positions of the rows; None when they have changed."""
    frames: dict[Widths, Frame] = field(default_factory=dict[Widths, Frame])

    def __post_init__(self) -> None:
        shape, device = (self.keys.num_rows, self.keys.max_written), compute_device(self.model)
        self.ids_RT = torch.zeros(shape, dtype=torch.long, device=device)
        self.logp_RT = torch.zeros(shape, device=device)
        self.uniform_RT = torch.zeros(shape, dtype=torch.float64, device=device)
        if self.replay is not None:
            each = (self.replay.num_routers, self.replay.num_chosen)
            self.routes_RTLK = torch.full((*shape, *each), OWN, dtype=torch.int16, device=device)

    def draw(self, first_row: int, uniforms: Sequence[NDArray[np.float64]]) -> None:
        """Give rows from `first_row` on the numbers that choose their tokens."""
        self.uniform_RT[first_row : first_row + len(uniforms)] = torch.from_numpy(np.stack(uniforms))

    def see(self, first_row: int, prompts: Sequence[tuple[int, ...]], vocabulary: int) -> None:
        """Mark the tokens of each new row's prompt as seen."""
        if self.seen_RV is None:
            num_rows, device = self.keys.num_rows, self.ids_RT.device
            self.seen_RV = torch.zeros(num_rows, vocabulary, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts, first_row):
            self.seen_RV[row] = False
            self.seen_RV[row, list(prompt)] = True

    def first(self, logits_RV: Tensor, first_row: int) -> Written:
        """The first token of the rows from `first_row` on."""
        self.at = None
        row_R = torch.arange(first_row, first_row + len(logits_RV), device=logits_RV.device)
        self._choose(logits_RV, row_R, torch.zeros_like(row_R))
        return self._fetched(row_R, torch.zeros_like(row_R), 1)

    def write(
        self, groups: Callable[[], list[int]], tokens: list[int], prompts: list[int], num_tokens: int
    ) -> Written:
        """The next `num_tokens` tokens of every row, in one wait for the device.

        `groups`: group slot of each row, asked where rows have changed. `tokens`: how many each row has.
        """
        keyed = [number - 1 for number in tokens]
        if self.graphs is None or not self.graphs.is_on:
            if self.at is None:
                self.at = row_positions(groups(), keyed, prompts, self.ids_RT.device)
            self._passes(self.at, num_tokens)
            return self._fetched(self.at.row_R, self.at.written_R, num_tokens)
        here = groups()
        widths = self._widths(here, max(keyed) + num_tokens, prompts)
        stands = row_positions(here, keyed, prompts, self.ids_RT.device, widths)
        frame = self.frames.get(widths)
        left = num_tokens
        if frame is None:
            # The first pass of these widths warms up what a recording must not begin.
            frame = self.frames[widths] = Frame(stands)
            self._passes(frame.at, 1)
            left -= 1
        else:
            frame.at.take(stands)
        if left:
            self._started(frame, self.graphs, left)
        rows = slice(0, len(tokens))
        return self._fetched(frame.at.row_R[rows], frame.at.written_R[rows], num_tokens)

    def move_row(self, source: int, target: int, tokens: int) -> None:
        """Put row slot `source` into slot `target`."""
        self.keys.move_row(source, target, tokens)
        for held in (self.ids_RT, self.logp_RT, self.uniform_RT, self.seen_RV, self.routes_RTLK):
            if held is not None:
                held[target] = held[source]

    def routes_of(self, row: int, num_tokens: int) -> NDArray[np.int16]:
        """The experts of the tokens of a row slot; the newest was not read."""
        assert self.routes_RTLK is not None, "Experts are recorded."
        routes_TLK = self.routes_RTLK[row, :num_tokens].cpu().numpy().copy()
        routes_TLK[num_tokens - 1] = OWN
        return routes_TLK

    def release(self) -> None:
        """Free the memory of recordings."""
        self.frames.clear()
        if self.graphs is not None:
            self.graphs.release()

    def _started(self, frame: Frame, graphs: DecodeGraphs, num_tokens: int) -> None:
        window, end = self.keys.window, frame.at.longest_prompt + frame.at.longest_written + num_tokens
        if window is not None and window < end:
            # A recording asks nothing; a pass that is started by hand says what is wrong.
            self._passes(frame.at, num_tokens)
        if not graphs.is_rehearsed:
            graphs.rehearse(lambda: self._passes(frame.at, 1))
            num_tokens -= 1
        if frame.start is None and graphs.is_on and num_tokens:
            frame.start = graphs.record(lambda: self._one_pass(frame.at))
            self.keys.turn = 0
        if frame.start is None:
            self._passes(frame.at, num_tokens)
            return
        for _ in range(num_tokens):
            frame.start()

    def _passes(self, at: RowPositions, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._one_pass(at)
            at.longest_written += 1

    def _one_pass(self, at: RowPositions) -> None:
        """Write a token of every row. Nothing waits for the device, and no number of Python is changed."""
        newest_R = self.ids_RT[at.row_R, at.written_R]
        if self.replay is None or self.routes_RTLK is None:
            logits_RV = write_tokens(self.model, newest_R, self.keys, at, self.backend)
        else:
            with self.replay.recording() as taken:
                logits_RV = write_tokens(self.model, newest_R, self.keys, at, self.backend)
            self.routes_RTLK[at.row_R, at.written_R] = taken()
        at.written_R += 1
        self._choose(logits_RV, at.row_R, at.written_R)

    def _choose(self, logits_RV: Tensor, row_R: Tensor, place_R: Tensor) -> None:
        seen_RV = None if self.seen_RV is None else self.seen_RV[row_R]
        ids_R, logp_R = choose(logits_RV, self.uniform_RT[row_R, place_R], self.sampling, seen_RV)
        self.ids_RT[row_R, place_R] = ids_R
        self.logp_RT[row_R, place_R] = logp_R
        if self.seen_RV is not None:
            # True itself would be copied from the host, for which a pass would wait and no graph is captured.
            self.seen_RV[row_R, ids_R] = torch.ones_like(ids_R, dtype=torch.bool)

    def _fetched(self, row_R: Tensor, last_R: Tensor, num_tokens: int) -> Written:
        """The tokens up to place `last_R` of each row: the only wait for the device."""
        back_n = torch.arange(num_tokens, device=last_R.device) - (num_tokens - 1)
        place_Rn = last_R[:, None] + back_n
        ids_Rn, logp_Rn = self.ids_RT[row_R[:, None], place_Rn], self.logp_RT[row_R[:, None], place_Rn]
        both = torch.stack([ids_Rn.double(), logp_Rn.double()], -1).tolist()
        return [[(int(token), logp) for token, logp in row] for row in both]

    def _widths(self, groups: list[int], written: int, prompts: list[int]) -> Widths:
        """Powers of two, as far as the buffers go."""
        most_of_group = max(groups.count(group) for group in set(groups))
        return Widths(
            rows=_rounded(len(groups), self.keys.num_rows),
            groups=_rounded(len(prompts), self.keys.num_groups),
            of_group=_rounded(most_of_group, self.keys.num_rows),
            prompt=_rounded(max(prompts), self.keys.max_prompt),
            written=_rounded(written, self.keys.max_written),
        )


def _rounded(number: int, most: int) -> int:
    return min(most, max(LEAST_WIDTH, 1 << (number - 1).bit_length()))
