"""NEFTune: uniform noise on the embeddings of training rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.heads.backbone import backbone_of

# B rows, T tokens, D width.


def add_noise(model: nn.Module, alpha: float) -> Callable[[], None]:
    """Add noise to the embeddings of `model` in training mode; returns the undo function.

    Each number gets noise from Uniform(-m, m) with m = alpha / sqrt(T * D), T the tokens of the sequence it
    belongs to. With `position_ids` that restart (rows laid end to end) T is that of each row, not of the
    whole. Under a layout of shared prompts a row is a prompt with one completion; the tokens of a prompt,
    drawn once, get the mean variance of its rows. The noise comes from torch's random state, so a resumed run
    draws the same.

    Source: Jain et al. 2023, arXiv:2310.05914, algorithm 1.
    """
    seen: dict[str, Any] = {"positions": None, "layout": None}
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
    assert isinstance(base, PreTrainedModel), "Noise goes on the embeddings of a transformers model."

    def note_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen["positions"], seen["layout"] = kwargs.get("position_ids"), kwargs.get("layout")

    def noisy(module: nn.Module, args: Any, embedding_BTD: Tensor) -> Tensor:
        if not module.training or not torch.is_grad_enabled():
            return embedding_BTD
        layout: Layout | None = seen["layout"]
        if layout is not None and layout.to_prompt is not None:
            length_BT = shared_row_lengths(layout, embedding_BTD.device)
        else:
            length_BT = row_lengths(embedding_BTD, seen["positions"])
        bound_BT = alpha / (length_BT * embedding_BTD.shape[-1]).sqrt()
        noise_BTD = torch.empty_like(embedding_BTD).uniform_(-1.0, 1.0)
        return embedding_BTD + noise_BTD * bound_BT[..., None].to(embedding_BTD.dtype)

    handles = [
        backbone_of(base).register_forward_pre_hook(note_positions, with_kwargs=True),
        base.get_input_embeddings().register_forward_hook(noisy),
    ]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def row_lengths(embedding_BTD: Tensor, positions_BT: Tensor | None) -> Tensor:
    """float32 [B, T]: the number of tokens in each token's row. Rows start where positions are 0."""
    B, T, _ = embedding_BTD.shape
    if positions_BT is None:
        return torch.full((B, T), float(T), device=embedding_BTD.device)
    row_BT = (positions_BT == 0).long().cumsum(-1)
    counts = torch.zeros(B, T + 1, device=embedding_BTD.device)
    counts.scatter_add_(1, row_BT, torch.ones_like(row_BT, dtype=counts.dtype))
    return counts.gather(1, row_BT)


def shared_row_lengths(layout: Layout, device: torch.device | str) -> Tensor:
    """float32 [1, T]: a completion's token has the length of its prompt and itself; a prompt's token the
    harmonic mean of its rows' lengths, whose noise has the mean of their variances."""
    assert layout.to_prompt is not None, "Prompts are shared."
    bounds, num_prompts = layout.within.cu_query.to(device).long(), len(layout.to_prompt.key_bounds) - 1
    length_S, ends_G = bounds.diff(), layout.to_prompt.cu_query[1:].to(device).long()
    owner_A = torch.searchsorted(ends_G, bounds[num_prompts:-1] - layout.num_prompt_tokens, right=True)
    row_A = (length_S[owner_A] + length_S[num_prompts:]).float()
    zeros_G = torch.zeros(num_prompts, device=device)
    inverse_G = zeros_G.index_add(0, owner_A, 1.0 / row_A)
    count_G = zeros_G.index_add(0, owner_A, torch.ones_like(row_A))
    row_S = torch.cat([count_G / inverse_G, row_A])
    return row_S.repeat_interleave(length_S, output_size=layout.num_tokens)[None]
