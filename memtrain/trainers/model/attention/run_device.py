"""The device on which a model computes, wherever its weights wait."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

from memtrain.trainers.runtime.weight_layout import waits_on_host


def run_device(model: nn.Module) -> torch.device:
    """The GPU of any of its tensors, where one is there; else the device of its first weight.

    Weights that live on the host are on the CPU, the embedding's among them; norms and tables are not. Shards
    that wait there are gathered on the device of their mesh, which is the current one.
    """
    first = next(model.parameters())
    if waits_on_host(first):
        return torch.device("cuda", torch.cuda.current_device())
    tensors = chain(model.parameters(), model.buffers())
    return next((one.device for one in tensors if one.device.type == "cuda"), first.device)
