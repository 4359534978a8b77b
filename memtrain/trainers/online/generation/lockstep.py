"""Ranks that make passes through gathered layers together, although they write unequally many tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from memtrain.trainers.model.attention.functions import NAMES
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.attention.run_device import run_device
from memtrain.trainers.model.heads.backbone import base_model


@dataclass(slots=True)
class Lockstep:
    """Every pass of a rank is a pass of all: finished ranks make passes over one token meanwhile."""

    model: nn.Module
    is_waiting: bool = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Passes inside are announced; at its end this rank waits until all ranks have come to theirs."""
        base = base_model(self.model)
        hook = base.register_forward_pre_hook(lambda module, inputs: self._announce())
        try:
            yield
            self.is_waiting = True
            while self._any(is_writing=False):
                self._idle()
        finally:
            self.is_waiting = False
            hook.remove()

    def _announce(self) -> None:
        if not self.is_waiting:
            self._any(is_writing=True)

    def _any(self, *, is_writing: bool) -> bool:
        """Whether any rank is about to make a pass; called by all of them."""
        number = torch.tensor(int(is_writing), device=run_device(self.model))
        dist.all_reduce(number)
        return bool(number)

    @torch.no_grad()
    def _idle(self) -> None:
        base = base_model(self.model)
        device = run_device(base)
        inputs: dict[str, Any] = {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device)}
        if base.config._attn_implementation in NAMES.values():
            layout = packed_layout([1], device)
            inputs |= {"position_ids": layout.position_ids, "layout": layout}
        cast(Any, base)(**inputs, use_cache=False)
