"""Muon for the hidden matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.recipes.optim import Optim

Group = dict[str, Any]
HIDDEN = "is_hidden"
"""Key of a parameter group: whether Muon steps it."""


def split_hidden(groups: list[Group], model: nn.Module) -> list[Group]:
    """`groups` with hidden matrices (two-dimensional, of no embedding and no head) in groups of their own.

    Raises: LaunchError when there is none.
    """
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    heads = [m.get_output_embeddings() for m in model.modules() if isinstance(m, PreTrainedModel)]
    outer_ids = {id(p) for module in (*outer, *heads) if module is not None for p in module.parameters()}
    parts: list[Group] = []
    for group in groups:
        for is_hidden in (True, False):
            chosen = [p for p in group["params"] if (p.ndim == 2 and id(p) not in outer_ids) == is_hidden]
            if chosen:
                parts.append(group | {"params": chosen, HIDDEN: is_hidden})
    if not any(part[HIDDEN] for part in parts):
        raise LaunchError("no hidden matrix is trainable, and Muon steps nothing else", "optim.kind")
    return parts


class Muon(Optimizer):
    """Steps hidden matrices by Muon and the rest by AdamW, at one learning rate.

    Muon's update is scaled to the size of AdamW's, so that a rate chosen for AdamW holds.

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv:2502.16982, eq. 4 (0.2 * sqrt(max(rows,
    columns))).
    """

    def __init__(self, groups: list[Group], recipe: Optim) -> None:
        self._hidden = torch.optim.Muon(
            [group for group in groups if group[HIDDEN]],
            lr=recipe.lr,
            momentum=recipe.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        rest = [group for group in groups if not group[HIDDEN]]
        self._rest = (
            torch.optim.AdamW(rest, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)
            if rest
            else None
        )
        super().__init__([group for part in self._parts() for group in part.param_groups], {"lr": recipe.lr})
        self._share()

    def _parts(self) -> list[Optimizer]:
        return [self._hidden] if self._rest is None else [self._hidden, self._rest]

    def _share(self) -> None:
        """Let both parts work on this optimizer's groups and state, so that there is one of each to save."""
        for part, is_hidden in zip(self._parts(), (True, False), strict=False):
            part.param_groups = [group for group in self.param_groups if group[HIDDEN] == is_hidden]
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """One step of both parts."""
        loss = closure() if closure is not None else None
        for part in self._parts():
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        super().load_state_dict(state_dict)
        self._share()
