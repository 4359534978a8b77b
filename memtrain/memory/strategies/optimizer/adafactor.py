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
    summary="second moments as a row and a column for each matrix",
    saves="nearly all optimizer states",
    costs="another optimizer, with another result",
    measured=ON_A_CPU,
    in_shards="it needs whole matrices, and each rank has only some of their rows",
)
