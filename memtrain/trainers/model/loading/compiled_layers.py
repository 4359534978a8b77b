"""Compiled layers: torch.compile of every decoder layer by itself, its attention left as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from memtrain.errors import LaunchError
from memtrain.trainers.model.attention import NAMES
from memtrain.trainers.model.offload.checkpointing import draws_numbers

MOST_GRAPHS = 64
"""Graphs of one layer's code before torch goes on without compiling it. Taste."""
INSTEAD = "set model.compile: off"


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile every decoder layer of `model`, in place; from its next pass on.

    Lengths of rows are dynamic, and one compilation serves all layers of a kind. Attention reads who attends
    to whom from Python's numbers, which differ in every batch: it stays outside of the compiled parts.
    Kernels are fused, and numbers in between not rounded to the model's precision: the same but for that.

    Raises: LaunchError when the model has no such layers, or layers that draw random numbers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        name = type(model).__name__
        raise LaunchError(f"the layers of {name} cannot be compiled one by one", "model.compile", INSTEAD)
    if draws_numbers(model):
        reason = "the model drops numbers at random, and compiled passes draw them in another order"
        raise LaunchError(f"layers cannot be compiled: {reason}", "model.compile", INSTEAD)
    torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    _leave_attention_out()
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)


def _leave_attention_out() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in NAMES.values():
        plain: Any = ALL_ATTENTION_FUNCTIONS.get(name)
        if plain is not None and not getattr(plain, "_torchdynamo_disable", False):
            ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(plain))


def recompute_compiled(layer: Callable[..., Any], *inputs: Any) -> Any:
    """The layer's output, keeping only its input for the backward pass, where it is computed again compiled.

    torch's own checkpoint recomputes without compiling, and then finds other tensors than the compiled
    forward pass kept (torch/utils/checkpoint.py, `_run_fn_with_dynamo_disabled`).

    Shapes: inputs [1, N, width] first; the output has the same.

    Raises: LaunchError for layers whose output is no single tensor, or whose other inputs want gradients.
    """
    hidden, *others = inputs
    keywords = layer.keywords if isinstance(layer, partial) else {}
    if any(isinstance(one, Tensor) and one.requires_grad for one in _flat((others, keywords))):
        raise LaunchError("a layer's other inputs want gradients, and compiled layers are recomputed for one "
                          "input", "model.compile", INSTEAD)  # fmt: skip
    if not torch.is_grad_enabled():
        return layer(*inputs)
    # A tensor without numbers keeps the layer in the graph where its input has no gradient.
    return _Recomputed.apply(layer, others, torch.empty(0, requires_grad=True), hidden)


def _flat(found: Any) -> list[Any]:
    if isinstance(found, Mapping):
        return [leaf for one in found.values() for leaf in _flat(one)]
    if isinstance(found, tuple | list):
        return [leaf for one in found for leaf in _flat(one)]
    return [found]


class _Recomputed(torch.autograd.Function):
    """A layer that keeps its input; gradients of its weights are added in its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any, layer: Callable[..., Any], others: list[Any], joins: Tensor, hidden: Tensor
    ) -> Tensor:
        ctx.layer, ctx.others = layer, others
        ctx.save_for_backward(hidden)
        made = layer(hidden, *others)
        if not isinstance(made, Tensor):
            raise LaunchError(
                f"a layer's output is no tensor but a {type(made).__name__}", "model.compile", INSTEAD
            )
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (kept,) = ctx.saved_tensors
        hidden = kept.detach().requires_grad_(ctx.needs_input_grad[3])
        with torch.enable_grad():
            made = ctx.layer(hidden, *ctx.others)
        torch.autograd.backward([made], list(grads))
        return None, None, None, hidden.grad


def as_written(model: nn.Module) -> AbstractContextManager[Any]:
    """Context in which compiled layers of `model` run as they are written: completions grow by the token."""
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


@dataclass(slots=True)
class CompiledGraphs:
    """Number of graphs that were compiled, reported as it grows."""

    report: Callable[[int, str], None]
    """Takes (step, text)."""
    num_reported: int = 0

    def stepped(self, step: int) -> None:
        """Look after step number `step`, the first of which is 1."""
        number = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if number > self.num_reported:
            seconds = sum(torch._dynamo.utils.compilation_time_metrics.get("_compile.compile_inner", [0.0]))
            words = "layers were compiled" if not self.num_reported else "layers were compiled again"
            graphs = "1 graph" if number - self.num_reported == 1 else f"{number - self.num_reported} graphs"
            self.report(step, f"{words}: {graphs} in {seconds:.0f} s, {number} in total")
        self.num_reported = number
