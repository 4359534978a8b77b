"""The preflight's own parts."""

import pytest
import torch
from torch import nn

from memtrain.trainers.loop.oom import preflight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_of_weights_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    """By hand: the bits as integers, added in Python and wrapped to 64 bits; a transposed weight too."""
    torch.manual_seed(0)
    weights = [
        nn.Parameter(torch.randn(7, 5).to(dtype)),
        nn.Parameter(torch.randn(6, 4).to(dtype).T),
        nn.Parameter(torch.randn(3).to(dtype)),
    ]
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    by_hand = [sum(one.detach().contiguous().view(integers).flatten().tolist()) for one in weights]
    assert preflight.bits_of(weights) == by_hand
    monkeypatch.setattr(preflight, "PIECE", 4)
    assert preflight.bits_of(weights) == by_hand
    weights[0].data[3, 2] += 1
    assert preflight.bits_of(weights) != by_hand


def test_no_piece_is_widened_whole(monkeypatch: pytest.MonkeyPatch):
    """The largest tensor of 64-bit integers that is made has a piece's numbers."""
    seen: list[int] = []
    plain = torch.Tensor.sum
    monkeypatch.setattr(
        torch.Tensor,
        "sum",
        lambda self, *args, **kw: (seen.append(self.numel()), plain(self, *args, **kw))[1],
    )
    monkeypatch.setattr(preflight, "PIECE", 10)
    preflight.bits_of([nn.Parameter(torch.zeros(100, dtype=torch.bfloat16))])
    assert max(seen) == 10
