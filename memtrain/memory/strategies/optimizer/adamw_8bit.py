"""8-bit AdamW: the moments in blocks of 8 bits with a scale each.

When: the moments of all weights do not fit, and the host is to be left alone. Saves: three quarters of
float32 moments, half of bfloat16 ones. Costs: next to nothing. Not exact: moments are rounded to 256 levels,
so other weights are learnt; losses are reported to be on a par. Refused: on a CPU, and without bitsandbytes.

Source: Dettmers et al. 2021, arXiv:2110.02861, section 2.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import ON_A_GPU
from memtrain.memory.strategies.optimizer.base import other_optimizer, without_bitsandbytes

STRATEGY = other_optimizer(
    "adamw_8bit",
    says="moments in 8 bits with a scale for each block",
    saves="half of bfloat16 moments, three quarters of float32 ones",
    costs="moments are rounded to 256 levels",
    measured=ON_A_GPU,
    refusal=without_bitsandbytes,
    in_shards="8-bit states of shards were never tried",
)
