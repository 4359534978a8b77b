"""Activation checkpointing: keep the input of every n-th layer and recompute its inside later.

The layers are switched one by one through the flag and the function that transformers' layers carry (the same
from 5.16 to 5.23), never through the model's enabling methods: those were renamed, and enabling again through
them forgets `every` and the offloader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from memtrain.errors import LaunchError
from memtrain.trainers.runtime.random_states import RandomStates, random_states, restored

Run = Callable[..., Any]
"""`run(layer, *inputs)` computes the layer in the forward pass, and decides the kept tensors."""


def recompute(layer: Callable[..., Any], *inputs: Any) -> Any:
    """The layer's outputs, keeping only its inputs for the backward pass.

    The random state is restored for the recomputation: dropout drops the same numbers twice.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.1.
    """
    first = next((one for one in inputs if isinstance(one, Tensor)), None)
    device = torch.device("cpu") if first is None else first.device
    return checkpoint(
        layer,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), _Again(device)),
    )


class _Again:
    """Context of a layer's second pass, which draws what the first one drew; entered by every backward pass
    over a graph that is kept. Ours, and not torch's, so that a recording notes the states."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: RandomStates = random_states(device)
        self._inside: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        inside = restored(self._device, is_on=True)
        inside.__enter__()
        self._inside.append(inside)
        self._states.restore()

    def __exit__(self, *fault: Any) -> None:
        self._inside.pop().__exit__(*fault)


def recompute_undrawn(layer: Callable[..., Any], *inputs: Any) -> Any:
    """The same for layers that draw no numbers: the host neither reads nor sets the random state."""
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)


def recomputing(model: nn.Module) -> Run:
    """The way in which layers of `model` are computed again."""
    return recompute if draws_numbers(model) else recompute_undrawn


def draws_numbers(model: nn.Module) -> bool:
    """Whether layers of `model` may draw random numbers: they drop something, or jitter a router's scores."""
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    config = getattr(model, "config", None)
    return drops or config is None or _names_drawing(config.to_dict())


def _names_drawing(config: Mapping[Any, Any]) -> bool:
    for key, value in config.items():
        if isinstance(value, Mapping) and _names_drawing(value):  # pyright: ignore[reportUnknownArgumentType]
            return True
        name = str(key)
        if ("drop" in name or "jitter" in name) and isinstance(value, int | float) and value > 0:
            return True
    return False


DRAWN_BY = ("attention_dropout", "dropout_p", "jitter_noise", "router_jitter_noise")
"""Attributes of transformers' modules that draw without a module of their own."""


def drops(layer: nn.Module) -> bool:
    """Whether a pass over `layer` draws random numbers now."""
    return any(one.training and _draws(one) for one in layer.modules())


def _draws(module: nn.Module) -> bool:
    if isinstance(module, nn.Dropout):
        return module.p > 0
    found = (getattr(module, name, 0) for name in DRAWN_BY)
    return any(isinstance(one, int | float) and one > 0 for one in found)


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Checkpointing of a model's layers in training."""

    layers: tuple[GradientCheckpointingLayer, ...]
    """Layers whose inside is recomputed."""
    others: tuple[GradientCheckpointingLayer, ...]
    """Layers whose inside is kept, in a way of its own; empty when it is the usual way."""

    def switch(self, is_on: bool) -> None:
        """Run the layers so, or as usual. Which layers and how does not change."""
        for layer in (*self.layers, *self.others):
            layer.gradient_checkpointing = is_on

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the layers as usual until the block ends.

        For passes without gradients, and for generation: transformers drops the cache of a checkpointed
        layer.
        """
        self.switch(False)
        try:
            yield
        finally:
            self.switch(True)


def checkpoint_layers(
    model: nn.Module,
    every: int,
    run: Run | None = None,
    run_others: Run | None = None,
    *,
    keep: int = 0,
    run_away: Run | None = None,
) -> Checkpointing:
    """Run layers 0, every, 2 * every, ... of `model` by `run`, from now on and in training mode only.

    `every` 0 is no layer at all; `run` is `recomputing(model)` where it is not given. All of them but the
    last `keep` run by `run_away`, where that is given. The other layers run by `run_others`, or as usual.
    Works with and without an adapter: inputs need no gradient of their own. A second call replaces the first.

    Raises: LaunchError when the model has no layers that can be checkpointed.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise LaunchError(
            f"the layers of {type(model).__name__} cannot be checkpointed",
            "memory.activation_checkpointing",
            "set it to off",
        )
    chosen = tuple(layers[::every]) if every else ()
    others = tuple(layer for layer in layers if layer not in chosen)
    for layer in others:
        layer.gradient_checkpointing = False
    away = chosen[: max(0, len(chosen) - keep)]
    run = run or recomputing(model)
    for group, how in ((away, run_away or run), (chosen[len(away) :], run), (others, run_others)):
        for layer in group:
            layer._gradient_checkpointing_func = how  # pyright: ignore[reportArgumentType]
    checkpointing = Checkpointing(chosen, others if run_others is not None else ())
    checkpointing.switch(True)
    return checkpointing
