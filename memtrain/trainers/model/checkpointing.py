"""Activation checkpointing: keep the input of every n-th layer and recompute its inside later.

The layers are switched one by one through the flag and the function that transformers' layers carry (their
names have not changed from 5.16 on), never through the model's enabling methods: those were renamed, and
enabling again through them forgets `every` and the offloader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from memtrain.errors import LaunchError

Run = Callable[..., Any]
"""`run(layer, *inputs)` computes the layer so that its inside is not kept. The random state is restored for
the recomputation, so dropout drops the same numbers twice."""


def recompute(layer: Callable[..., Any], *inputs: Any) -> Any:
    """The layer's outputs, keeping only its inputs for the backward pass.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.1.
    """
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=True)


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """The checkpointed layers of one model."""

    layers: tuple[GradientCheckpointingLayer, ...]
    """Layers whose inside is recomputed."""
    others: tuple[GradientCheckpointingLayer, ...]
    """Layers whose inside is kept."""

    def switch(self, is_on: bool) -> None:
        """Recompute, or keep everything. Which layers and how does not change."""
        for layer in self.layers:
            layer.gradient_checkpointing = is_on

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep everything until the block ends: for a pass without gradients, and for generation, whose cache
        transformers drops in a checkpointed layer."""
        self.switch(False)
        try:
            yield
        finally:
            self.switch(True)


def checkpoint_layers(model: nn.Module, every: int, run: Run = recompute) -> Checkpointing:
    """Checkpoint layers 0, every, 2 * every, ... of `model`, from now on and in training mode only.

    Works on a model with or without an adapter: inputs need no gradient of their own. Calling it again
    replaces what was set before.

    Raises: LaunchError when the model's layers cannot be checkpointed.
    """
    assert every > 0, "Checkpointing of every 0-th layer is no checkpointing: do not call this."
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise LaunchError(
            f"the layers of {type(model).__name__} cannot be checkpointed",
            "memory.activation_checkpointing",
            "set it to off",
        )
    for layer in layers:
        layer._gradient_checkpointing_func = run  # pyright: ignore[reportArgumentType]
        layer.gradient_checkpointing = False
    chosen = Checkpointing(
        tuple(layers[::every]), tuple(layer for i, layer in enumerate(layers) if i % every != 0)
    )
    chosen.switch(True)
    return chosen
