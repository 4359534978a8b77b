"""The start-up check of padded rows: a row padded beside a longer row computes as it does alone."""

# B rows, T tokens of the longest, D: hidden width.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.length_rules import length_rules, probe_lengths
from memtrain.trainers.model.attention.isolation_check import LENGTHS, alone_bound, draw, undisturbed
from memtrain.trainers.model.attention.own_positions import upstream_positions
from memtrain.trainers.model.heads.backbone import backbone_of, base_model


def verify_padding(model: nn.Module, *, longest: int | None = 0, by_row: bool = False) -> float:
    """Run `model`, under the attention that it has, on a padded batch of two rows, and on each row alone.

    On short rows, and on rows at the lengths that rows of `longest` tokens come to and the configuration says
    to change something. `by_row`: as in `collate.pad_right`. The largest difference of hidden states, over
    the largest of them.

    Raises:
        LaunchError: a row is not what it is alone; it names the model's class.
    """
    base = base_model(model)
    # Rows that are padded never lie end to end: places are right of themselves.
    pairs = [LENGTHS, *probe_lengths(length_rules(base.config.to_dict()), longest, 0)]
    worst = 0.0
    for lengths in pairs:
        generator = torch.Generator().manual_seed(0)
        rows = [draw(base, length, generator) for length in lengths]
        with undisturbed(base), torch.no_grad():
            padded = _padded(base, rows, by_row=by_row)
            with upstream_positions(base):
                alone = [_padded(base, [row], by_row=False)[0] for row in rows]
        largest = max(hidden_TD.abs().max() for hidden_TD in alone).float()
        for found, expected in zip(padded, alone, strict=True):
            different = ((found.float() - expected.float()).abs().max() / largest).item()
            worst = different if not different <= worst else worst
        if not worst <= alone_bound(base, alone[0]):
            raise LaunchError(
                f"{type(base).__name__}: a row padded beside a longer one differs from the row alone (off by "
                f"{worst:.1e}; rows of {lengths[0]:,} and {lengths[1]:,} tokens)",
                "train.micro_batch_size",
                "set train.micro_batch_size: 1 (rows of one answer each), or use another model",
            )
    return worst


def _padded(model: Any, rows: list[Tensor], *, by_row: bool) -> list[Tensor]:
    """[T, D] of each row, in a batch that is padded on the right."""
    ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    position_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
    if by_row:
        last_B1 = torch.tensor([len(row) - 1 for row in rows], device=ids_BT.device)[:, None]
        position_BT = torch.minimum(position_BT, last_B1)
    hidden_BTD = backbone_of(model)(input_ids=ids_BT, position_ids=position_BT, use_cache=False)[0]
    return [hidden_TD[: len(row)] for hidden_TD, row in zip(hidden_BTD, rows, strict=True)]
