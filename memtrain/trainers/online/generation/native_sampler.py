"""The native sampler: the training module itself, each prompt read once, rows that finish replaced.

Rows in use are the first slots of the key buffers: a row that finishes gives its slot to the last one, and a
waiting group is read as soon as enough slots are free.
"""

# R rows in use, V vocabulary.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import attention_switched
from memtrain.trainers.model.experts.router_replay import RouterReplay
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.loading.compiled_layers import as_written
from memtrain.trainers.online.generation.decode_graphs import DecodeGraphs
from memtrain.trainers.online.generation.decoding import Decoder, Written
from memtrain.trainers.online.generation.forward import NAME, read_prompts, register
from memtrain.trainers.online.generation.kv_cache import KVCache
from memtrain.trainers.online.generation.protocol import Finish, Group, OnDone, Routes, Sample, Sampling
from memtrain.trainers.runtime.seed import numpy_generator

REFILL_SHARE = 0.25
"""Share of the rows that must be free before waiting groups are read: one at a time is slow. Taste."""

Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Part:
    """Completions of one group that are written together."""

    group: int
    first: int
    count: int


@dataclass(slots=True)
class Row:
    """A completion that is being written."""

    part: int
    """Slot of its prompt."""
    group: int
    sample: int
    ids: list[int] = field(default_factory=list[int])
    """Tokens chosen so far; the newest has no keys yet."""
    logprobs: list[float] = field(default_factory=list[float])

    @property
    def tokens(self) -> int:
        """Tokens chosen so far."""
        return len(self.ids)


@dataclass(slots=True)
class Slot:
    """A prompt in use."""

    length: int
    rows: int
    routes: NDArray[np.int16] | None = None
    """Experts of its tokens."""


@dataclass(frozen=True, slots=True)
class NativeSampler:
    """Samples with the module that is trained. `max_rows` completions are written at a time."""

    model: PreTrainedModel | PeftModel
    backend: AttentionBackend
    max_rows: int
    read_tokens: int = 8192
    """Prompt tokens that are read in one forward pass (one longer prompt stands alone)."""
    decode: Decode | None = None
    """Ids to text, for stop strings."""
    tokens_per_sync: int = 1
    """Tokens that are written before the host looks at them: a finished row goes on until then, and its
    further tokens are dropped. Higher: fewer waits for the device."""
    graphs: DecodeGraphs | None = None
    """Recordings of the passes that write a token; None: the host starts every kernel."""
    replay: RouterReplay | None = None
    """Records the experts of every token; None: nobody asks for them."""
    name: str = "native"

    def generate(
        self, groups: Sequence[Group], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[list[Sample]]:
        """The completions of each group, in order, with the weights as they are now.

        The model is in evaluation mode meanwhile, and left as it was.
        """
        assert all(group.prompt_ids for group in groups), "A prompt must hold a token."
        register()
        was_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            switched = attention_switched(base_model(self.model), NAME)
            with torch.no_grad(), switched, as_written(self.model):
                return _Writing(self, groups, sampling, on_done).run() if groups else []
        finally:
            for module in was_training:
                module.training = True


class _Writing:
    """The state of one call."""

    def __init__(
        self,
        sampler: NativeSampler,
        groups: Sequence[Group],
        sampling: Sampling,
        on_done: OnDone | None,
    ) -> None:
        self.sampler, self.groups, self.sampling, self.on_done = sampler, groups, sampling, on_done
        parts = [
            part for number, group in enumerate(groups) for part in _parts(number, group, sampler.max_rows)
        ]
        # Longest prompts first: the buffers are as long as the longest one in any case.
        parts.sort(key=lambda part: -len(groups[part.group].prompt_ids))
        self.waiting = deque(parts)
        self.rows: list[Row] = []
        self.slots: list[Slot] = []
        self.done: list[dict[int, Sample]] = [{} for _ in groups]
        num_rows = min(sampler.max_rows, sum(part.count for part in parts))
        num_groups = min(len(parts), max(1, num_rows // min(part.count for part in parts)))
        longest = len(groups[parts[0].group].prompt_ids)
        self.keys = KVCache(num_groups, num_rows, longest, sampling.max_tokens)
        self.decoder = Decoder(
            sampler.model, sampler.backend, self.keys, sampling, sampler.graphs, sampler.replay
        )
        self.stop_ids = frozenset(sampling.stop_ids)

    def run(self) -> list[list[Sample]]:
        """Write everything."""
        try:
            while self.waiting or self.rows:
                if self.waiting and self._has_room():
                    self._read_waiting()
                else:
                    self._write_some()
        finally:
            self.decoder.release()
        return [[done[sample] for sample in range(len(done))] for done in self.done]

    def _has_room(self) -> bool:
        free = self.keys.num_rows - len(self.rows)
        wanted = max(self.waiting[0].count, int(REFILL_SHARE * self.keys.num_rows))
        return not self.rows or (free >= wanted and len(self.slots) < self.keys.num_groups)

    def _read_waiting(self) -> None:
        """Read the prompts of as many waiting parts as there is room for, and choose their first tokens."""
        free = self.keys.num_rows - len(self.rows)
        taken: list[Part] = []
        tokens = 0
        while self.waiting and len(self.slots) + len(taken) < self.keys.num_groups:
            part = self.waiting[0]
            length = len(self.groups[part.group].prompt_ids)
            if part.count > free or (taken and tokens + length > self.sampler.read_tokens):
                break
            taken.append(self.waiting.popleft())
            free -= part.count
            tokens += length
        prompts = [self.groups[part.group].prompt_ids for part in taken]
        first_slot, first_row = len(self.slots), len(self.rows)
        logits_PV, routes = self._read(prompts, first_slot)
        for number, part in enumerate(taken):
            self.slots.append(Slot(len(prompts[number]), part.count, routes[number]))
            samples = range(part.first, part.first + part.count)
            self.rows += [Row(first_slot + number, part.group, sample) for sample in samples]
        self._draw_uniforms(first_row)
        if self.sampling.repetition_penalty != 1:
            of_rows = [self.groups[row.group].prompt_ids for row in self.rows[first_row:]]
            self.decoder.see(first_row, of_rows, logits_PV.shape[1])
        counts = torch.tensor([part.count for part in taken], device=logits_PV.device)
        logits_RV = torch.repeat_interleave(logits_PV, counts, 0)
        self._take(self.decoder.first(logits_RV, first_row), first_row)

    def _read(
        self, prompts: list[tuple[int, ...]], first_slot: int
    ) -> tuple[Tensor, list[NDArray[np.int16] | None]]:
        """Logits of the token after each prompt, and the experts of the prompts' tokens."""
        sampler = self.sampler
        if sampler.replay is None:
            logits_PV = read_prompts(sampler.model, prompts, self.keys, first_slot, sampler.backend)
            return logits_PV, [None] * len(prompts)
        with sampler.replay.recording() as taken:
            logits_PV = read_prompts(sampler.model, prompts, self.keys, first_slot, sampler.backend)
        routes_TLK = taken().cpu().numpy()
        ends = np.cumsum([len(prompt) for prompt in prompts])
        return logits_PV, list(np.split(routes_TLK, ends[:-1]))

    def _draw_uniforms(self, first_row: int) -> None:
        drawn = [
            numpy_generator(self.groups[row.group].seed, "completion", row.sample).random(
                self.sampling.max_tokens
            )
            for row in self.rows[first_row:]
        ]
        self.decoder.draw(first_row, drawn)

    def _write_some(self) -> None:
        """Write the next tokens of every row, as many as the host need not look at one by one."""
        tokens = [row.tokens for row in self.rows]
        prompts = [slot.length for slot in self.slots]
        # Nothing is written past a row's end, nor past a sliding window, which ends the run.
        num_tokens = min(self.sampler.tokens_per_sync, self.sampling.max_tokens - max(tokens))
        if self.keys.window is not None:
            num_tokens = max(1, min(num_tokens, self.keys.window - max(prompts) - max(tokens) + 1))
        written = self.decoder.write(lambda: [row.part for row in self.rows], tokens, prompts, num_tokens)
        self._take(written, 0)

    def _take(self, written: Written, first_row: int) -> None:
        """Give the rows from slot `first_row` on their new tokens, and end the finished rows."""
        # From the last slot down, so that a slot that is filled again holds a row that was looked at.
        for slot in reversed(range(first_row, first_row + len(written))):
            row = self.rows[slot]
            for token, logprob in written[slot - first_row]:
                row.ids.append(token)
                row.logprobs.append(logprob)
                finish = self._finish(row)
                if finish is not None:
                    self._end(slot, finish)
                    break

    def _finish(self, row: Row) -> Finish | None:
        if row.ids[-1] in self.stop_ids:
            return "stop"
        if self.sampling.stop_strings and self._has_stop_string(row):
            return "string"
        return "length" if row.tokens == self.sampling.max_tokens else None

    def _has_stop_string(self, row: Row) -> bool:
        assert self.sampler.decode is not None, "Stop strings need a tokenizer."
        # A token is at least a byte of the text, and a character at most four.
        reach = 4 * max(len(text) for text in self.sampling.stop_strings) + 4
        tail = self.sampler.decode(row.ids[-reach:])
        return any(text in tail for text in self.sampling.stop_strings)

    def _end(self, slot: int, finish: Finish) -> None:
        row = self.rows[slot]
        routes = None
        if (of_prompt := self.slots[row.part].routes) is not None:
            routes = Routes(of_prompt, self.decoder.routes_of(slot, row.tokens))
        self.done[row.group][row.sample] = Sample(tuple(row.ids), tuple(row.logprobs), finish, routes=routes)
        self.decoder.at = None
        self._free_row(slot)
        self.slots[row.part].rows -= 1
        if not self.slots[row.part].rows:
            self._free_slot(row.part)
        group = self.groups[row.group]
        if self.on_done is not None and len(self.done[row.group]) == group.count:
            self.on_done(row.group, [self.done[row.group][sample] for sample in range(group.count)])

    def _free_row(self, slot: int) -> None:
        last = len(self.rows) - 1
        moved = self.rows[last]
        if slot != last:
            self.decoder.move_row(last, slot, moved.tokens)
            self.rows[slot] = moved
        self.rows.pop()

    def _free_slot(self, slot: int) -> None:
        last = len(self.slots) - 1
        if slot != last:
            self.keys.move_group(last, slot, self.slots[last].length)
            self.slots[slot] = self.slots[last]
            for row in self.rows:
                row.part = slot if row.part == last else row.part
        self.slots.pop()


def _parts(number: int, group: Group, max_rows: int) -> list[Part]:
    """A group in parts that fit the rows; its prompt is read once for each."""
    firsts = range(0, group.count, max_rows)
    return [Part(number, first, min(max_rows, group.count - first)) for first in firsts]
