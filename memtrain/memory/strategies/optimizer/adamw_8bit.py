"""8-bit AdamW: the moments in blocks of 8 bits with a scale each.

When: the optimizer states of all weights do not fit, and host memory is not to be used. Saves: three quarters
of float32 states, half of bfloat16 ones. Costs: next to nothing. Not exact: optimizer states are rounded to
256 levels, so the trained weights differ; losses are reported to be on a par. Refused: on a CPU, and without
bitsandbytes.

Source: Dettmers et al. 2021, arXiv:2110.02861, section 2.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import ON_A_GPU
from memtrain.memory.strategies.optimizer.base import other_optimizer, without_bitsandbytes

STRATEGY = other_optimizer(
    "adamw_8bit",
    summary="optimizer states in 8 bits with a scale for each block",
    saves="half of bfloat16 moments, three quarters of float32 ones",
    costs="optimizer states are rounded to 256 levels",
    measured=ON_A_GPU,
    refusal=without_bitsandbytes,
    in_shards="8-bit states of shards are untested",
)
