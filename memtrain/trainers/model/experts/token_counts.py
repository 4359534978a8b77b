"""Tokens that each expert of each layer gets, counted as the experts are called."""

# L layers with experts, E experts, N tokens, K experts of a token

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memtrain.trainers.model.experts.forward import is_experts


class TokenCounts:
    """Counts of the forward passes since they were last taken; padding counts, recomputation does not."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.is_on = False
        self._num_experts = max(int(layer.num_experts) for layer in layers)  # pyright: ignore[reportArgumentType]
        self._counts: dict[int, Tensor] = {}
        self._num_layers = len(layers)
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(_Counting(self, number), with_kwargs=True)

    def add(self, number: int, chosen_NK: Tensor) -> None:
        """Count the tokens of a layer's call, unless it is a recomputation."""
        # A layer that is computed again in the backward pass is asked by its engine.
        if not self.is_on or torch._C._current_graph_task_id() != -1:
            return
        flat = chosen_NK.detach().reshape(-1)
        counts = self._counts.get(number)
        if counts is None:
            counts = torch.zeros(self._num_experts, dtype=torch.int64, device=flat.device)
            self._counts[number] = counts
        counts.scatter_add_(0, flat, torch.ones_like(flat))

    def take(self) -> Tensor | None:
        """[L, E] the counts, which begin again; None where no expert was called."""
        counts, self._counts = self._counts, {}
        if not counts:
            return None
        return torch.stack([counts[number] for number in sorted(counts)])


class _Counting:
    """The hook on a layer's experts; in a copy of the model it counts for the copy."""

    def __init__(self, counts: TokenCounts, number: int) -> None:
        self.counts, self.number = counts, number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = args[1] if len(args) > 1 else kwargs.get("top_k_index", kwargs.get("router_indices"))
        if isinstance(chosen, Tensor):
            self.counts.add(self.number, chosen)


def token_counts(model: nn.Module) -> TokenCounts | None:
    """Counts of a model's experts from now on; None for a model without any."""
    layers = [module for module in model.modules() if is_experts(module)]
    return TokenCounts(layers) if layers else None
