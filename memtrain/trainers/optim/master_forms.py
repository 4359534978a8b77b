"""Forms of a half-precision weight between two steps, and the float32 numbers that the optimizer steps.

Each form gives the optimizer a float32 tensor for a bucket's time, and takes the new numbers back: as copies
that stay, as the bits that the weight has lost, or as nothing but the weight, rounded at random. Copies and
bits wait beside the weights, or in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from memtrain.trainers.optim.offload import Shuttle, to_host
from memtrain.trainers.runtime.seed import derive_seed
from memtrain.trainers.runtime.weight_layout import local_of

MASTER, LOW_BITS = "master", "low_bits"
"""Names in a parameter's saved state: its float32 copy; the bits that the weight has not."""
FORMS = ("float32", "split", "stochastic")
"""The forms by their names in `Settings.copies`."""


class Form(Protocol):
    """Form of some parameters' float32 numbers between steps."""

    name: str
    """Name of the form, as in FORMS."""
    stays: bool
    """The float32 tensors are there between steps too, beside the weights."""
    shuttle: Shuttle | None
    """Carries what `held` names, where it waits on the host."""

    def take(self, parameter: Tensor) -> Tensor:
        """The float32 numbers of a parameter, to be stepped."""
        ...

    def give(self, parameter: Tensor, copy: Tensor) -> None:
        """Write the stepped numbers into the parameter, and keep the remainder that it cannot hold."""
        ...

    def held(self, parameter: Tensor) -> dict[str, Tensor]:
        """Saved tensors of a parameter, by name."""
        ...

    def load(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        """Take up, and take out of `saved`, what `held` told; the parameter follows."""
        ...

    def follow(self, parameter: Tensor) -> None:
        """Begin anew from the parameter, which something else has written."""
        ...


class Float32:
    """Float32 copies that stay: 4 bytes a weight, on the host where they are `away`.

    Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.1.
    """

    name = "float32"

    def __init__(self, parameters: list[Tensor], *, away: bool = False) -> None:
        self.stays = not away
        self.shuttle = Shuttle() if away else None
        self._copies = {one: _beside(one, one.detach().float(), away=away) for one in parameters}

    def take(self, parameter: Tensor) -> Tensor:
        """The copy itself, or its copy beside the weight."""
        copy = self._copies[parameter]
        return copy if self.shuttle is None else self.shuttle.take(copy, parameter)

    def give(self, parameter: Tensor, copy: Tensor) -> None:
        """The parameter becomes the copy, rounded to nearest."""
        parameter.copy_(copy)
        if self.shuttle is not None:
            self.shuttle.send(copy, parameter, self._copies[parameter])

    def held(self, parameter: Tensor) -> dict[str, Tensor]:
        """The copy."""
        return {MASTER: self._copies[parameter]}

    def load(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        """Continue from a saved copy."""
        copy = self._copies[parameter]
        copy.copy_(saved.pop(MASTER))
        parameter.copy_(copy)

    def follow(self, parameter: Tensor) -> None:
        """The copy is the parameter."""
        self._copies[parameter].copy_(parameter)


class Split:
    """The low 16 bits of the float32 number beside a bfloat16 weight, which is its high half, rounded.

    2 bytes a weight, on the host where they are `away`, and the numbers of float32 copies: only one that lies
    exactly between two weights, and was rounded down, is a unit in the last place (2^-24) too small when it
    comes back.

    Source: Gupta et al. 2026 (FlashOptim), arXiv:2602.23349, section 3 (weight splitting), here with all 16
    bits in place of 8.
    """

    name = "split"
    stays = False

    def __init__(self, parameters: list[Tensor], *, away: bool = False) -> None:
        self.shuttle = Shuttle() if away else None
        self._low = {
            one: _beside(one, torch.zeros_like(one, dtype=torch.int16), away=away) for one in parameters
        }

    def take(self, parameter: Tensor) -> Tensor:
        """High and low bits put together."""
        assert parameter.dtype == torch.bfloat16, "A float16 weight is no high half of a float32 number."
        bits = parameter.float().view(torch.int32)
        low = self._low[parameter]
        here = low if self.shuttle is None else self.shuttle.take(low, parameter)
        return bits.add_(here).view(torch.float32)

    def give(self, parameter: Tensor, copy: Tensor) -> None:
        """Round the number to the weight, and keep the difference of their bits."""
        parameter.copy_(copy)
        low = copy.view(torch.int32).sub_(parameter.float().view(torch.int32))
        low = low.clamp_(max=2**15 - 1).to(torch.int16)
        if self.shuttle is None:
            self._low[parameter].copy_(low)
        else:
            self.shuttle.send(low, parameter, self._low[parameter])

    def held(self, parameter: Tensor) -> dict[str, Tensor]:
        """The low bits; the high ones are the weight itself."""
        return {LOW_BITS: self._low[parameter]}

    def load(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        """Continue from saved bits; the weight was loaded with the model."""
        self._low[parameter].copy_(saved.pop(LOW_BITS))

    def follow(self, parameter: Tensor) -> None:
        """No bits but the parameter's."""
        self._low[parameter].zero_()


class Stochastic:
    """No copy: the stepped number is rounded to one of its two neighbours, to the nearer one more often.

    The chance of each is the distance to the other, so that the weight is right on average and an update
    below half a step moves one weight in many. Draws follow from the run's seed, the number of the parameter
    and its steps alone: the same on every rank, in buckets of any size, and in the backward pass.

    Source: Ozkara et al. 2025, arXiv:2502.20566, section 2 (equation 1); the bits by torchao's way: 16 random
    bits are added to the number, and its low half is cut off.
    """

    name = "stochastic"
    stays = False
    shuttle = None

    def __init__(self, parameters: list[Tensor], seed: int) -> None:
        self._generator = torch.Generator(parameters[0].device if parameters else "cpu")
        self._seed = seed
        self._number = {one: number for number, one in enumerate(parameters)}
        self._num_steps = dict.fromkeys(parameters, 0)

    def take(self, parameter: Tensor) -> Tensor:
        """The weight, widened."""
        return parameter.float()

    def give(self, parameter: Tensor, copy: Tensor) -> None:
        """Round each number up or down at random; numbers that are not finite stay so."""
        bits = copy.view(torch.int32)
        names = "rounding", self._number[parameter], self._num_steps[parameter]
        self._generator.manual_seed(derive_seed(self._seed, *names))
        self._num_steps[parameter] += 1
        draws = torch.empty_like(bits).random_(0, 2**16, generator=self._generator)
        parameter.copy_(bits.add_(draws).bitwise_and_(-(2**16)).view(torch.float32))

    def held(self, parameter: Tensor) -> dict[str, Tensor]:
        """Number of steps that were drawn for: the draws go on from there."""
        return {"draws": torch.tensor(self._num_steps[parameter])}

    def load(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        """Continue with the draws of the next step."""
        self._num_steps[parameter] = int(saved.pop("draws"))

    def follow(self, parameter: Tensor) -> None:
        """Nothing is kept beside it."""


def form_of(name: str, parameters: list[Tensor], *, seed: int, away: bool) -> Form:
    """The form `name` (see FORMS) over half-precision `parameters`; `seed` is for random rounding."""
    makers: Mapping[str, Any] = {
        "float32": lambda given: Float32(given, away=away),
        "split": lambda given: Split(given, away=away),
        "stochastic": lambda given: Stochastic(given, seed),
    }
    return makers[name](parameters)


def give_all(form: Form, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """`give` for (parameter, copy) pairs; copies that stay are rounded in one call."""
    if pairs and form.name == Float32.name and form.stays:
        torch._foreach_copy_([local_of(one) for one, _ in pairs], [local_of(copy) for _, copy in pairs])
        return
    for parameter, copy in pairs:
        form.give(parameter, copy)


def _beside(parameter: Tensor, made: Tensor, *, away: bool) -> Tensor:
    """Tensor that a form keeps of a parameter, where it waits."""
    if not away:
        return made
    held = to_host(made, parameter)
    if parameter.device.type == "cuda":
        torch.cuda.current_stream(parameter.device).synchronize()
    return held
