"""The load-balance loss of a mixture's routers, over all tokens of an optimizer step.

    E * sum_e f_e * p_e,   f_e = tokens sent to e / tokens,   p_e = mean of the router's probability of e

Means are over tokens and layers together, as in transformers, which takes those of one forward pass: there
the loss depends on how a step is cut into micro-batches. Here they are over the whole step and all ranks. The
counts are taken first, in passes without gradients; with f known, the loss is a sum over tokens, and each
router adds the gradient of its own tokens in the backward pass. Padding counts for nothing; the token of a
prompt that several answers share counts as often.

Source: Fedus et al. 2021 (Switch Transformer), arXiv:2101.03961, equations 4 to 6; transformers 5.23,
load_balancing_loss_func.
"""

# T tokens of a micro-batch end to end, E experts, K experts of a token

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.trainers.model.heads.backbone import backbone_of, base_model


class LoadBalance:
    """The load-balance loss of a model's routers; `coefficient` times this loss is added to the method's."""

    def __init__(self, model: nn.Module, coefficient: float) -> None:
        self._coefficient = coefficient
        self._weight_T: Tensor | None = None
        self._sums: Tensor | None = None
        """float64 [2 * E + 1] while counting: tokens and probabilities of each expert, and tokens."""
        self._pull_E: Tensor | None = None
        """float32: a probability of each expert adds so much to the loss of the step; None outside steps."""
        self._known_E: Tensor | None = None
        self.value = torch.zeros(())
        """Scalar on the device: the loss of the last step that was counted, without its coefficient."""
        self._begins_with = torch.ones(())
        """Gradient that the backward pass began with: engines scale the loss (float16, DeepSpeed)."""
        self._was_seen = False
        routers = routers_of(model)
        self._num_experts: int = routers[0].num_experts  # pyright: ignore
        for router in routers:
            router.register_forward_hook(self._routed)

    def of_tokens(self, weight_T: Tensor) -> None:
        """Take the coming pass's tokens: how many tokens of rows each stands for, 0 for padding."""
        self._weight_T = weight_T

    def beside(self, loss: Tensor) -> None:
        """Let the coming backward pass add to the gradients of `loss`, on its scale."""
        if loss.requires_grad:
            loss.register_hook(self._began)

    def _began(self, grad: Tensor) -> None:
        self._begins_with = grad.detach().float()

    @contextmanager
    def counting(self, device: torch.device, *, num_ranks: int) -> Iterator[None]:
        """Passes inside are counted; afterwards passes with gradients add to the loss.

        Called by all ranks together, also where the passes of one break off.

        Raises: LaunchError when no pass went through a router.
        """
        sums = torch.zeros(2 * self._num_experts + 1, dtype=torch.float64, device=device)
        self._sums, self._pull_E, self._was_seen = sums, None, False
        try:
            yield
        finally:
            self._sums = None
            if num_ranks > 1:
                dist.all_reduce(sums)
        if not self._was_seen:
            raise LaunchError(
                "no router ran in the forward pass: the load-balance loss cannot be computed",
                "train.router_aux_loss_coef",
                "set it to 0, or report this model",
            )
        self._take(sums)

    def _take(self, sums: Tensor) -> None:
        sent_E, probability_E = sums[: self._num_experts], sums[self._num_experts : -1]
        pull_E = self._num_experts * sent_E / sums[-1].clamp(min=1).square()
        # At one place from step to step: a captured pass reads it there.
        if self._known_E is None or self._known_E.device != sums.device:
            self._known_E, self.value = pull_E.float(), sums[-1].clone()
        self.value.copy_(pull_E @ probability_E)
        self._pull_E = self._known_E.copy_(self._coefficient * pull_E)

    def _routed(self, router: nn.Module, args: Any, output: Any) -> Any:
        """Count the tokens of a pass, or carry the gradient of their load into its scores."""
        logits_TE, scores_TK, chosen_TK = output[:3]
        if self._sums is not None:
            self._count(logits_TE, chosen_TK)
            return None
        if self._pull_E is None or not torch.is_grad_enabled() or not scores_TK.requires_grad:
            return None
        probability_TE = logits_TE.float().softmax(-1)
        loss = (probability_TE @ self._pull_E) @ self._weights(logits_TE)
        return (logits_TE, _Carry.apply(scores_TK, loss, self), chosen_TK, *output[3:])

    def _count(self, logits_TE: Tensor, chosen_TK: Tensor) -> None:
        assert self._sums is not None, "Called while counting."
        self._was_seen = True
        num_experts, weight_T = self._num_experts, self._weights(logits_TE)
        spread_N = weight_T[:, None].expand_as(chosen_TK).reshape(-1)
        self._sums[:num_experts].index_add_(0, chosen_TK.reshape(-1), spread_N.double())
        self._sums[num_experts:-1] += (weight_T @ logits_TE.float().softmax(-1)).double()
        self._sums[-1] += weight_T.double().sum()

    def _weights(self, logits_TE: Tensor) -> Tensor:
        assert self._weight_T is not None, "Weights of tokens are set before a pass."
        assert len(self._weight_T) == len(logits_TE), "A router sees all tokens of a micro-batch at once."
        return self._weight_T


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers whose logits transformers takes for its load-balance loss, copies that are trained too.

    Raises: LaunchError when the model tells none.
    """
    backbone = backbone_of(base_model(model))
    recorded: Any = getattr(type(backbone), "_can_record_outputs", {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)
    found = [module for module in backbone.modules() if kind is not None and isinstance(module, kind)]
    if not found:
        raise LaunchError(
            f"{type(backbone).__name__} has no router that transformers records",
            "train.router_aux_loss_coef",
            "set it to 0",
        )
    return found


class _Carry(torch.autograd.Function):
    """Scores as they are; their backward pass begins that of a loss beside them, as the step's own began."""

    @staticmethod
    def forward(ctx: Any, scores_TK: Tensor, loss: Tensor, balance: LoadBalance) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.balance = balance
        return scores_TK.view_as(scores_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_TK, ctx.balance._begins_with.to(grad_TK.device), None
