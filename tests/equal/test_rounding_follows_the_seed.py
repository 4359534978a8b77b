"""Weights that are rounded at random are rounded by the seed of the run."""

from typing import Any

import torch
from torch import Tensor

from memtrain.trainers.build.components import build
from memtrain.trainers.optim.master_forms import Stochastic


def test_rounding_follows_the_seed_of_the_run(plan_of: Any):
    """A run of another seed draws other bits; the same seed the same ones."""
    made: dict[int, Tensor] = {}
    for seed in (3, 4):
        plan = plan_of("sft", "model.dtype=bfloat16", "optim.copies=stochastic", f"train.seed={seed}")
        optimizer: Any = build(plan).optimizer
        weight = optimizer.param_groups[0]["params"][0]
        wanted = weight.detach().clone()
        with torch.no_grad():
            optimizer.form.give(weight, torch.full(weight.shape, 1 + 2.0**-8))
            Stochastic([wanted], seed).give(wanted, torch.full(weight.shape, 1 + 2.0**-8))
        assert torch.equal(weight, wanted)
        made[seed] = weight.detach().clone()
    assert 0.3 < (made[3] == made[4]).float().mean() < 0.7
