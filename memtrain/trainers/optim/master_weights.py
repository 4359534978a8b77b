"""Float32 master weights: the optimizer steps exact copies, the half-precision model follows, rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.memory.plan.sizes import MASTER_BUCKET
from memtrain.trainers.optim.buckets import buckets_of
from memtrain.trainers.optim.master_forms import form_of, give_all
from memtrain.trainers.optim.offload import OffloadedStates
from memtrain.trainers.runtime.weight_layout import local_of

Group = dict[str, Any]


class MasterWeights(Optimizer):
    """An optimizer over float32 numbers of half-precision parameters; its moments are float32 too.

    `form` says what stays of the numbers between steps (master_forms.py); it waits on the host where it is
    `away`. Parameters that are float32 already are stepped as they are. Copies are made here: load the
    model's weights before, or a state that was saved.

    Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.1.
    """

    def __init__(
        self,
        groups: list[Group],
        build: Callable[[list[Group]], Optimizer],
        lr: float,
        form: str = "float32",
        seed: int = 0,
        *,
        away: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr})
        halves = [p for group in groups for p in group["params"] if p.dtype != torch.float32]
        # In the place of numbers that do not stay: a tensor of their shape, as Muon asks for, of 4 bytes.
        # With weights on the host, some are on the device still.
        self._blanks = {device: torch.zeros((), device=device) for device in {one.device for one in halves}}
        self.form = form_of(form, halves, seed=seed, away=away)
        self._masters: list[list[Tensor]] = [[self._leaf(p) for p in group["params"]] for group in groups]
        self._inner = build(
            [group | {"params": masters} for group, masters in zip(groups, self._masters, strict=True)]
        )
        self.state = self._inner.state

    def _leaf(self, parameter: Tensor) -> Tensor:
        """Key of a parameter in the optimizer inside: itself, its copy, or a tensor that is filled."""
        if parameter.dtype == torch.float32:
            return parameter
        if self.form.stays:
            return self.form.take(parameter)
        # Its own counter of writes, where a view would share that of all others.
        return self._blanks[parameter.device].expand(parameter.shape).data

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """Step the copies, bucket by bucket, and write them back into the model.

        When it breaks off, the gradients of buckets that are done are gone, and all others are there.
        """
        loss = closure() if closure is not None else None
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"], inner["weight_decay"] = outer["lr"], outer["weight_decay"]
        gradients = {parameter: parameter.grad for parameter, _ in self.pairs()}
        left = dict(gradients)
        for parameter in gradients:
            parameter.grad = None
        try:
            buckets = [*self._buckets(), []]
            for bucket, following in pairwise(buckets):
                self._look_ahead(bucket, following, gradients)
                self._step_bucket(bucket, gradients, left)
            left = gradients
        finally:
            self._end_copies()
            for _, master in self.pairs():
                master.grad = None
            for parameter, gradient in left.items():
                parameter.grad = gradient
        return loss

    @contextmanager
    def only(self, wanted: Sequence[Tensor]) -> Iterator[None]:
        """Context in which this optimizer, and the one inside, have these parameters alone."""
        ids = set(map(id, wanted))
        outer, inner, masters = self.param_groups, self._inner.param_groups, self._masters
        parameters = [(of["params"], inside["params"]) for of, inside in zip(outer, inner, strict=True)]
        places = [[n for n, one in enumerate(held) if id(one) in ids] for held, _ in parameters]
        for of, inside, which in zip(outer, inner, places, strict=True):
            of["params"] = [of["params"][n] for n in which]
            inside["params"] = [inside["params"][n] for n in which]
        self._masters = [[held[n] for n in which] for held, which in zip(masters, places, strict=True)]
        try:
            yield
        finally:
            self._masters = masters
            for of, inside, (held, copies) in zip(outer, inner, parameters, strict=True):
                of["params"], inside["params"] = held, copies

    def _step_bucket(
        self,
        bucket: list[tuple[Tensor, Tensor]],
        gradients: dict[Tensor, Tensor | None],
        left: dict[Tensor, Tensor | None],
    ) -> None:
        """Step a bucket, and take stepped weights out of `left`, also where the step breaks off."""
        pairs = [(parameter, master) for parameter, master in bucket if gradients[parameter] is not None]
        versions: dict[Tensor, int] = {}
        is_done = False
        try:
            for parameter, master in pairs:
                if parameter is not master and not self.form.stays:
                    master.data = self.form.take(parameter)
            for (_, master), gradient in zip(pairs, _widened([gradients[p] for p, _ in pairs]), strict=True):
                master.grad = gradient
            versions = {master: master._version for _, master in pairs}
            if pairs:
                self._inner.step()
            is_done = True
        finally:
            stepped: list[tuple[Tensor, Tensor]] = []
            for parameter, master in pairs:
                # An inner step by bucket or by tensor may have done a part before it broke off.
                is_written = master in versions and master._version != versions[master]
                if is_done or is_written or (master in versions and master.grad is None):
                    stepped.append((parameter, master))
            give_all(self.form, [(weight, copy) for weight, copy in stepped if weight is not copy])
            for parameter, _ in stepped:
                del left[parameter]
            for parameter, master in pairs:
                master.grad = None
                if parameter is not master and not self.form.stays:
                    master.data = self._blanks[parameter.device].expand(parameter.shape)

    def _look_ahead(
        self,
        bucket: list[tuple[Tensor, Tensor]],
        following: list[tuple[Tensor, Tensor]],
        gradients: dict[Tensor, Tensor | None],
    ) -> None:
        """Begin the copies from the host that a bucket needs, then the copies for the next bucket."""
        here, later = (
            [pair for pair in one if gradients[pair[0]] is not None] for one in (bucket, following)
        )
        if isinstance(self._inner, OffloadedStates):
            self._inner.coming = [master for _, master in later]
        if self.form.shuttle is None:
            return
        needed, needed_later = (
            [(self.form.held(one).values(), one) for one, master in pairs if one is not master]
            for pairs in (here, later)
        )
        # The bucket before has left, so that there are never three.
        self.form.shuttle.settle()
        for held, parameter in needed:
            self.form.shuttle.fetch(held, parameter)
        self.form.shuttle.fetch_if_there_is_room(needed_later)

    def _end_copies(self) -> None:
        if self.form.shuttle is not None:
            self.form.shuttle.end()
        if isinstance(self._inner, OffloadedStates):
            self._inner.coming = ()
            self._inner.shuttle.end()

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, with the kept part of each parameter's float32 numbers."""
        state = self._inner.state_dict()
        state["state"] = {index: dict(entry) for index, entry in state["state"].items()}
        for index, (parameter, master) in enumerate(self.pairs()):
            if parameter is not master:
                held = self.form.held(parameter)
                if held:
                    state["state"].setdefault(index, {}).update(held)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; the model follows the loaded copies."""
        entries = {index: dict(entry) for index, entry in state_dict["state"].items()}
        for index, (parameter, master) in enumerate(self.pairs()):
            if parameter is not master:
                self.form.load(parameter, entries.get(index, {}))
        self._inner.load_state_dict(state_dict | {"state": {i: e for i, e in entries.items() if e}})
        self.state = self._inner.state
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            outer["lr"] = inner["lr"]

    @torch.no_grad()
    def follow(self) -> None:
        """Begin anew from the parameters as they are, where something else has written them."""
        for parameter, master in self.pairs():
            if parameter is not master:
                self.form.follow(parameter)

    def held(self) -> list[Tensor]:
        """Tensors that stay of the float32 numbers between steps, of parameters that are none themselves."""
        parameters = [parameter for parameter, master in self.pairs() if parameter is not master]
        return [one for parameter in parameters for one in self.form.held(parameter).values()]

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every parameter with its copy (itself when it is float32), in the order of the groups."""
        for group, masters in zip(self.param_groups, self._masters, strict=True):
            yield from zip(group["params"], masters, strict=True)

    def _buckets(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        return buckets_of(self.pairs(), MASTER_BUCKET, lambda pair: 4 * pair[0].numel())


def _widened(gradients: list[Tensor | None]) -> list[Tensor]:
    """Float32 gradients: float32 unchanged, all others converted in one call."""
    given = [gradient for gradient in gradients if gradient is not None]
    halves = [gradient for gradient in given if gradient.dtype != torch.float32]
    made = [torch.empty_like(gradient, dtype=torch.float32) for gradient in halves]
    if halves:
        torch._foreach_copy_([local_of(one) for one in made], [local_of(one) for one in halves])
    wide = iter(made)
    return [gradient if gradient.dtype == torch.float32 else next(wide) for gradient in given]
