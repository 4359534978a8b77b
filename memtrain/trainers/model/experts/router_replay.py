"""Routers that send tokens where the sampler sent them: its choices are recorded, and used in the update.

A token's experts are those that were chosen as it was read or written; how much each of them counts is
computed from the router's scores as they are now, so that gradients reach the router as ever. Where the
router chooses as the sampler did, no number moves.

Source: Ma et al. 2025 (rollout routing replay), arXiv:2510.11370, section 3.
"""

# T tokens of a row, L routers, E experts, K experts of a token

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memtrain.errors import LaunchError
from memtrain.trainers.model.experts.load_balance import routers_of

OWN = -1
"""In place of an expert: the router chooses."""


class RouterReplay:
    """The routers of a model: their choices are taken, given, or left alone."""

    def __init__(self, model: nn.Module) -> None:
        routers: list[Any] = list(routers_of(model))
        self.num_routers, self.num_chosen = len(routers), int(routers[0].top_k)
        self._routes_LTK: Tensor | None = None
        self._taken: list[Tensor | None] | None = None
        for number, router in enumerate(routers):
            router.forward = partial(self._routed, number, router, router.forward)

    def send(self, routes_TLK: Tensor | None) -> None:
        """Let the coming passes, and what is computed again for them, use these experts; `OWN`, or None
        for all: those of the routers themselves."""
        self._routes_LTK = None if routes_TLK is None else routes_TLK.transpose(0, 1).long()

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """A pass inside chooses by itself; afterwards the function gives its choices, int16 [T, L, K]."""
        taken: list[Tensor | None] = [None] * self.num_routers
        self._routes_LTK, self._taken = None, taken
        try:
            yield lambda: torch.stack([one for one in taken if one is not None], 1).short()
        finally:
            self._taken = None

    def _routed(self, number: int, router: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._routes_LTK is None:
            output = plain(*args, **kwargs)
            if self._taken is not None:
                self._taken[number] = output[2].detach()
            return output
        with _Sent(self._routes_LTK[number], int(router.num_experts)) as sent:
            output = plain(*args, **kwargs)
        if sent.num_calls != 1:
            raise LaunchError(
                f"{type(router).__name__} does not choose its experts by one topk, so that those of the "
                "sampler cannot be used",
                "router_replay",
                "set it to false, or report this model",
            )
        return output


class _Sent(TorchFunctionMode):
    """A choice of the K highest among E experts gives the scores of the experts that are given."""

    def __init__(self, routes_TK: Tensor, num_experts: int) -> None:
        super().__init__()
        self._routes_TK, self._num_experts = routes_TK, num_experts
        self.num_calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores_TE: Tensor = args[0]
        if scores_TE.shape[-1] != self._num_experts or found.indices.shape != self._routes_TK.shape:
            return found
        self.num_calls += 1
        chosen_TK = torch.where(self._routes_TK == OWN, found.indices, self._routes_TK)
        return torch.return_types.topk((scores_TE.gather(-1, chosen_TK), chosen_TK))
