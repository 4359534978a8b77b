"""The probe of rows alone: rows of the planned step against plain transformers, one row at a time.

The plain side of a comparison has several rows in a batch too. What a model makes of a row because of the
rows beside it (LongRoPE, dynamic NTK, positions counted over a batch) both sides could share: a row alone
cannot.
"""

# T tokens of a row, D hidden size, N scored tokens.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from memtrain.trainers.model.attention import attention_switched
from memtrain.trainers.model.attention.isolation_check import alone_bound, own_kernel
from memtrain.trainers.model.attention.own_positions import upstream_positions
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.protocols.feed import Ints
from memtrain.trainers.reference.reference import evaluating
from memtrain.trainers.tools.verify.contamination import hidden_of, micro_batch_of, rows_of
from memtrain.trainers.tools.verify.record import Side

MOST_ROWS = 6
"""Rows that are computed alone: the longest and the shortest ones. Taste."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Differences that the probe saw, over the largest hidden state."""

    different: float
    """Largest distance of a row of the planned step from itself alone."""
    limit: float
    lengths: tuple[int, ...]
    """Tokens of the rows that were computed alone."""

    @property
    def fault(self) -> str:
        """Description of the fault; empty when there is none."""
        if self.different <= self.limit:
            return ""
        return f"a row differs from plain transformers' result for it alone: off by {self.different:.1e}"


def probe_alone(planned: Side, plain: Side, sequences: Ints) -> Alone:
    """Rows of a micro-batch of the planned side, each against a pass of transformers over that row alone."""
    device = planned.stepper.device
    micro_batch = micro_batch_of(planned.stepper.steps.feed.micro_batch(sequences)).to(device)
    padded = micro_batch_of(plain.stepper.steps.feed.micro_batch(sequences))
    row_N, width = rows_of(padded), padded.input_ids.shape[1]
    place_N = padded.scored_index.numpy() % width
    lengths = {int(row): _length(padded, int(row), place_N[row_N == row]) for row in np.unique(row_N)}
    longest_first = sorted(lengths, key=lambda row: -lengths[row])
    taken = dict.fromkeys(longest_first[: MOST_ROWS // 2] + longest_first[-MOST_ROWS // 2 :])
    base: Any = base_model(planned.built.model)
    worst, largest, limit = 0.0, 0.0, 0.0
    with torch.no_grad(), evaluating(planned.built.scorer):
        found_ND = hidden_of(planned.built, micro_batch.model_inputs(), micro_batch.scored_index)
        for row in taken:
            ids_T = padded.input_ids[row, : lengths[row]].to(device)
            with attention_switched(base, own_kernel(base, len(ids_T))), upstream_positions(base):
                alone_TD = base.get_decoder()(input_ids=ids_T[None], use_cache=False)[0][0]
            limit = alone_bound(base, alone_TD)
            places = torch.from_numpy(place_N[row_N == row]).to(device)
            own_ND = found_ND[torch.from_numpy(row_N == row).to(device)]
            worst = _larger(worst, float((own_ND - alone_TD.float()[places]).abs().max()))
            largest = max(largest, float(alone_TD.abs().max()))
    return Alone(worst / largest, limit, tuple(lengths[row] for row in taken))


def _length(padded: Any, row: int, places: NDArray[np.int64]) -> int:
    """Tokens of a padded row: up to where positions stop, else to the last scored token."""
    position_T = padded.position_ids[row]
    length = int(position_T[-1]) + 1
    return length if length < len(position_T) else min(length, int(places.max()) + 2)


def _larger(known: float, found: float) -> float:
    """The larger; a NaN is the largest."""
    return known if found <= known else found
