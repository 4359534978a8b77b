"""Rotary positions of a row in slices: a slice's at a time, and the numbers of the whole row."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.model.streamed.row_angles import RotaryForward

TinyModel = Callable[..., Any]
LAYOUT = packed_layout([37, 5, 64, 1, 20])
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


def lengths_asked(model: Any) -> list[int]:
    """Tokens of every call of the rotary embedding's own code, in a training step and a pass without."""
    asked: list[int] = []
    rotary = model.model.rotary_emb
    plain = rotary.forward

    def counting(x: Tensor, position_ids: Tensor, *more: Any, **given: Any) -> Any:
        asked.append(position_ids.shape[-1])
        return plain(x, position_ids, *more, **given)

    rotary.forward = counting
    stream_layers(model, 24)
    inputs = {"position_ids": LAYOUT.position_ids, "layout": LAYOUT, "use_cache": False}
    ids = torch.randint(0, 128, (1, LAYOUT.num_tokens))
    model.train()(ids, **inputs).logits.sum().backward()
    with torch.no_grad():
        model(ids, **inputs)
    stream_layers(model, 0)
    assert rotary.forward is counting, "What was there before is there again."
    return asked


def test_the_tables_of_a_long_row_are_never_whole(tiny_model: TinyModel):
    model = tiny_model(num_hidden_layers=2)
    set_attention(model, "torch_cpu")
    asked = lengths_asked(model)
    assert max(asked) == 24
    assert LAYOUT.num_tokens % 24 in asked, "The last slice is shorter."


def test_angles_that_follow_the_length_of_a_row_see_all_its_places(tiny_model: TinyModel):
    model = tiny_model(num_hidden_layers=2, rope_parameters=DYNAMIC, max_position_embeddings=32)
    set_attention(model, "torch_cpu")
    assert set(lengths_asked(model)) == {LAYOUT.num_tokens}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_of_slices_are_the_bits_of_the_whole_row(tiny_model: TinyModel, dtype: torch.dtype):
    rotary = tiny_model(num_hidden_layers=1).model.rotary_emb
    x, places = torch.zeros(1, 1, 8, dtype=dtype), LAYOUT.position_ids
    whole = rotary(x, places)
    row = RotaryForward(rotary, 11)(x, places)
    spans = [(begin, min(begin + 11, LAYOUT.num_tokens)) for begin in range(0, LAYOUT.num_tokens, 11)]
    for one, at in zip(whole, (0, 1), strict=True):
        assert torch.equal(torch.cat([row.of(*span)[at] for span in spans], dim=1), one)
    assert row.of(*spans[0])[0] is row.of(*spans[0])[0], "A row of one slice makes them once for all layers."
