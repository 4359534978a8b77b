"""Positions by each row's own length, where transformers counts over all rows of a batch.

LongRoPE and dynamic NTK choose the angles of a whole batch by its longest row (dynamic NTK: by the longest of
all batches so far), and Llama 4 scales queries by their place among all tokens that lie end to end. Here a
row of a batch, padded or laid end to end, gets what transformers gives it alone in a newly loaded model.
"""

# B rows of the batch, T places of each, D width of what a rotary embedding gives for a place.

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from memtrain.memory.model_shape.length_rules import ROTARY

Turned = Tensor | tuple[Tensor, ...]
"""Output of a rotary embedding: cosines and sines, or complex numbers, [B, T, D] each."""


class RotaryByRow(nn.Module):
    """Put before a class of rotary embeddings: the angles of each place follow its own row's length."""

    is_upstream: bool = False
    """transformers' own choice is made, as in a model that has met no row before."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Turned:
        """cos and sin (or the class's outputs), for places that count up by one within a row."""
        kind = _kind_of(self, layer_type)
        given = () if layer_type is None else (layer_type,)
        upstream: Any = super().forward
        if kind not in ROTARY or position_ids.dim() != 2:
            return upstream(x, position_ids, *given)
        if self.is_upstream:
            # A single place lets dynamic NTK forget the longest row that it has met.
            upstream(x[:, :1], torch.zeros_like(position_ids[:, :1]), *given)
            return upstream(x, position_ids, *given)
        with torch.no_grad():
            return _by_row(self, kind, x, position_ids, layer_type)


def take_own_positions(model: nn.Module) -> None:
    """Let every rotary embedding of `model` that follows the length of its batch follow that of each row."""
    for module in model.modules():
        if follows_row_length(module) and not isinstance(module, RotaryByRow):
            upstream = type(module)
            # The name stays: transformers initialises modules by it.
            module.__class__ = type(upstream.__name__, (RotaryByRow, upstream), {})


def follows_row_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose angles depend on the length of the row."""
    kinds = getattr(module, "rope_type", None)
    kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}  # pyright: ignore
    return bool(kinds & set(ROTARY))  # pyright: ignore


@contextmanager
def upstream_positions(model: nn.Module) -> Iterator[None]:
    """Inside, rows get transformers' own positions: right for a single row, and the yardstick of ours."""
    ours = [module for module in model.modules() if isinstance(module, RotaryByRow)]
    for module in ours:
        module.is_upstream = True
    try:
        yield
    finally:
        for module in ours:
            module.is_upstream = False


def row_lengths(position_BT: Tensor) -> Tensor:
    """int64 [B, T], how many tokens the row of each place has: within a row, positions count up by one.

    A completion that goes on after a shared prompt belongs to a row as long as both.
    """
    T = position_BT.shape[1]
    is_end_BT = torch.ones_like(position_BT, dtype=torch.bool)
    is_end_BT[:, :-1] = position_BT[:, 1:] != position_BT[:, :-1] + 1
    place_T = torch.arange(T, device=position_BT.device)
    end_BT = torch.where(is_end_BT, place_T, T).flip(1).cummin(1).values.flip(1)
    return position_BT.gather(1, end_BT) + 1


def _kind_of(module: nn.Module, layer_type: str | None) -> str:
    kinds: Any = module.rope_type
    return str(kinds if layer_type is None or not isinstance(kinds, dict) else kinds[layer_type])  # pyright: ignore


def _by_row(module: nn.Module, kind: str, x: Tensor, position_BT: Tensor, layer_type: str | None) -> Turned:
    length_BT = row_lengths(position_BT)
    most = _most(module, kind, layer_type)
    original = cast(Tensor, getattr(module, _named(layer_type, "original_inv_freq")))
    # A class that looks at the longest place itself (PhiMoE) finds that of a short row.
    turned = _turned(module, original, x, position_BT.clamp(max=most - 1), layer_type)
    if kind == "longrope":
        longer = _frequencies(module, kind, most + 1, x.device, layer_type)
        return _picked(length_BT > most, _turned(module, longer, x, position_BT, layer_type), turned)
    for length in torch.unique(length_BT[length_BT > most]).tolist():
        own = _frequencies(module, kind, length, x.device, layer_type)
        places_BT = position_BT.clamp(max=length - 1)
        turned = _picked(length_BT == length, _turned(module, own, x, places_BT, layer_type), turned)
    return turned


def _most(module: Any, kind: str, layer_type: str | None) -> int:
    """Tokens up to which a row is turned by the original angles."""
    if kind == "dynamic":
        return int(module.original_max_seq_len)
    section = module.config.rope_parameters
    return int((section if layer_type is None else section[layer_type])["original_max_position_embeddings"])


def _frequencies(module: Any, kind: str, length: int, device: torch.device, layer_type: str | None) -> Tensor:
    """transformers' angles for a row of `length` tokens."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {} if layer_type is None else {"layer_type": layer_type}
    return ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=length, **given)[0]


def _turned(
    module: Any, frequencies: Tensor, x: Tensor, position_BT: Tensor, layer_type: str | None
) -> Turned:
    """Output of the class for some frequencies, without choosing them."""
    name = _named(layer_type, "inv_freq")
    classes = type(module).__mro__
    upstream: Any = classes[classes.index(RotaryByRow) + 1]
    plain = inspect.unwrap(upstream.forward)
    before = getattr(module, name)
    setattr(module, name, frequencies.to(x.device))
    try:
        return plain(module, x, position_BT, *(() if layer_type is None else (layer_type,)))
    finally:
        setattr(module, name, before)


def _named(layer_type: str | None, name: str) -> str:
    return name if layer_type is None else f"{layer_type}_{name}"


def _picked(is_taken_BT: Tensor, taken: Turned, others: Turned) -> Turned:
    if isinstance(taken, tuple):
        return tuple(torch.where(is_taken_BT[..., None], a, b) for a, b in zip(taken, others, strict=True))
    assert isinstance(others, Tensor), "The same class gives the same kind."
    return torch.where(is_taken_BT[..., None], taken, others)
