"""The native sampler: the training module itself, each prompt read once, rows that finish replaced.

Rows in use are the first slots of the key buffers: a row that finishes gives its slot to the last one, and a
waiting group is read as soon as enough slots are free.
"""

# R rows in use, V vocabulary, T tokens of a completion.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import attention_switched
from memtrain.trainers.model.heads.lm_head import base_model
from memtrain.trainers.online.generation.forward import NAME, read_prompts, register, write_tokens
from memtrain.trainers.online.generation.kv_cache import KVCache, Standing, standing
from memtrain.trainers.online.generation.protocol import Finish, Group, OnDone, Sample, Sampling
from memtrain.trainers.online.generation.token_sampling import choose
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
    tokens: int = 0
    """Tokens chosen so far; the newest has no keys yet."""


@dataclass(slots=True)
class Slot:
    """A prompt in use."""

    length: int
    rows: int


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
            with torch.no_grad(), attention_switched(base_model(self.model), NAME):
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
        self.at: Standing | None = None
        self.done: list[dict[int, Sample]] = [{} for _ in groups]
        num_rows = min(sampler.max_rows, sum(part.count for part in parts))
        num_groups = min(len(parts), max(1, num_rows // min(part.count for part in parts)))
        longest = len(groups[parts[0].group].prompt_ids)
        self.keys = KVCache(num_groups, num_rows, longest, sampling.max_tokens)
        device = next(sampler.model.parameters()).device
        shape = (num_rows, sampling.max_tokens)
        self.ids_RT = torch.zeros(shape, dtype=torch.long, device=device)
        self.logp_RT = torch.zeros(shape, device=device)
        self.uniform_RT = torch.zeros(shape, dtype=torch.float64, device=device)
        self.seen_RV: Tensor | None = None
        self.stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=device)

    def run(self) -> list[list[Sample]]:
        """Write everything."""
        while self.waiting or self.rows:
            if self.waiting and self._has_room():
                self._read_waiting()
            else:
                self._write_one_token()
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
        logits_PV = read_prompts(self.sampler.model, prompts, self.keys, first_slot, self.sampler.backend)
        for number, part in enumerate(taken):
            self.slots.append(Slot(len(prompts[number]), part.count))
            samples = range(part.first, part.first + part.count)
            self.rows += [Row(first_slot + number, part.group, sample) for sample in samples]
        self.at = None
        self._draw_uniforms(first_row)
        if self.sampling.repetition_penalty != 1:
            self._note_seen(first_row, prompts, logits_PV.shape[1])
        counts = torch.tensor([part.count for part in taken], device=logits_PV.device)
        self._choose(torch.repeat_interleave(logits_PV, counts, 0), first_row)

    def _draw_uniforms(self, first_row: int) -> None:
        for slot, row in enumerate(self.rows[first_row:], first_row):
            seed = self.groups[row.group].seed
            drawn = numpy_generator(seed, "completion", row.sample).random(self.sampling.max_tokens)
            self.uniform_RT[slot] = torch.from_numpy(drawn)

    def _note_seen(self, first_row: int, prompts: list[tuple[int, ...]], vocabulary: int) -> None:
        if self.seen_RV is None:
            self.seen_RV = torch.zeros(
                self.keys.num_rows, vocabulary, dtype=torch.bool, device=self.ids_RT.device
            )
        for slot, row in enumerate(self.rows[first_row:], first_row):
            self.seen_RV[slot] = False
            self.seen_RV[slot, list(self.groups[row.group].prompt_ids)] = True

    def _write_one_token(self) -> None:
        rows = self.rows
        if self.at is None:
            self.at = standing(
                [row.part for row in rows],
                [row.tokens - 1 for row in rows],
                [slot.length for slot in self.slots],
                self.ids_RT.device,
            )
        at = self.at
        newest_R = self.ids_RT[torch.arange(len(rows), device=self.ids_RT.device), at.written_R]
        logits_RV = write_tokens(self.sampler.model, newest_R, self.keys, at, self.sampler.backend)
        at.written_R += 1
        at.longest_written += 1
        self._choose(logits_RV, 0)

    def _choose(self, logits_RV: Tensor, first_row: int) -> None:
        """Choose a token for every row from slot `first_row` on, and end the rows that are finished."""
        slot_R = torch.arange(first_row, len(self.rows), device=logits_RV.device)
        tokens = [row.tokens for row in self.rows[first_row:]]
        at_R = torch.tensor(tokens, device=logits_RV.device)
        seen_RV = None if self.seen_RV is None else self.seen_RV[first_row : len(self.rows)]
        ids_R, logp_R = choose(logits_RV, self.uniform_RT[slot_R, at_R], self.sampling, seen_RV)
        self.ids_RT[slot_R, at_R] = ids_R
        self.logp_RT[slot_R, at_R] = logp_R
        if self.seen_RV is not None:
            self.seen_RV[slot_R, ids_R] = True
        for row in self.rows[first_row:]:
            row.tokens += 1
        stopped = torch.isin(ids_R, self.stop_ids).tolist()
        # From the last slot down, so that a slot that is filled again holds a row that was looked at.
        for slot in reversed(range(first_row, first_row + len(stopped))):
            finish = self._finish(slot, stopped[slot - first_row])
            if finish is not None:
                self._end(slot, finish)

    def _finish(self, slot: int, is_stopped: bool) -> Finish | None:
        row = self.rows[slot]
        if is_stopped:
            return "stop"
        if self.sampling.stop_strings and self._has_stop_string(slot, row.tokens):
            return "string"
        return "length" if row.tokens == self.sampling.max_tokens else None

    def _has_stop_string(self, slot: int, tokens: int) -> bool:
        assert self.sampler.decode is not None, "Stop strings need a tokenizer."
        # A token is at least a byte of the text, and a character at most four.
        reach = 4 * max(len(text) for text in self.sampling.stop_strings) + 4
        tail = self.sampler.decode(self.ids_RT[slot, max(0, tokens - reach) : tokens].tolist())
        return any(text in tail for text in self.sampling.stop_strings)

    def _end(self, slot: int, finish: Finish) -> None:
        row = self.rows[slot]
        ids = tuple(self.ids_RT[slot, : row.tokens].tolist())
        logprobs = tuple(self.logp_RT[slot, : row.tokens].tolist())
        self.done[row.group][row.sample] = Sample(ids, logprobs, finish)
        self.at = None
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
            self.keys.move_row(last, slot, moved.tokens)
            for held in (self.ids_RT, self.logp_RT, self.uniform_RT, self.seen_RV):
                if held is not None:
                    held[slot] = held[last]
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
