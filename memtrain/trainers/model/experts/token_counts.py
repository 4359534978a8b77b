"""Tokens that each expert of each layer gets, counted as the experts are called."""

# L layers with experts, E experts, T tokens of a micro-batch, N tokens of a call, K experts of a token

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.trainers.model.experts.forward import is_experts
from memtrain.trainers.model.heads.backbone import backbone_of, base_model


class TokenCounts:
    """Counts of one pass at a time. Padding does not count, nor does a layer that is computed again.

    The pass that counts inside `counting` has gradients where its caller has them: that of a reference, which
    goes through the same experts with its adapter off, has none.
    """

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        self._num_experts = max(int(layer.num_experts) for layer in layers)  # pyright: ignore[reportArgumentType]
        self.num_layers = len(layers)
        self._counts_LE: Tensor | None = None
        self._is_token_T: Tensor | None = None
        self._is_on = self._is_counted = self._has_gradients = False
        self._at: list[int] = []
        """Tokens that each layer had of the pass: a streamed layer gets its tokens in slices."""
        backbone_of(base_model(model)).register_forward_pre_hook(_Beginning(self))
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(_Counting(self, number), with_kwargs=True)

    @contextmanager
    def counting(self, is_token_T: Tensor | None) -> Iterator[None]:
        """The passes inside are counted; `is_token_T`: bool, false for padding, None: every token counts."""
        self._is_token_T, self._counts_LE = is_token_T, None
        self._is_on, self._has_gradients = True, torch.is_grad_enabled()
        try:
            yield
        finally:
            self._is_on, self._is_counted, self._is_token_T = False, False, None

    def begin(self) -> None:
        """A pass through the model begins."""
        self._is_counted = self._is_on and self._has_gradients == torch.is_grad_enabled()
        self._at = [0] * self.num_layers

    def add(self, number: int, chosen_NK: Tensor) -> None:
        """Count the tokens of a layer's call, unless it is a recomputation."""
        # A layer that is computed again in the backward pass is asked by its engine.
        if not self._is_counted or torch._C._current_graph_task_id() != -1:
            return
        if self._counts_LE is None:
            shape = (self.num_layers, self._num_experts)
            self._counts_LE = torch.zeros(shape, dtype=torch.int64, device=chosen_NK.device)
        first, count = self._at[number], len(chosen_NK)
        self._at[number] += count
        is_token_N = torch.ones((), dtype=torch.bool, device=chosen_NK.device).expand(count)
        if self._is_token_T is not None:
            is_token_N = self._is_token_T[first : first + count]
            assert len(is_token_N) == count, "Experts see the tokens of their micro-batch."
        added_NK = is_token_N[:, None].expand_as(chosen_NK).long()
        self._counts_LE[number].scatter_add_(0, chosen_NK.detach().reshape(-1), added_NK.reshape(-1))

    def take(self) -> Tensor | None:
        """int64 [L, E], the counts of the last `counting`; None where no expert was called."""
        found, self._counts_LE = self._counts_LE, None
        return found


class _Beginning:
    """The hook on a backbone; in a copy of the model it counts for the copy."""

    def __init__(self, counts: TokenCounts) -> None:
        self.counts = counts

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.counts.begin()


class _Counting:
    """The hook on a layer's experts; likewise."""

    def __init__(self, counts: TokenCounts, number: int) -> None:
        self.counts, self.number = counts, number

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        chosen = args[1] if len(args) > 1 else kwargs.get("top_k_index", kwargs.get("router_indices"))
        if isinstance(chosen, Tensor):
            self.counts.add(self.number, chosen)


def token_counts(model: nn.Module) -> TokenCounts | None:
    """Counts of a model's experts from now on; None for a model without any."""
    layers = [module for module in model.modules() if is_experts(module)]
    return TokenCounts(model, layers) if layers else None
