"""Padded rows under attention that takes one flattened row: laid end to end, padding and all."""

from __future__ import annotations

from typing import Any

from torch import nn

from memtrain.trainers.model.attention import NAMES
from memtrain.trainers.model.attention.row_layout import packed_layout


def end_to_end(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """A backbone's inputs [B, T] as one row [1, B * T] of B segments, where its attention needs a layout.

    As they are where there is a layout, or where the model attends by itself. Padding stands on the right,
    behind every token that is scored, so that a row needs no other mask.
    """
    if inputs.get("layout") is not None or model.config._attn_implementation not in NAMES.values():  # pyright: ignore
        return inputs
    B, T = inputs["input_ids"].shape
    flat = {name: inputs[name].reshape(1, -1) for name in ("input_ids", "position_ids")}
    return inputs | flat | {"layout": packed_layout([T] * B, inputs["input_ids"].device)}
