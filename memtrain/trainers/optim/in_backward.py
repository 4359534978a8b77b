"""The optimizer step inside the backward pass: weights move as soon as a few gradients are whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.memory.plan.sizes import backward_bucket
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.optim.step import DistributedStep
from memtrain.trainers.runtime.device_waits import host_acts


class InBackward:
    """Steps `optimizer` for a few weights at a time and frees their gradients: all are never there together.

    The same bits as a step after the backward pass, with one micro-batch a step, one process and no clipping
    (the plan sees to that). Autograd calls a weight's hook once, when all its uses have added their part, and
    no use of it is left that would read the weight.

    Source: Lv et al. 2023 (LOMO), arXiv:2306.09782, algorithm 1, here with any optimizer.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._norms: dict[Tensor, Tensor] = {}
        self._is_real = True
        self._makes_states = True
        self._waiting: list[Tensor] = []
        self._bucket_bytes = backward_bucket(sum(parameter.nbytes for parameter in parameters))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._made)

    def engine(self) -> DistributedStep:
        """Engine by which a step reaches the weights: all is done when the backward pass is."""
        return DistributedStep(
            begin=lambda model, num_micro_batches: None,
            backward=self._backward,
            clip=self._norm,
            step=lambda optimizer: None,
            dry_step=self._dry_step,
        )

    @contextmanager
    def _dry_step(self, makes_states: bool) -> Iterator[None]:
        """Weights stay where they are inside; optimizer states appear, or are not touched."""
        self._is_real, self._makes_states = False, makes_states
        try:
            yield
        finally:
            self._is_real = True
            self._norms.clear()

    def _made(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "The hook is called with a gradient."
        self._norms[parameter] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        if not self._is_real:
            gradient.zero_()
        self._waiting.append(parameter)
        if sum(waiting.nbytes for waiting in self._waiting) >= self._bucket_bytes:
            self._step()

    def _backward(self, loss: Tensor) -> None:
        """The backward pass, with the step of whatever is left at its end."""
        self._waiting.clear()
        loss.backward()
        self._step()

    def _step(self) -> None:
        """Step the weights that wait for it, and free their gradients."""
        waiting, self._waiting = self._waiting, []
        if waiting and (self._is_real or self._makes_states):
            host_acts("weights are stepped within the pass, by the rate of their step")
            with only(self._optimizer, waiting):
                self._optimizer.step()
        for parameter in waiting:
            parameter.grad = None

    def _norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Norm of all gradients of the pass, as if they were there together."""
        assert max_norm == float("inf"), "Gradients that are gone cannot be scaled."
        norms = [self._norms[parameter] for parameter in parameters if parameter in self._norms]
        self._norms.clear()
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


@contextmanager
def only(optimizer: Optimizer, wanted: Sequence[Tensor]) -> Iterator[None]:
    """The optimizer has these parameters alone inside: a step looks at none of the hundreds of others."""
    if isinstance(optimizer, MasterWeights):
        with optimizer.only(wanted):
            yield
        return
    ids = set(map(id, wanted))
    groups = [(group, group["params"]) for group in optimizer.param_groups]
    for group, parameters in groups:
        group["params"] = [one for one in parameters if id(one) in ids]
    try:
        yield
    finally:
        for group, parameters in groups:
            group["params"] = parameters
