"""Time of attention: its operations, and the share of a card's products that its kernels reach.

Kernels of attention reach less than large matrix products do, and those that were written for the tensor
cores of Ampere a third of what Hopper can. Shares are of the data sheet's rate, for head widths of 128 and
rows of 4,096 tokens or more.

Source: FlashAttention-2 on an A100: up to 73 % forward and 63 % backward; the first FlashAttention, which
torch's memory-efficient kernel is taken to be as fast as, 30 to 50 % and 25 to 35 % (Dao 2023,
arXiv:2307.08691, sections 1 and 4.1). On an H100: FlashAttention-2 370 and 320 of 989 TFLOP/s,
FlashAttention-3 640 and 550 (Shah et al. 2024, arXiv:2407.08608, figures 5 and 6). FlexAttention: 90 % of
FlashAttention-2 forward, 85 % backward (its announcement, PyTorch 2024). Later data-center cards have no
figure there: FlashAttention-2 is taken to be as fast as on an H100, as it has no instruction of theirs
(chosen after published steps on a B200 had been seen).
"""

from __future__ import annotations

from typing import NamedTuple

from memtrain.memory.estimate.flash_scratch import FLEX, HOPPER_FLASH
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.cards import REACHED
from memtrain.memory.hardware.devices import Hardware

FLASH_BACKWARD = 2.5
"""Operations of flash attention's backward pass over its forward pass. Source: Dao 2023, arXiv:2307.08691,
section 4.1 (5 products against 2)."""


class Share(NamedTuple):
    """Part of the data sheet's rate, in the forward and in the backward pass."""

    forward: float
    backward: float


AMPERE, EFFICIENT = Share(0.73, 0.63), Share(0.40, 0.30)
ON_HOPPER, FOR_HOPPER = Share(370 / 989, 320 / 989), Share(640 / 989, 550 / 989)
OF_FLEX = Share(0.90, 0.85)
"""Of FlashAttention-2."""
H100_TFLOPS = 989
MEMORY_EFFICIENT = ("torch_efficient", "masked")
"""Back ends on torch's memory-efficient kernel."""


def attention_time(load: Workload, hardware: Hardware, rate: float, num_forward: float) -> float:
    """Seconds of the attention of all layers of a micro-batch, where products reach `rate`, with so many
    forward passes."""
    forward, backward = slowness(load, hardware)
    of_pass = load.shape.num_layers * forward_operations(load) / rate
    return of_pass * (num_forward * forward + FLASH_BACKWARD * backward)


def slowness(load: Workload, hardware: Hardware) -> Share:
    """Products' rate over that of attention, by pass; 1 on a CPU and in float32, whose kernels are others."""
    capability = hardware.compute_capability
    if hardware.device == "cpu" or not load.is_half or capability is None:
        return Share(1.0, 1.0)
    share = _share(load.settings.attention, capability, hardware)
    return Share(REACHED / share.forward, REACHED / share.backward)


def _share(attention: str, capability: tuple[int, int], hardware: Hardware) -> Share:
    if attention in MEMORY_EFFICIENT:
        return EFFICIENT
    if attention == HOPPER_FLASH:
        return FOR_HOPPER
    flash = AMPERE
    if capability[0] == 9:
        flash = ON_HOPPER
    elif capability[0] == 10:
        slower = H100_TFLOPS * 1e12 * REACHED / hardware.rates.half_matmul_per_s
        flash = Share(ON_HOPPER.forward * slower, ON_HOPPER.backward * slower)
    if attention == FLEX:
        return Share(flash.forward * OF_FLEX.forward, flash.backward * OF_FLEX.backward)
    return flash


def forward_operations(load: Workload) -> float:
    """Multiplications and additions of a layer's attention in one forward pass: 2*Q*L^2 if it is causal."""
    factor = 4.0 if load.settings.attention == "masked" else 2.0
    return factor * load.shape.query_width * sum_of_squares(load) / load.settings.context_parallel


def sum_of_squares(load: Workload) -> float:
    """Sum of the squared lengths that attention works on: a window bounds how far each token looks."""
    batch, settings = load.batch, load.settings
    if settings.attention == "masked":
        return float(load.N) ** 2
    if not settings.padding_free:
        return float(load.N) * (load.N / batch.rows)
    mean = batch.attended_tokens or batch.tokens / batch.rows
    window = load.shape.sliding_window
    reach = min(mean, window) if window is not None else mean
    return batch.tokens * reach
