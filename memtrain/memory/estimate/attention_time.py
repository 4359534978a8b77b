"""Time of attention: its operations, and the share of a card's products that its kernels reach.

Kernels of attention reach less than large matrix products do, and those that were written for the tensor
cores of Ampere a third of what Hopper can. Shares are of the data sheet's rate, for head widths of 128.

A short row takes longer than its operations: every block of queries begins and ends, half of the tile on the
diagonal is computed for nothing, and the last tile is not full. Each is as much as some more keys for every
query, so that a row of L tokens takes as long as L * (L + lost) tell. Rows of unequal lengths in one launch
are slower still.

Source: FlashAttention-2 on an A100: up to 73 % forward and 63 % backward; the first FlashAttention, which
torch's memory-efficient kernel is taken to be as fast as, 30 to 50 % and 25 to 35 % (Dao 2023,
arXiv:2307.08691, sections 1 and 4.1). On an H100, R / (1 + lost / L) through the figures for 512 to 16,384
tokens: causal forward, FlashAttention-2 191 to 335 TFLOP/s and FlashAttention-3 292 to 616; backward, which
is without a mask there, 214 to 322 and 316 to 561 (Shah et al. 2024, arXiv:2407.08608, figures 5 and 6). From
1,024 tokens on no point is off by more than 3 %, at 512 up to 11 % too fast. A causal row has half of
the keys, and so twice the loss, and its diagonal. Blocks are taken to begin and end as fast on every card.
FlexAttention: 90 % of FlashAttention-2 forward, 85 % backward (its announcement, PyTorch 2024). Later
data-center cards have no figure there: FlashAttention-2 is taken to be as fast as on an H100, as it has no
instruction of theirs (chosen after published steps on a B200 had been seen).
"""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.flash_scratch import FLEX, HOPPER_FLASH, MASKED
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.cards import REACHED
from memtrain.memory.hardware.devices import Hardware

FLASH_BACKWARD = 2.5
"""Operations of flash attention's backward pass over its forward pass. Source: Dao 2023, arXiv:2307.08691,
section 4.1 (5 products against 2)."""


class Pair(NamedTuple):
    """A figure of the forward and one of the backward pass."""

    forward: float
    backward: float


class Kernel(NamedTuple):
    """Rates that a kernel of attention reaches."""

    share: Pair
    """Of the data sheet's rate, in long rows."""
    idle: Pair | None = None
    """Keys that a rate of 10^12 operations a second would compute for every query while its block begins and
    ends; None: not known."""


TILE = 128
"""Queries of a block of the forward pass, keys of one of the backward pass."""
FLASH_IDLE = Pair(2 * 106 / 342, 2 * 265 / 327)
AMPERE = Kernel(Pair(0.73, 0.63), FLASH_IDLE)
EFFICIENT = Kernel(Pair(0.40, 0.30))
ON_HOPPER = Kernel(Pair(342 / 989, 327 / 989), FLASH_IDLE)
FOR_HOPPER = Kernel(Pair(632 / 989, 575 / 989), Pair(2 * 186 / 632, 2 * 330 / 575))
UNEQUAL = 0.77
"""Share of that rate which is left where one launch has rows of unequal lengths. Measured: 215 of 274 TFLOP/s
forward and 174 of 230 backward, with the sums over query heads that share keys; rows of 1,870 tokens in the
mean over tokens, Qwen3-0.6B, torch 2.11 (H100 80GB HBM3, benchmarks/gpu_short.sh, 1eaa8187)."""
OF_FLEX = Pair(0.90, 0.85)
"""Of FlashAttention-2."""
H100_TFLOPS = 989
MEMORY_EFFICIENT = ("torch_efficient", MASKED)
"""Back ends on torch's memory-efficient kernel."""


def attention_time(load: Workload, hardware: Hardware, rate: float, num_forward: float) -> float:
    """Seconds of the attention of all layers of a micro-batch, where products reach `rate`, with so many
    forward passes."""
    forward, backward = slowness(load, hardware)
    of_pass = load.shape.num_layers * forward_operations(load) / rate
    return of_pass * (num_forward * forward + FLASH_BACKWARD * backward)


def slowness(load: Workload, hardware: Hardware) -> Pair:
    """Products' rate over that of attention, by pass; 1 on a CPU and in float32, whose kernels are others."""
    capability = hardware.compute_capability
    if hardware.device == "cpu" or not load.is_half or capability is None:
        return Pair(1.0, 1.0)
    share, idle = _kernel(load.settings.attention, capability, hardware)
    if idle is None:
        return Pair(REACHED / share.forward, REACHED / share.backward)
    length = max(1.0, sum_of_squares(load) / load.num_whole)
    sheet = hardware.rates.half_matmul_per_s / REACHED / 1e12
    wasted, left = TILE, 1.0
    if 0 < load.batch.attended_tokens < load.batch.tokens:
        # The last tile of a row is half full, of its queries and of its keys.
        wasted, left = 2 * TILE, UNEQUAL
    forward, backward = (
        REACHED / (left * of) * (1 + (wasted + keys * of * sheet) / length)
        for of, keys in zip(share, idle, strict=True)
    )
    return Pair(forward, backward)


def _kernel(attention: str, capability: tuple[int, int], hardware: Hardware) -> Kernel:
    if attention in MEMORY_EFFICIENT:
        return EFFICIENT
    if attention == HOPPER_FLASH:
        return FOR_HOPPER
    flash = AMPERE
    if capability[0] == 9:
        flash = ON_HOPPER
    elif capability[0] == 10:
        slower = H100_TFLOPS * 1e12 * REACHED / hardware.rates.half_matmul_per_s
        flash = _scaled(ON_HOPPER, Pair(slower, slower))
    if attention == FLEX:
        return _scaled(flash, OF_FLEX)
    return flash


def _scaled(kernel: Kernel, by: Pair) -> Kernel:
    return kernel._replace(share=Pair(kernel.share.forward * by.forward, kernel.share.backward * by.backward))


def forward_operations(load: Workload) -> float:
    """Multiplications and additions of a layer's attention in one forward pass: 2*Q*L^2 if it is causal."""
    factor = 4.0 if load.settings.attention == MASKED else 2.0
    return factor * load.shape.query_width * sum_of_squares(load) / load.settings.context_parallel


def sum_of_squares(load: Workload) -> float:
    """Sum of the squared lengths that attention works on: a window bounds how far each token looks."""
    batch, settings = load.batch, load.settings
    if settings.attention == MASKED:
        return float(load.N) ** 2
    if not settings.padding_free:
        return float(load.N) * (load.N / batch.rows)
    mean = batch.attended_tokens or batch.tokens / batch.rows
    window = load.shape.sliding_window
    reach = min(mean, window) if window is not None else mean
    return batch.tokens * reach
