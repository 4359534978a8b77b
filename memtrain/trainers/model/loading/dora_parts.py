"""DoRA's magnitudes beside weights that are made in parts: each rank takes the norms of its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from torch import nn

from memtrain.trainers.model.loading.sharded_init import NeedsWhole, hold, is_keeping, known_of, own_stretch
from memtrain.trainers.model.loading.sharded_packed import numbers_to_pack


@contextmanager
def magnitudes_in_parts() -> Iterator[None]:
    """New DoRA layers that are made inside `kept_in_parts` begin with norms of this rank's rows.

    A new adapter adds nothing, so that PEFT's norms of the adapted weight are those of the weight. Source:
    arXiv:2402.09353, eq. 5; PEFT 0.21, `DoraLinearLayer.update_layer`.

    Raises: NeedsWhole where the rows of a weight are no outputs.
    """
    if not is_keeping():
        yield
        return
    plain: Any = DoraLinearLayer.update_layer

    def update_layer(self: Any, *, base_layer: nn.Module, **others: Any) -> None:
        weight: Any = base_layer.weight
        kept = known_of(weight)
        if kept is None:
            plain(self, base_layer=base_layer, **others)
            return
        to_pack = numbers_to_pack(base_layer)
        is_plain = weight.dim() == 2 and weight.is_floating_point()
        if self.fan_in_fan_out or not (is_plain or to_pack is not None):
            raise NeedsWhole("DoRA's magnitudes are no norms of rows of this weight")
        num_outputs, width = kept.shape if to_pack is None else to_pack.shape
        rows = own_stretch(torch.Size((num_outputs,)))
        if to_pack is None:
            own = kept.numbers(range(rows.start * width, rows.stop * width)).view(-1, width)
        else:
            own = to_pack[rows.start : rows.stop]
        norms = torch.linalg.norm(own, dim=1).to("cpu", own.dtype)
        self.weight = nn.Parameter(torch.empty(num_outputs, dtype=norms.dtype, device="meta"))
        hold(self.weight, norms)

    DoraLinearLayer.update_layer = update_layer
    try:
        yield
    finally:
        DoraLinearLayer.update_layer = plain
