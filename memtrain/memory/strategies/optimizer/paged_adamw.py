"""Paged AdamW: float32 moments in unified memory, which the driver moves to the host under pressure.

When: spikes of activations are what does not fit. Saves: the moments, where they are driven out; counted as
on the host. Costs: page faults in the step. Not exact: moments are float32 where the plain run has them in
the dtype of the weights. Refused: on a CPU, and without bitsandbytes.

Source: Dettmers et al. 2023, arXiv:2305.14314, section 3 (paged optimizers).
"""

from __future__ import annotations

from memtrain.memory.strategies.base import ON_A_GPU
from memtrain.memory.strategies.optimizer.base import other_optimizer, without_bitsandbytes

STRATEGY = other_optimizer(
    "paged_adamw",
    summary="optimizer states in memory that the driver moves to the host",
    saves="the optimizer states, under memory pressure",
    costs="page faults in the step; float32 moments on the host",
    measured=ON_A_GPU,
    refusal=without_bitsandbytes,
    in_shards="paged states of shards are untested",
)
