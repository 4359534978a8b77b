"""Gradients over ranks: a weight that no rank gave a gradient keeps none, so that nothing moves it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from two_ranks import on_two_ranks

from memtrain.trainers.distributed import ddp
from memtrain.trainers.distributed.ddp import GradientAllReduce
from memtrain.trainers.runtime.ranks import Ranks

SIZES = {"small": 8, "large": 640}
"""Numbers on a side of a weight; the large ones leave as they are made, the small ones at the end."""
USED_BY = {"both": (0, 1), "the first": (0,), "the second": (1,), "none": ()}


def weights() -> dict[tuple[str, str], nn.Parameter]:
    """A weight of each size for each set of ranks that use it; order is that of a model."""
    return {
        (size, used): nn.Parameter(torch.ones(side, side))
        for (size, side), used in itertools.product(SIZES.items(), USED_BY)
    }


def test_both_sizes_are_there():
    made = weights()
    assert {size: made[size, "none"].nbytes >= ddp.SMALL_GRADIENT for size in SIZES} == {
        "small": False,
        "large": True,
    }


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_weight_without_a_gradient_on_any_rank_keeps_none_and_is_not_decayed(
    tmp_path: Path, num_micro_batches: int
):
    def act(ranks: Ranks) -> None:
        made = weights()
        engine = GradientAllReduce(list(made.values())).engine()
        used = [weight for (_, by), weight in made.items() if ranks.rank in USED_BY[by]]
        optimizer = torch.optim.AdamW(made.values(), lr=0.1, weight_decay=0.5)
        for _ in range(2):
            engine.begin(nn.Identity(), num_micro_batches)
            for number in range(num_micro_batches):
                loss = torch.stack([weight.sum() * (ranks.rank + 1) for weight in used]).sum()
                if number == num_micro_batches - 1:
                    with engine.last_pass():
                        engine.backward(loss)
                else:
                    engine.backward(loss)
            engine.finish()
            for (size, by), weight in made.items():
                slope = num_micro_batches * sum(rank + 1 for rank in USED_BY[by])
                if by == "none":
                    assert weight.grad is None, (size, by)
                else:
                    assert weight.grad is not None, (size, by)
                    assert torch.equal(weight.grad, torch.full_like(weight, float(slope))), (size, by)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for (size, by), weight in made.items():
            moved = not torch.equal(weight, torch.ones_like(weight))
            assert moved == (by != "none"), (size, by)

    on_two_ranks(tmp_path, act)
