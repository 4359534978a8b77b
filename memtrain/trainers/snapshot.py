"""What a checkpoint holds, and how a run goes on from it: trained weights, optimizer, position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.trainers.method import FollowsSteps
from memtrain.trainers.position import Position
from memtrain.trainers.run.checkpoint import Checkpoint, Parts
from memtrain.trainers.run.state_io import load_state, save_state


def parts_of(
    model: nn.Module,
    optimizer: Optimizer,
    position: Position,
    follower: FollowsSteps | None = None,
    kept: Callable[[], object] | None = None,
) -> Parts:
    """The parts to save; `kept`: the rollout at hand, of methods that write their completions.

    No random state: every draw is named by its step and not by those before it.
    """

    def writer(state: Callable[[], object]) -> Callable[[Path], None]:
        return lambda path: save_state(state(), path)

    parts = {
        "weights": writer(lambda: trained_weights(model)),
        "optimizer": writer(optimizer.state_dict),
        "loop": writer(lambda: asdict(position)),
    }
    if kept is not None:
        parts["rollout"] = writer(kept)
    return parts if follower is None else parts | {"follower": writer(follower.kept_state)}


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer,
    position: Position,
    follower: FollowsSteps | None = None,
) -> None:
    """Put weights, optimizer and position where the checkpoint left them."""
    load_weights(checkpoint, model)
    optimizer.load_state_dict(load_state(checkpoint.part("optimizer")))
    for name, value in load_state(checkpoint.part("loop")).items():
        setattr(position, name, value)
    if follower is not None:
        _fill(follower.kept_state(), load_state(checkpoint.part("follower")))


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Put the trained weights where the checkpoint left them."""
    _fill(trained_weights(model), load_state(checkpoint.part("weights")))


def _fill(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    assert saved.keys() == tensors.keys(), "A checkpoint of this recipe has the weights that it trains."
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name; tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
