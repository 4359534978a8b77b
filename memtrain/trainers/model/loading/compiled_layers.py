"""Compiled layers: torch.compile of every decoder layer by itself, its attention left as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from memtrain.errors import LaunchError
from memtrain.trainers.model.attention import NAMES
from memtrain.trainers.model.offload.checkpointing import draws_numbers

MOST_GRAPHS = 64
"""Graphs of one layer's code before torch goes on without compiling it. Taste."""
INSTEAD = "set model.compile: off"
BACKEND = "_memtrain_compiled_by"
"""Attribute of a compiled layer: the backend of torch.compile."""


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
        layer.__dict__[BACKEND] = backend


def _leave_attention_out() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in NAMES.values():
        plain: Any = ALL_ATTENTION_FUNCTIONS.get(name)
        if plain is not None and not getattr(plain, "_torchdynamo_disable", False):
            ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(plain))


@cache
def recompute_compiled() -> Callable[..., Any]:
    """The function that checkpoints compiled layers. The compiler itself must not look into it."""
    return torch.compiler.disable(_recompute)


def _recompute(layer: Callable[..., Any], *inputs: Any) -> Any:
    """The layer's output, keeping only its inputs for the backward pass, where it is computed again compiled.

    torch's own checkpoint recomputes without compiling, and then finds other tensors than the compiled
    forward pass kept (torch/utils/checkpoint.py, `_run_fn_with_dynamo_disabled`). The order of the tensors
    that a pass keeps is that of its graphs, and the second pass runs the same.
    """
    layer = _compiled(layer)
    if not torch.is_grad_enabled():
        return layer(*inputs)
    again = _Again(layer, inputs)
    with saved_tensors_hooks(again.number, again.tensor):
        return layer(*inputs)


def _compiled(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A layer as it is given to be checkpointed, compiled.

    Since transformers 5.23 that is the `forward` as it is written, which is inside of a compiled layer but
    not compiled when it is called alone; before, it was the layer's call.
    """
    if not isinstance(layer, partial) or getattr(layer.func, "__self__", None) is not None or not layer.args:
        return layer
    module = layer.args[0]
    backend = module.__dict__.get(BACKEND)
    if backend is None:
        return layer
    return partial(_forward(layer.func, backend), *layer.args, **layer.keywords)


@cache
def _forward(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(forward, backend=backend, dynamic=True)


class _Again:
    """The tensors that a pass of a layer keeps: numbers at first; made by a second pass when one is read.

    Of the inputs the tensors are kept by a node of the graph, so that hooks around the layer move them.
    Gathered weights of FSDP2 are in place by then: its hook on the layer's output brings them.
    """

    def __init__(self, layer: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self._layer = layer
        self._inputs = [None if isinstance(one, Tensor) else one for one in inputs]
        self._places = [place for place, one in enumerate(inputs) if isinstance(one, Tensor)]
        tensors = [inputs[place] for place in self._places]
        self._wanting = [tensor.requires_grad for tensor in tensors]
        # A tensor without numbers gives the node a gradient to have, whatever the inputs want.
        self._kept: Any = _Keeps.apply(torch.empty(0, requires_grad=True), *tensors)
        self._count = 0
        self._made: dict[int, Tensor] = {}

    def number(self, tensor: Tensor) -> int:
        """The place of a tensor among those that the pass keeps."""
        self._count += 1
        return self._count - 1

    def tensor(self, number: int) -> Tensor:
        """The tensor of that place, handed out once."""
        if number not in self._made:
            self._make()
        return self._made.pop(number)

    def _make(self) -> None:
        made: list[Tensor] = []

        def keep(tensor: Tensor) -> None:
            made.append(tensor.detach())

        inputs = list(self._inputs)
        tensors = self._kept.grad_fn.saved_tensors
        for place, tensor, wants in zip(self._places, tensors, self._wanting, strict=True):
            inputs[place] = tensor.detach().requires_grad_(wants)
        with torch.enable_grad(), saved_tensors_hooks(keep, _unread):
            self._layer(*inputs)
        if len(made) != self._count:
            raise LaunchError(
                f"a layer kept {self._count} tensors and {len(made)} when it was computed again",
                "model.compile",
                INSTEAD,
            )
        self._made = dict(enumerate(made))


def _unread(kept: object) -> Tensor:
    raise AssertionError("The graph of a second pass is thrown away.")


class _Keeps(torch.autograd.Function):
    """Keeps tensors and makes nothing of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[1:])
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise AssertionError("Nothing is made of it.")


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
