"""Paged 8-bit AdamW: 8-bit moments in unified memory, which the driver moves to the host.

When: 8-bit optimizer states do not fit the device. Saves: the states that are moved out; counted as on the
host. Costs: page faults in the step, on a quarter of the bytes. Not exact: optimizer states are rounded to
256 levels. Refused: on a CPU, and without bitsandbytes.

Source: Dettmers et al. 2021, arXiv:2110.02861, and 2023, arXiv:2305.14314, section 3.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import ON_A_GPU
from memtrain.memory.strategies.optimizer.base import other_optimizer, without_bitsandbytes

STRATEGY = other_optimizer(
    "paged_adamw_8bit",
    summary="8-bit optimizer states in memory that the driver moves to the host",
    saves="the optimizer states, under memory pressure",
    costs="optimizer states are rounded to 256 levels; page faults in the step",
    measured=ON_A_GPU,
    refusal=without_bitsandbytes,
    in_shards="8-bit states of shards are untested",
)
