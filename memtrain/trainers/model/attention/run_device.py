"""The device on which a model computes, wherever its weights wait."""

from __future__ import annotations

import torch
from torch import nn


def run_device(model: nn.Module) -> torch.device:
    """The GPU of any of its tensors, where one is there; else the device of its first weight.

    Weights that live on the host are on the CPU, the embedding's among them; norms and tables are not.
    """
    tensors = (*model.parameters(), *model.buffers())
    return next((one.device for one in tensors if one.device.type == "cuda"), tensors[0].device)
