"""A module that treats each token by itself, in slices: the final norm, which is no layer."""

# B: rows, T: tokens of a row, W: width of the model.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.trainers.model.streamed.in_place import ForwardInPlace
from memtrain.trainers.model.streamed.weight_sums import WeightSums, trained_weights


class TokenwiseForward(ForwardInPlace):
    """The module's forward pass, in place of its class's, over a slice at a time."""

    def __call__(self, x_BTW: Tensor) -> Tensor:
        """The module's output; keeps its input for the backward pass."""
        if not self.slice_tokens or x_BTW.dim() != 3 or x_BTW.shape[1] <= self.slice_tokens:
            return self.plain(x_BTW)
        if not torch.is_grad_enabled():
            return self.output(x_BTW)
        out: Tensor = TokenwisePass.apply(self, x_BTW, *trained_weights(self.module))
        return out

    def output(self, x_BTW: Tensor) -> Tensor:
        """The output slice by slice, without a graph."""
        y_BTW = torch.empty_like(x_BTW)
        with torch.no_grad():
            for part in self.parts(x_BTW):
                y_BTW[:, part] = self.plain(x_BTW[:, part])
        return y_BTW

    def parts(self, x_BTW: Tensor) -> Iterator[slice]:
        """The slices of a row."""
        T = x_BTW.shape[1]
        for begin in range(0, T, self.slice_tokens):
            yield slice(begin, min(begin + self.slice_tokens, T))


class TokenwisePass(torch.autograd.Function):
    """A token-wise module in the graph, recomputed slice by slice."""

    @staticmethod
    def forward(ctx: Any, run: TokenwiseForward, x_BTW: Tensor, *weights: nn.Parameter) -> Tensor:
        """The module's output."""
        ctx.run = run
        ctx.save_for_backward(x_BTW)
        return run.output(x_BTW)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and of each weight."""
        run: TokenwiseForward = ctx.run
        # Without its history: see StreamedLayer.
        x_BTW = ctx.saved_tensors[0].detach()
        (dy_BTW,) = grads
        # In the place of the input, which nothing needs any more.
        dx_BTW = x_BTW if ctx.needs_input_grad[1] else None
        with WeightSums(run.module) as sums:
            for part in run.parts(x_BTW):
                with torch.enable_grad():
                    x_BSW = x_BTW[:, part].detach().requires_grad_(dx_BTW is not None)
                    y_BSW = run.plain(x_BSW)
                torch.autograd.backward(y_BSW, dy_BTW[:, part])
                if dx_BTW is not None:
                    assert x_BSW.grad is not None, "The output depends on the input."
                    dx_BTW[:, part] = x_BSW.grad
                del x_BSW, y_BSW
            return None, dx_BTW, *sums.taken()
