"""Adafactor whose state survives saving and loading bit for bit."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from transformers import optimization


class Adafactor(optimization.Adafactor):
    """transformers' Adafactor. Torch casts loaded state to the parameter's dtype; its fp32 state must stay
    so."""

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
