"""AdamW's moments in 8 bits between two steps; a bucket of them is in float32 while it is stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.memory.estimate.static import COMPRESSED_GROUP, MASTER_BUCKET
from memtrain.trainers.optim.buckets import buckets_of, step_by_bucket

FIRST, SECOND = "exp_avg", "exp_avg_sq"
Draws = torch.Generator | None
CODES = {FIRST: "exp_avg_code", SECOND: "exp_avg_sq_code"}
SCALES = {FIRST: "exp_avg_scale", SECOND: "exp_avg_sq_scale"}


def compress_first(moment: Tensor, draws: Draws = None) -> tuple[Tensor, Tensor]:
    """(int8 codes, float32 scales) of signed numbers: softsign of the share in the group's largest.

    Source: Gupta et al. 2026 (FlashOptim), arXiv:2602.23349, section 3 (companding): c = 2x / (1 + |x|).
    Scales are float32 here, not float16: a moment of 1e-8 would be nothing there.
    """
    groups, scales = _shares(moment.clone())
    codes = groups.mul_(2).div_(groups.abs().mul_(0.5).add_(1)).mul_(127)
    return _whole(codes, draws).to(torch.int8).view(-1)[: moment.numel()].view(moment.shape), scales


def expand_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 numbers of `compress_first`: x = c / (2 - |c|), times the scale."""
    groups = _grouped(codes.float().div_(127))
    numbers = groups.div_(2 - groups.abs()).mul_(scales.unsqueeze(1))
    return numbers.view(-1)[: codes.numel()].view(codes.shape)


def compress_second(moment: Tensor, draws: Draws = None) -> tuple[Tensor, Tensor]:
    """(uint8 codes, float32 scales) of numbers that are not negative: their root's share in the largest.

    A number above 0 keeps a code above 0: an update is divided by its root.

    Source: as compress_first.
    """
    groups, scales = _shares(moment.sqrt())
    is_some = groups > 0
    codes = torch.maximum(_whole(groups.mul_(255), draws), is_some.float()).to(torch.uint8)
    return codes.view(-1)[: moment.numel()].view(moment.shape), scales


def expand_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 numbers of `compress_second`."""
    groups = _grouped(codes.float().div_(255)).mul_(scales.unsqueeze(1))
    return groups.square_().view(-1)[: codes.numel()].view(codes.shape)


def _whole(codes: Tensor, draws: Draws) -> Tensor:
    """Codes rounded to nearest; with `draws` to one of both neighbours, and right on average."""
    if draws is None:
        return codes.round_()
    return codes.add_(torch.empty_like(codes).uniform_(0, 1, generator=draws)).floor_()


def _shares(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """([groups, COMPRESSED_GROUP] shares in the group's largest, that)."""
    groups = _grouped(numbers)
    scales = groups.abs().amax(1)
    return groups.div(scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)), scales


def _grouped(numbers: Tensor) -> Tensor:
    flat = numbers.reshape(-1)
    missing = -flat.numel() % COMPRESSED_GROUP
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, COMPRESSED_GROUP)


PACKING: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Tensor]]] = {
    FIRST: (compress_first, expand_first),
    SECOND: (compress_second, expand_second),
}


class CompressedMoments(Optimizer):
    """An AdamW over float32 weights whose moments are 8 bits and a scale for 32 numbers between its steps."""

    def __init__(self, inner: Optimizer, draws: Draws = None) -> None:
        super().__init__(inner.param_groups, {})
        self._draws = draws
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state = inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore
        """Step every tensor that has a gradient, bucket by bucket.

        When it breaks off, the gradients of buckets that are done are gone, and all others are there.
        """
        loss = closure() if closure is not None else None
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        step_by_bucket(parameters, _buckets, self._step_bucket)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State of the optimizer inside, with codes and scales in place of moments."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken."""
        # torch would make codes and scales float32, as the parameter is.
        self.inner.load_state_dict(state_dict | {"state": {}})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.state.clear()
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            if index in state_dict["state"]:
                entry = state_dict["state"][index]
                self.state[parameter] = {
                    name: value.to(parameter.device) if name != "step" else value.clone()
                    for name, value in entry.items()
                }

    def _step_bucket(self, bucket: list[Tensor], gradients: dict[Tensor, Tensor]) -> None:
        waiting = {parameter: self.state[parameter] for parameter in bucket if self.state.get(parameter)}
        self.state.update({parameter: _expanded(entry) for parameter, entry in waiting.items()})
        for parameter in bucket:
            parameter.grad = gradients[parameter]
        versions = {parameter: parameter._version for parameter in bucket}
        try:
            self.inner.step()
        except BaseException:
            for parameter in bucket:
                if parameter._version == versions[parameter] and parameter in waiting:
                    self.state[parameter] = waiting[parameter]
            raise
        finally:
            for parameter in bucket:
                parameter.grad = None
        for parameter in bucket:
            self.state[parameter] = _compressed(self.state[parameter], self._draws)


def _compressed(entry: dict[str, Any], draws: Draws) -> dict[str, Any]:
    made = {name: value for name, value in entry.items() if name not in PACKING}
    for name, (compress, _) in PACKING.items():
        made[CODES[name]], made[SCALES[name]] = compress(entry[name], draws)
    return made


def _expanded(entry: dict[str, Any]) -> dict[str, Any]:
    packed = {*CODES.values(), *SCALES.values()}
    made = {name: value for name, value in entry.items() if name not in packed}
    for name, (_, expand) in PACKING.items():
        made[name] = expand(entry[CODES[name]], entry[SCALES[name]])
    return made


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of at most MASTER_BUCKET bytes together, or one tensor alone."""
    return buckets_of(parameters, MASTER_BUCKET, lambda parameter: parameter.nbytes)
