"""Adafactor whose state survives saving and loading bit for bit, and whose step is whole for every tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import optimization

HALF = (torch.bfloat16, torch.float16)


class Adafactor(optimization.Adafactor):
    """transformers' Adafactor without a first moment: the same numbers, other order of writes.

    Torch casts loaded state to the parameter's dtype; its fp32 state must stay so. All that a tensor's step
    allocates is there before its state or its weights are written, so memory that runs out leaves no half
    step. Source: Shazeer and Stern 2018, arXiv:1804.04235, algorithm 4.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every tensor that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_tensor(parameter, group)
        return loss

    def _step_tensor(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float() if parameter.dtype in HALF else parameter.grad
        assert group["beta1"] is None, "This Adafactor has no first moment."
        before = self.state.get(parameter, {})
        step = before.get("step", 0) + 1
        wide = parameter.float() if parameter.dtype in HALF else parameter
        state: dict[str, Any] = {"step": step, "RMS": self._rms(wide)}
        rate = self._get_lr(group, state)
        decay = 1.0 - math.pow(step, group["decay_rate"])
        update = (gradient**2) + group["eps"][0]
        moments = self._moments(before, update, decay)
        if gradient.ndim >= 2:
            update = self._approx_sq_grad(*moments.values())
            update.mul_(gradient)
        else:
            update = moments["exp_avg_sq"].rsqrt().mul_(gradient)
        update.div_((self._rms(update) / group["clip_threshold"]).clamp_(min=1.0))
        update.mul_(rate)
        update = -update
        # Nothing is allocated from here on.
        self.state[parameter] = state | moments
        if group["weight_decay"] != 0:
            wide.add_(wide, alpha=-group["weight_decay"] * rate)
        wide.add_(update)
        if wide is not parameter:
            parameter.copy_(wide)

    @staticmethod
    def _moments(before: dict[str, Any], squares: Tensor, decay: float) -> dict[str, Tensor]:
        """Moving means of the squares: of rows and of columns, or of each number of a vector."""
        if squares.ndim < 2:
            means = {"exp_avg_sq": squares}
        else:
            means = {"exp_avg_sq_row": squares.mean(dim=-1), "exp_avg_sq_col": squares.mean(dim=-2)}
        zero = torch.zeros((), dtype=squares.dtype, device=squares.device)
        return {
            name: before[name].to(mean).mul(decay).add_(mean, alpha=1.0 - decay)
            if name in before
            else zero.expand_as(mean).mul(decay).add_(mean, alpha=1.0 - decay)
            for name, mean in means.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)


def restore_dtypes(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace loaded state that was cast by the saved tensors themselves, on the parameter's device."""
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for name, saved in state_dict["state"].get(index, {}).items():
            loaded = optimizer.state[parameter][name]
            if isinstance(saved, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                optimizer.state[parameter][name] = saved.to(parameter.device, copy=True)
