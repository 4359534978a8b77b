"""Prompts as a feed: what methods that write their own answers draw from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.batches.collate import MicroBatch, nothing
from memtrain.trainers.batches.token_batches import data_event
from memtrain.trainers.data.packing.epochs import laid_epochs
from memtrain.trainers.data.packing.prompt_rows import lay_out_prompts
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.protocols.events import DataEvent

Ints = NDArray[np.int64]


class PromptFeed:
    """Rows that are a prompt: sequence s is prompt s, and weighs 1."""

    def __init__(
        self,
        store: TokenStore,
        rows: Ints,
        recipe: Recipe,
        settings: Settings,
        *,
        pad_id: int,
        later: Sequence[Ints] = (),
    ) -> None:
        self.store = store
        self.rows = rows
        self.settings = settings
        self.pad_id = pad_id
        each = recipe.generation.num_generations
        self.prompts, self.epoch_ptr = laid_epochs(
            lambda some: lay_out_prompts(store, some, settings.row_limits, each=each),
            rows,
            later,
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
    def learnt(self) -> Ints:
        """Nothing: what is learnt is not written yet."""
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
        return data_event(split, self.prompts.report, self.store.lengths[self.rows])
