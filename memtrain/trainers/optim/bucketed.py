"""The base of optimizers that hold their states in another form between two steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.trainers.optim.buckets import step_by_bucket
from memtrain.trainers.runtime.oom_errors import attempt

Entry = dict[str, Any]
"""State of one parameter: tensors and plain values by name."""


class BucketedOptimizer(Optimizer):
    """An optimizer around another, whose states are taken out for the step, a bucket at a time, and put back.

    `state_dict` is that of the optimizer inside, in the form that the states have between steps.
    """

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state

    @abstractmethod
    def buckets(self, parameters: list[Tensor]) -> Iterable[list[Tensor]]:
        """Parameters that are stepped together."""

    @abstractmethod
    def taken_out(self, entry: Entry, parameter: Tensor) -> Entry:
        """State as the optimizer inside reads it, in new tensors, also where it could not be put back."""

    @abstractmethod
    def put_back(self, entry: Entry, parameter: Tensor, before: Entry) -> Entry:
        """State as it is between steps, in the tensors of `before` where they serve."""

    @abstractmethod
    def loaded(self, entry: Entry, parameter: Tensor) -> Entry:
        """State as it is between steps, of one in a file."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """Step every tensor that has a gradient, bucket by bucket.

        When it breaks off, the gradients of buckets that are done are gone, and all others are there.
        """
        loss = closure() if closure is not None else None
        step_by_bucket(self._parameters(), self.buckets, self._step_bucket)
        return loss

    def state_dict(self) -> Entry:
        """State of the optimizer inside, as it is between steps."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Entry) -> None:
        """Continue exactly where `state_dict` was taken."""
        # torch would bring states beside the parameter, in its dtype.
        self.inner.load_state_dict(state_dict | {"state": {}})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.state.clear()
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, self._parameters(), strict=True):
            if index in state_dict["state"]:
                self.state[parameter] = self.loaded(state_dict["state"][index], parameter)

    def _step_bucket(self, bucket: list[Tensor], gradients: dict[Tensor, Tensor]) -> None:
        waiting = {parameter: self.state.get(parameter, {}) for parameter in bucket}
        self.state.update({p: self.taken_out(entry, p) for p, entry in waiting.items() if entry})
        for parameter in bucket:
            parameter.grad = gradients[parameter]
        versions = {parameter: parameter._version for parameter in bucket}
        try:
            self.inner.step()
        except BaseException:
            for parameter in bucket:
                if parameter._version == versions[parameter]:
                    self.state[parameter] = waiting[parameter]
                else:
                    self._put_back(parameter, waiting[parameter])
            raise
        finally:
            for parameter in bucket:
                parameter.grad = None
        for parameter in bucket:
            self._put_back(parameter, waiting[parameter])

    def _put_back(self, parameter: Tensor, before: Entry) -> None:
        """Put the states of a stepped tensor back; they stay as they are if memory has no room for it."""
        entry = self.state[parameter]
        made, is_done = attempt(lambda: self.put_back(entry, parameter, before))
        if is_done:
            assert made is not None
            self.state[parameter] = made

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]
