"""Adafactor: second moments as a row and a column for each matrix, no first moments.

When: the moments of all weights do not fit. Saves: nearly all of the optimizer's bytes. Costs: a float32 copy
of one tensor and its update at a time. Not exact: another optimizer: its learning rate is scaled and clipped
differently. Refused: never.

Source: Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4.
"""

from __future__ import annotations

from memtrain.memory.strategies.base import ON_A_CPU
from memtrain.memory.strategies.optimizer.base import other_optimizer

STRATEGY = other_optimizer(
    "adafactor",
    says="second moments as a row and a column for each matrix",
    saves="nearly all of the moments",
    costs="another optimizer, with other weights at the end",
    measured=ON_A_CPU,
    in_shards="it needs whole matrices, and a rank has some of their rows",
)
