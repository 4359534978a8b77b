"""The start-up check on the real model: layers in slices are the layers in one piece, both ways."""

# T: tokens of a row, W: width of the model.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import NAMES, attention_switched
from memtrain.trainers.model.attention.isolation_check import alone_bound, draw, undisturbed
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.attention.run_device import run_device
from memtrain.trainers.model.heads.backbone import backbone_of, base_model
from memtrain.trainers.model.offload.weights import weights_of
from memtrain.trainers.model.streamed.apply import other_slices
from memtrain.trainers.model.streamed.layer_pass import FIX

LENGTHS = (13, 9)
"""Tokens of two documents; slices end inside both."""
SLICE_TOKENS = 5


def verify_streamed(model: nn.Module, backend: AttentionBackend) -> float:
    """Run `model`, whose layers are streamed, on two short documents in slices and in one piece.

    The larger difference of the hidden states, and of the gradient of the embeddings, over the largest of
    them. Whatever mixes tokens beside attention (a convolution, a state) shows here. The model is left as it
    was.

    Raises:
        LaunchError: slices are not the whole; it names the model's class.
    """
    base = base_model(model)
    layout = packed_layout(LENGTHS).to(run_device(base))
    ids_T = draw(base, layout.num_tokens, torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": ids_T[None], "position_ids": layout.position_ids, "layout": layout}
    with undisturbed(base), _host_weights_frozen(base), attention_switched(base, NAMES[backend]):
        with other_slices(base, 0):
            expected = _hidden_and_gradient(base, inputs)
        with other_slices(base, SLICE_TOKENS):
            found = _hidden_and_gradient(base, inputs)
    different = max(
        ((a.float() - b.float()).abs().max() / b.abs().max().float()).item()
        for a, b in zip(found, expected, strict=True)
    )
    # A NaN is neither below nor above: `not <=` makes it a fault.
    if not different <= alone_bound(base, expected[0]):
        raise LaunchError(
            f"{type(base).__name__}: layers in slices differ from whole layers (off by {different:.1e})",
            "memory.streamed_layers",
            FIX,
        )
    return different


@contextmanager
def _host_weights_frozen(base: nn.Module) -> Iterator[None]:
    """Context in which weights on the host get no gradient.

    Theirs goes by a way of its own, whatever autograd is asked for: it would wait for the first step, or be a
    step of an optimizer in the backward pass.
    """
    owner = weights_of(base)
    ids = owner.all_of_them() if owner is not None else set[int]()
    trained = [weight for weight in base.parameters() if id(weight) in ids and weight.requires_grad]
    for weight in trained:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in trained:
            weight.requires_grad_(True)


def _hidden_and_gradient(base: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """[T, W] the last hidden states, and the gradient of the embeddings for a gradient that is drawn."""
    leaves: list[Tensor] = []

    def begin_here(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1] * 1

    handle = base.get_input_embeddings().register_forward_hook(begin_here)
    try:
        with torch.enable_grad():
            # No leaf: the gradient of a layer's input takes its place.
            hidden_TW = backbone_of(base)(**inputs, use_cache=False)[0][0]
            drawn = torch.randn(hidden_TW.shape, generator=torch.Generator().manual_seed(1))
            (gradient,) = torch.autograd.grad(hidden_TW, leaves[0], drawn.to(hidden_TW))
    finally:
        handle.remove()
    return hidden_TW.detach(), gradient[0]
