"""Muon for the hidden matrices and AdamW for everything else, as one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.recipes.sections.optim import Optim

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
        raise LaunchError(
            "no hidden matrix is trainable, and Muon steps only those", "optim.kind", "set it to adamw"
        )
    return parts


class HiddenMuon(torch.optim.Muon):
    """torch's Muon, the same numbers. What a tensor's step allocates is there before anything is written."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """Step every matrix that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_matrix(parameter, group)
        return loss

    def _step_matrix(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"]
        ahead = momentum.lerp(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            ahead = gradient.lerp(ahead, group["momentum"])
        update = orthogonalized(ahead, group["ns_coefficients"], group["ns_steps"], group["eps"])
        del ahead
        # Nothing is allocated from here on.
        momentum.lerp_(gradient, 1 - group["momentum"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalized(
    matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """The nearest matrix with singular values near 1, in bfloat16, as torch's Muon computes it.

    Source: Jordan et al. 2024 (Muon), Newton-Schulz iteration.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    ortho = matrix.bfloat16()
    ortho = ortho.T if is_tall else ortho
    # A bfloat16 matrix is not copied by the cast, and it is the caller's.
    ortho = ortho.div(ortho.norm().clamp(min=eps))
    for _ in range(num_steps):
        gram = ortho @ ortho.T
        ortho = torch.addmm(ortho, torch.addmm(gram, gram, gram, beta=b, alpha=c), ortho, beta=a)
    return ortho.T if is_tall else ortho


class Muon(Optimizer):
    """Steps hidden matrices by Muon and the rest by AdamW, at one learning rate.

    Muon's update is scaled to the size of AdamW's, so that a rate chosen for AdamW holds.

    Source: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv:2502.16982, eq. 4 (0.2 * sqrt(max(rows,
    columns))).
    """

    def __init__(self, groups: list[Group], recipe: Optim) -> None:
        self._hidden = HiddenMuon(
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
        """Let both parts work on this optimizer's groups and state, so that a save has one of each."""
        for part, is_hidden in zip(self._parts(), (True, False), strict=False):
            part.param_groups = [group for group in self.param_groups if group[HIDDEN] == is_hidden]
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """Step both parts."""
        loss = closure() if closure is not None else None
        for part in self._parts():
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        super().load_state_dict(state_dict)
        self._share()
