"""The contamination probe: change the tokens of one row, and see whether another row's logits move."""

# T tokens of a micro-batch, D hidden size, N scored tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memtrain.trainers.build.components import Built
from memtrain.trainers.model.attention.isolation_check import seen_bound
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.protocols.feed import Ints
from memtrain.trainers.reference.reference import evaluating
from memtrain.trainers.tools.verify.record import Side

MOST_ROWS = 4
"""Rows that are changed one after the other: the first ones, of which each has neighbours. Taste."""
MOST_SEQUENCES = 8
"""Sequences of the micro-batch that is looked at. Taste."""
MOVED = 1e-4
"""Least movement of a row at its own change, over the largest hidden state; with less, the probe is blind."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Movements that the probe saw, each over the largest hidden state."""

    others_moved: float
    """Movement of a row when another was changed: exactly 0 but for experts and quantized weights."""
    limit: float
    own_moved: float
    """Least movement of a changed row."""
    num_rows: int
    """Rows that were changed."""
    rows_together: int
    """Rows of the micro-batch."""

    @property
    def fault(self) -> str:
        """Description of the fault; empty when there is none."""
        if not self.others_moved <= self.limit:
            return (
                f"a row attends to another: its hidden states change by {self.others_moved:.1e} of the "
                "largest"
            )
        if not self.own_moved > MOVED:
            return f"the probe sees nothing: a row that was changed moved by {self.own_moved:.1e} only"
        return ""


def probe_contamination(planned: Side, plain: Side, sequences: Ints) -> Seen | None:
    """Change rows of a micro-batch of the planned side, one after the other, without gradients.

    Which token belongs to which row is taken from the plain side, where each row has a line of its own: a
    layout that mixes rows up cannot hide it. Logits are a function of each token's last hidden state, which
    is what is compared, at every scored token. None where there is but one row.
    """
    taken = sequences[:MOST_SEQUENCES]
    device = planned.stepper.device
    micro_batch = micro_batch_of(planned.stepper.steps.feed.micro_batch(taken)).to(device)
    row_N = rows_of(micro_batch_of(plain.stepper.steps.feed.micro_batch(taken)))
    rows = np.unique(row_N)
    if len(rows) < 2:
        return None
    index_N = micro_batch.scored_index.cpu().numpy()
    with torch.no_grad(), evaluating(planned.built.scorer):
        before_ND = hidden_of(planned.built, micro_batch.model_inputs(), micro_batch.scored_index)
        largest = float(before_ND.abs().max())
        others, own, changed = 0.0, float("inf"), 0
        for row in rows:
            # A token that two answers are predicted from belongs to their prompt.
            places = np.setdiff1d(index_N[row_N == row], index_N[row_N != row])
            if not len(places) or changed == MOST_ROWS:
                continue
            changed += 1
            inputs = _with_other_tokens(planned.built, micro_batch.model_inputs(), torch.from_numpy(places))
            after_ND = hidden_of(planned.built, inputs, micro_batch.scored_index)
            moved_N = (after_ND - before_ND).abs().amax(1) / largest
            is_own_N = torch.from_numpy(row_N == row).to(moved_N.device)
            others = _larger(others, float(moved_N[~is_own_N].max()))
            own = min(own, float(moved_N[is_own_N].max()))
    limit = seen_bound(base_model(planned.built.model), before_ND)
    return Seen(others, limit, own, changed, len(rows)) if changed else None


def micro_batch_of(batch: Any) -> Any:
    """The token batch inside a method's batch: of answers, or of answers with their rewards."""
    inside = getattr(batch, "answers", batch)
    return getattr(inside, "micro_batch", inside)


def rows_of(padded: Any) -> Ints:
    """int64 [N], the row of each scored token of a padded batch."""
    return padded.scored_index.numpy() // padded.input_ids.shape[1]


def hidden_of(built: Built, inputs: dict[str, Any], index_N: Tensor) -> Tensor:
    """[N, D], the last hidden states of some tokens, float32."""
    backbone: Any = base_model(built.model).get_decoder()
    hidden_BTD = backbone(**inputs, use_cache=False).last_hidden_state
    return hidden_BTD.flatten(0, 1).index_select(0, index_N).float()


def _with_other_tokens(built: Built, inputs: dict[str, Any], places: Tensor) -> dict[str, Any]:
    """The inputs with the next token of the vocabulary at some places of the flattened rows."""
    vocab_size = base_model(built.model).config.get_text_config().vocab_size
    ids_BT = inputs["input_ids"]
    flat_T = ids_BT.flatten().clone()
    places = places.to(flat_T.device)
    flat_T[places] = (flat_T[places] + 1) % vocab_size
    return inputs | {"input_ids": flat_T.view_as(ids_BT)}


def _larger(known: float, found: float) -> float:
    """The larger; a NaN is the largest."""
    return known if found <= known else found
