"""Prompts as a feed, for methods that write their own answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memtrain.trainers.batches.collate import MicroBatch, nothing
from memtrain.trainers.batches.split_rows import SplitRows
from memtrain.trainers.data.packing.prompt_rows import lay_out_prompts
from memtrain.trainers.protocols.events import DataEvent

Ints = NDArray[np.int64]


class PromptFeed:
    """Rows that are a prompt: sequence s is prompt s, and weighs 1."""

    def __init__(self, split: SplitRows) -> None:
        self.split, self.store, self.settings, self.pad_id = split, split.store, split.settings, split.pad_id
        limits, each = self.settings.row_limits, split.num_generations
        self.prompts, self.epoch_ptr = split.laid(
            lambda rows: lay_out_prompts(self.store, rows, limits, each=each),
            lambda prompts: len(prompts.row),
        )

    @property
    def tokens(self) -> Ints:
        """Tokens of each prompt."""
        return self.prompts.length

    @property
    def weights(self) -> Ints:
        """1 for each."""
        return np.ones_like(self.prompts.length)

    @property
    def loss_tokens(self) -> Ints:
        """Nothing: the trained answers are not written yet."""
        return np.zeros_like(self.prompts.length)

    def ids(self, prompt: int) -> tuple[int, ...]:
        """Tokens of one prompt, as far as it is kept."""
        row, start = int(self.prompts.row[prompt]), int(self.prompts.start[prompt])
        end = start + int(self.prompts.length[prompt])
        return tuple(self.store.row(row)[start:end].tolist())

    def columns(self, prompt: int) -> dict[str, Any]:
        """Other columns of its row."""
        return self.store.columns(int(self.prompts.row[prompt]))

    def asked(self, prompt: int) -> dict[str, Any] | None:
        """Prompt and tools of its row as they were read, whatever is kept of its tokens."""
        return self.store.asked(int(self.prompts.row[prompt]))

    def micro_batch(self, sequences: Ints) -> MicroBatch:
        """Nothing: a prompt alone teaches nothing."""
        return nothing(pad_id=self.pad_id, is_flat=self.settings.padding_free)

    def sample_prompt(self) -> Tensor:
        """int64 [T], the shortest prompt."""
        return torch.tensor(self.ids(int(self.tokens.argmin())))

    def data_event(self, split: str) -> DataEvent:
        """Effects of truncation on the prompts."""
        return self.split.data_event(split, self.prompts.report)
