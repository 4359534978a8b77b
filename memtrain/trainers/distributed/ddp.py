"""Gradients summed over the ranks during the last backward pass, in a way that no failing rank can hang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtrain.memory.plan.sizes import SMALL_GRADIENT
from memtrain.trainers.optim.step import DistributedStep, set_wide


@dataclass(slots=True)
class _Sent:
    """A parameter's sum under way."""

    parameter: nn.Parameter
    tensor: Tensor
    work: dist.Work


class GradientAllReduce:
    """Sums the gradients of `parameters` over all ranks, each in place: no buckets, no second copy.

    Those of half-precision weights are float32: made, added and sent so.

    Large gradients leave in a fixed order, from the last parameter to the first, as the backward pass makes
    them. `finish` sends what is left, zeros where there is no gradient. So a rank whose pass broke off takes
    part in every collective that the others have begun, and nobody waits for ever: whether the sums are good
    is for the ranks to agree on afterwards. A parameter that got no gradient on any rank keeps none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._large = [p for p in reversed(parameters) if p.nbytes >= SMALL_GRADIENT]
        self._small = [p for p in reversed(parameters) if p.nbytes < SMALL_GRADIENT]
        self._is_last_pass = False
        self._ready: set[nn.Parameter] = set()
        self._sent: list[_Sent] = []
        for parameter in self._large:
            parameter.register_post_accumulate_grad_hook(self._made)

    def engine(self) -> DistributedStep:
        """Engine by which a step reaches the other ranks."""
        return DistributedStep(begin=self.begin, last_pass=self.sending, finish=self.finish)

    def begin(self, model: nn.Module, num_micro_batches: int) -> None:
        """Gradients are summed over ranks even where a step has one micro-batch."""
        set_wide((*self._large, *self._small), is_wide=True)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """A backward pass inside is the last of its step: its gradients leave as they are made."""
        self._is_last_pass = True
        try:
            yield
        finally:
            self._is_last_pass = False

    def finish(self) -> None:
        """Send the remaining gradients, wait for all, and keep the sums. On all ranks."""
        had = [parameter.grad is not None for parameter in (*self._large, *self._small)]
        for parameter in self._large[len(self._sent) :]:
            self._send(parameter)
        flat = [self._flat(same) for same in _by_dtype(self._small)]
        flags = torch.tensor(had, dtype=torch.int32, device=self._device)
        works = [_summed(tensor) for tensor in (*flat, flags)]
        for sent in self._sent:
            sent.work.wait()
        for work in works:
            work.wait()
        anywhere = flags.tolist()
        for sent, count in zip(self._sent, anywhere, strict=False):
            sent.parameter.grad = sent.tensor if count else None
        counts = dict(zip(self._small, anywhere[len(self._large) :], strict=True))
        for same, tensor in zip(_by_dtype(self._small), flat, strict=True):
            for parameter, summed in zip(same, tensor.split([p.numel() for p in same]), strict=True):
                self._keep(parameter, summed, is_anywhere=counts[parameter] > 0)
        self._sent.clear()
        self._ready.clear()

    @property
    def _device(self) -> torch.device:
        return (self._large or self._small)[0].device

    def _made(self, parameter: Tensor) -> None:
        if not self._is_last_pass:
            return
        assert isinstance(parameter, nn.Parameter)
        self._ready.add(parameter)
        while len(self._sent) < len(self._large) and self._large[len(self._sent)] in self._ready:
            self._send(self._large[len(self._sent)])

    def _send(self, parameter: nn.Parameter) -> None:
        tensor = parameter.grad if parameter.grad is not None else _nothing(parameter)
        self._sent.append(_Sent(parameter, tensor, _summed(tensor)))

    def _flat(self, same: Sequence[nn.Parameter]) -> Tensor:
        """[numbers] of some parameters of one dtype, end to end."""
        parts = [(p.grad if p.grad is not None else _nothing(p)).reshape(-1) for p in same]
        return torch.cat(parts)

    def _keep(self, parameter: nn.Parameter, summed: Tensor, *, is_anywhere: bool) -> None:
        if not is_anywhere:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = summed.view_as(parameter).clone()
        else:
            parameter.grad.copy_(summed.view_as(parameter))


def _nothing(parameter: nn.Parameter) -> Tensor:
    """Zeros in the precision of a parameter's gradients."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def _summed(tensor: Tensor) -> dist.Work:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None, "An asynchronous collective returns its work."
    return work


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in groups whose gradients have one dtype, in a fixed order."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.grad_dtype or parameter.dtype, []).append(parameter)
    return list(groups.values())
