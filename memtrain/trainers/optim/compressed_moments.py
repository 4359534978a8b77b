"""AdamW's moments in 8 bits between two steps; a bucket of them is in float32 while it is stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from memtrain.memory.plan.sizes import COMPRESSED_GROUP, MASTER_BUCKET
from memtrain.trainers.optim.bucketed import BucketedOptimizer, Entry
from memtrain.trainers.optim.buckets import buckets_of

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


class CompressedMoments(BucketedOptimizer):
    """An AdamW over float32 weights whose moments are 8 bits and a scale for 32 numbers between its steps."""

    def __init__(self, inner: Optimizer, draws: Draws = None) -> None:
        super().__init__(inner)
        self._draws = draws

    def buckets(self, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
        """Tensors of at most MASTER_BUCKET bytes together, or one tensor alone."""
        return buckets_of(parameters, MASTER_BUCKET, lambda parameter: parameter.nbytes)

    def taken_out(self, entry: Entry, parameter: Tensor) -> Entry:
        """Moments in float32."""
        packed = {*CODES.values(), *SCALES.values()}
        if not packed & entry.keys():
            entry = self.put_back(entry, parameter, {})
        made = {name: value for name, value in entry.items() if name not in packed}
        for name, (_, expand) in PACKING.items():
            made[name] = expand(entry[CODES[name]], entry[SCALES[name]])
        return made

    def put_back(self, entry: Entry, parameter: Tensor, before: Entry) -> Entry:
        """Codes and scales in place of moments."""
        made = {name: value for name, value in entry.items() if name not in PACKING}
        for name, (compress, _) in PACKING.items():
            made[CODES[name]], made[SCALES[name]] = compress(entry[name], self._draws)
        return made

    def loaded(self, entry: Entry, parameter: Tensor) -> Entry:
        """Codes and scales beside the weight."""
        return {
            name: value.to(parameter.device) if name != "step" else value.clone()
            for name, value in entry.items()
        }
