"""DAPO's dynamic sampling: prompts in place of those whose completions all have the same reward.

Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.2, eq. 11. Here the replacements are drawn from all
prompts by the seed and the number of the rollout, so that a run that goes on draws the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.online.rollout.advantages import weighted_rewards, zero_std_groups


@dataclass(slots=True)
class Judged:
    """Completions of some prompts, with their rewards."""

    rows: list[int]
    samples: list[list[Sample]]
    reward_AF: NDArray[np.float64]
    metrics: dict[str, float]
    seconds_generation: float
    seconds_rewards: float


def with_signal(
    first: Judged,
    ask: Callable[[list[int], list[int], int], Judged],
    *,
    weight_F: Tensor,
    group_size: int,
    most: int,
    order: NDArray[np.int64],
) -> Judged:
    """`first` with groups without signal replaced, at most `most` times; `groups_resampled` counts them.

    `ask`: judged completions for (rows, their places in the rollout, the number of the try). `order`: prompts
    in the order in which they replace others.
    """
    made, used = first, set(first.rows)
    count = 0
    for number in range(1, most + 1):
        reward_A = weighted_rewards(torch.from_numpy(made.reward_AF), weight_F)
        places = zero_std_groups(reward_A, group_size).nonzero()[:, 0].tolist()
        rows = spare_rows(order, used, len(places))
        if not rows:
            break
        places = places[: len(rows)]
        other = ask(rows, places, number)
        used |= set(rows)
        count += len(rows)
        _put(made, other, places, group_size)
    made.metrics["groups_resampled"] = float(count)
    return made


def spare_rows(order: NDArray[np.int64], used: Collection[int], count: int) -> list[int]:
    """The first `count` prompts of `order` that were not used; fewer where there are no more."""
    return [row for row in order.tolist() if row not in used][:count]


def _put(made: Judged, other: Judged, places: list[int], group_size: int) -> None:
    """Put groups in the places of others. Metrics of the replaced stay in the means of the first try."""
    for number, place in enumerate(places):
        made.rows[place], made.samples[place] = other.rows[number], other.samples[number]
        there, here = place * group_size, number * group_size
        made.reward_AF[there : there + group_size] = other.reward_AF[here : here + group_size]
    made.seconds_generation += other.seconds_generation
    made.seconds_rewards += other.seconds_rewards
