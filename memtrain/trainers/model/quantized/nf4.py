"""NF4 with doubly quantized scales: the layout of bitsandbytes, bit for bit, on any device.

A weight is the nearest of 16 numbers, times the largest magnitude of its 64; that scale is 8 bits itself,
less the mean of all, in blocks of 256. Where bitsandbytes and a GPU are there, its kernels do it; else torch
does.

Source: Dettmers et al. 2023, arXiv:2305.14314, section 3; the numbers of the two tables and the order of
rounding are those of bitsandbytes 0.49 (functional.py), and tests/trainers/model/quantized hold them against
it.
"""

# n weights, flat; B blocks of 64 weights

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtrain.memory.plan.sizes import NF4_BLOCK, SCALE_BLOCK

NUMBERS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 numbers: quantiles of a normal distribution, scaled to [-1, 1]."""


class NF4(NamedTuple):
    """A packed weight."""

    codes: Tensor
    """uint8 [n / 2]: two weights a byte, the first in the high bits."""
    scale_codes: Tensor
    """uint8 [B]: the scale of each block, less `offset`."""
    scales: Tensor
    """float32 [B / 256]: scales of the scales."""
    offset: Tensor
    """float32 [1]: mean of all scales."""


@torch.no_grad()
def pack(weight: Tensor) -> NF4:
    """`weight`, an even number of numbers, in 4 bits."""
    flat = weight.detach().reshape(-1)
    if has_kernels(flat):
        codes, absmax = _packed_by_kernel(flat)
    else:
        codes, absmax = packed(flat)
    offset = absmax.mean()
    scale_codes, scales = _in_eight_bits(absmax - offset)
    return NF4(codes, scale_codes, scales, offset.reshape(1))


@torch.no_grad()
def unpack(packed: NF4, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Weights `first` to `last` (a multiple of 64 is the first), flat, rounded once to `dtype`."""
    absmax = scales_of(packed, first // NF4_BLOCK, -(-last // NF4_BLOCK))
    codes = packed.codes[first // 2 : -(-last // 2)]
    return unpacked(codes, absmax, last - first, dtype)


def scales_of(packed: NF4, first: int, last: int) -> Tensor:
    """float32 scales of the blocks `first` to `last`."""
    begin, end = first // SCALE_BLOCK, -(-last // SCALE_BLOCK)
    codes = packed.scale_codes[begin * SCALE_BLOCK : end * SCALE_BLOCK]
    found = F.embedding(codes.int(), _kept(_scales_column, codes)).view(-1)
    whole = len(found) // SCALE_BLOCK
    found[: whole * SCALE_BLOCK].view(whole, SCALE_BLOCK).mul_(packed.scales[begin : begin + whole, None])
    if whole * SCALE_BLOCK < len(found):
        found[whole * SCALE_BLOCK :].mul_(packed.scales[begin + whole])
    return found.add_(packed.offset)[first - begin * SCALE_BLOCK : last - begin * SCALE_BLOCK]


def unpacked(codes: Tensor, absmax: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`count` weights of whole blocks but for the last."""
    if has_kernels(codes):
        return unpacked_by_kernel(codes, absmax, count, dtype)
    pairs = F.embedding(codes.int(), _kept(_pairs, codes)).view(-1)[:count]
    whole = count // NF4_BLOCK * NF4_BLOCK
    pairs[:whole].view(-1, NF4_BLOCK).mul_(absmax[: whole // NF4_BLOCK, None])
    if whole < count:
        pairs[whole:].mul_(absmax[-1])
    return pairs.to(dtype)


def has_kernels(tensor: Tensor) -> bool:
    """Whether bitsandbytes works where a tensor is, and is there."""
    return tensor.device.type == "cuda" and find_spec("bitsandbytes") is not None


def unpacked_by_kernel(codes: Tensor, absmax: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The same by bitsandbytes' kernel."""
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    out = torch.empty(count, dtype=dtype, device=codes.device)
    functional.dequantize_4bit(codes, absmax=absmax, out=out, blocksize=NF4_BLOCK, quant_type="nf4")
    return out


def packed(flat: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, float32 scales), by torch."""
    blocks = F.pad(flat.float(), (0, -flat.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1 / absmax[:, None])).nan_to_num_(0.0).clamp_(-1, 1).view(-1)[: flat.numel()]
    index = torch.bucketize(scaled, _middles(NUMBERS, flat.device)).to(torch.uint8)
    return (index[::2] << 4 | index[1::2]), absmax


def _packed_by_kernel(flat: Tensor) -> tuple[Tensor, Tensor]:
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    codes, state = functional.quantize_4bit(
        flat, blocksize=NF4_BLOCK, compress_statistics=False, quant_type="nf4"
    )
    return codes.view(-1), state.absmax


def _in_eight_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(the code of each number, float32 scales of 256 of them)."""
    blocks = F.pad(numbers, (0, -numbers.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1 / absmax[:, None])).nan_to_num_(0.0).clamp_(-1, 1).view(-1)[: numbers.numel()]
    table = dynamic_numbers(numbers.device)
    return torch.bucketize(scaled, (table[1:] + table[:-1]) / 2).to(torch.uint8), absmax


def dynamic_numbers(device: torch.device) -> Tensor:
    """float32 [256], rising: signed numbers with an exponent of 0 to 7 digits and the rest a fraction.

    Source: Dettmers 2015, arXiv:1511.04561; bitsandbytes, create_dynamic_map.
    """
    return _on(_dynamic(), device)


@lru_cache(maxsize=1)
def _dynamic() -> tuple[float, ...]:
    found = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32, device="cpu")
        means = (edges[:-1] + edges[1:]) / 2.0
        found += (10 ** (exponent - 6) * means).tolist() + (-(10 ** (exponent - 6)) * means).tolist()
    return tuple(sorted(found))


_tables: dict[tuple[Any, torch.device], Tensor] = {}
"""Tables that every unpacking reads, 3 KiB a device. Sent to it once: a copy of the host's numbers is waited
for, and no captured pass has one."""


def _kept(make: Callable[[torch.device], Tensor], codes: Tensor) -> Tensor:
    """The table of `make` where `codes` are; of codes without data a table of its own."""
    if isinstance(codes, FakeTensor) or codes.is_meta:
        return make(codes.device)
    key = (make, codes.device)
    if key not in _tables:
        _tables[key] = make(codes.device)
    return _tables[key]


def _scales_column(device: torch.device) -> Tensor:
    """float32 [256, 1]."""
    return dynamic_numbers(device)[:, None]


def _pairs(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two numbers of each byte."""
    numbers = _on(NUMBERS, device)
    return torch.stack((numbers.repeat_interleave(16), numbers.repeat(16)), 1)


def _middles(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    table = _on(numbers, device)
    return (table[1:] + table[:-1]) / 2


def _on(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    made: Any = torch.tensor(numbers, dtype=torch.float32, device=device)
    return made
