"""bitsandbytes as far as memory goes: packed weights, 8-bit and paged optimizer states, without its kernels.

Source: the layouts and the order of allocations of bitsandbytes 0.50.2 (nn/modules.py, optim/optimizer.py,
autograd/_functions.py), read; the layouts are held against the package by
tests/trainers/tools/trace/test_trace_bits.py
where it is installed. What its CUDA kernels take inside themselves was not measured.
"""

# N tokens, I inputs and O outputs of a linear map

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import LEAST_8BIT, LEAST_PAGED, NF4_BLOCK, STATE_BLOCK, packs_itself
from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.model.experts.forward import is_experts, stacks_of, take_own_forward
from memtrain.trainers.model.quantized import quantizer
from memtrain.trainers.model.quantized.dora import numbers_of
from memtrain.trainers.model.quantized.packed import pack
from memtrain.trainers.tools.trace.fake_host import HOST

Group = dict[str, Any]


def pack_linear_maps(model: PreTrainedModel, bits: str) -> None:
    """Put packed weights in place of the decoder's linear maps', as `from_pretrained` does.

    The head, norms and embeddings stay as they are. `bits`: `4bit` or `8bit`.
    """
    kind = Packed4bit if bits == "4bit" else Packed8bit
    for module in list(model.get_decoder().modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, kind(child))


def pack_without_data(model: PreTrainedModel, settings: Settings) -> None:
    """Put packed weights in place of what a run packs while it loads: linear maps as bitsandbytes has them,
    or as a CPU and shards have them, and stacks of experts."""
    bits = settings.quantize
    if bits == "none":
        return
    if packs_itself(settings):
        quantizer.pack_linear_maps(model, bits, set(get_keys_to_not_convert(model)))
        for module in model.modules():
            if isinstance(module, quantizer.PackedLinear):
                module.pack()
    else:
        pack_linear_maps(model, bits)
    for module in model.modules():
        if is_experts(module):
            for name in stacks_of(module):
                pack(module, name, bits)
            take_own_forward(module)


class _Packed(nn.Linear):
    """A linear map whose weight is packed. PEFT takes it for a plain one."""

    def __init__(self, plain: nn.Linear, packed: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.dtype = plain.weight.dtype
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = plain.bias

    def scales(self, name: str, size: int, dtype: torch.dtype) -> None:
        """A buffer of so many numbers."""
        self.register_buffer(name, torch.zeros(size, dtype=dtype, device=self.weight.device))


class Packed4bit(_Packed):
    """NF4 with scales of 64 weights, which are in 8 bits themselves with scales of 256."""

    absmax: Tensor
    offset: Tensor
    is_copied: bool = False
    """PEFT's own layer takes a copy of the product."""

    def __init__(self, plain: nn.Linear) -> None:
        size, device = plain.weight.numel(), plain.weight.device
        super().__init__(plain, torch.zeros((size + 1) // 2, 1, dtype=torch.uint8, device=device))
        blocks = -(-size // NF4_BLOCK)
        self.scales("absmax", blocks, torch.uint8)
        self.scales("absmax_of_absmax", -(-blocks // STATE_BLOCK), torch.float32)
        self.scales("offset", 1, torch.float32)
        self.scales("code", 16, torch.float32)
        self.scales("code_of_absmax", 256, torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        """The product."""
        product: Tensor = _Product4bit.apply(input, self)
        return product.clone() if self.is_copied else product

    def dequantized(self) -> Tensor:
        """[O, I] in the precision of the weights before they were packed."""
        device = self.weight.device
        absmax = torch.zeros(self.absmax.shape, dtype=torch.float32, device=device)
        absmax += self.offset
        return torch.zeros(self.out_features, self.in_features, dtype=self.dtype, device=device)


@numbers_of.register
def _(layer: Packed4bit) -> Tensor:
    return layer.dequantized()


class Linear4bit(LoraLinear):
    """PEFT's layer beside a map that bitsandbytes has packed in 4 bits, whose name it has."""

    __module__ = "peft.tuners.lora.bnb"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """PEFT's own pass: a copy of the product first."""
        base: Any = self.get_base_layer()
        base.is_copied = not self.disable_adapters
        try:
            return super().forward(x, *args, **kwargs)
        finally:
            base.is_copied = False


def as_beside_4bit(model: nn.Module) -> None:
    """Let PEFT's layers beside packed maps be those that it has for bitsandbytes."""
    for module in model.modules():
        if type(module) is LoraLinear and isinstance(module.get_base_layer(), Packed4bit):
            module.__class__ = Linear4bit


class _Product4bit(torch.autograd.Function):
    """The weight is unpacked for each product, forward and backward; the input is not kept."""

    @staticmethod
    def forward(ctx: Any, input_NI: Tensor, layer: Packed4bit) -> Tensor:
        ctx.layer = layer
        return F.linear(input_NI, layer.dequantized().to(input_NI.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.matmul(grads[0], ctx.layer.dequantized().to(grads[0].dtype)), None


class Packed8bit(_Packed):
    """LLM.int8: a byte a weight, a scale a row."""

    row_scales: Tensor

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain, torch.zeros(plain.weight.shape, dtype=torch.int8, device=plain.weight.device))
        self.scales("row_scales", plain.out_features, torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        """The product."""
        return _Product8bit.apply(input, self)


@numbers_of.register
def _(layer: Packed8bit) -> Tensor:
    # In float32, as bitsandbytes gives it.
    return layer.weight * layer.row_scales.unsqueeze(1)


class _Product8bit(torch.autograd.Function):
    """The input is quantized row by row, the product is in int32.

    The input is kept as an attribute, where checkpointing does not find it: it stays.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: Packed8bit) -> Tensor:
        input_NI = input.reshape(-1, input.shape[-1])
        half_NI = input_NI.to(torch.float16)
        is_outlier_NI = half_NI.abs() >= 6.0
        int_NI = torch.zeros(half_NI.shape, dtype=torch.int8, device=half_NI.device)
        scale_N = torch.zeros(len(half_NI), dtype=torch.float32, device=half_NI.device)
        del half_NI, is_outlier_NI
        sum_NO = torch.zeros(len(int_NI), layer.out_features, dtype=torch.int32, device=int_NI.device)
        product_NO = torch.zeros(sum_NO.shape, dtype=torch.float16, device=int_NI.device)
        product_NO = product_NO.to(input.dtype)
        del scale_N, int_NI
        ctx.layer, ctx.kept, ctx.shape = layer, input_NI, input.shape
        return product_NO.view(*input.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layer: Packed8bit = ctx.layer
        gradient_NO = grads[0].reshape(-1, grads[0].shape[-1])
        weight_OI = layer.weight.to(gradient_NO.dtype, copy=True).mul_(
            layer.row_scales.unsqueeze(1).mul(1.0 / 127.0)
        )
        return torch.matmul(gradient_NO, weight_OI).view(ctx.shape), None


class BlockwiseStates(Optimizer):
    """The states of bitsandbytes' AdamW kinds; the weights do not move.

    Its kernels update in place and take nothing. States of large tensors are on the host where they are
    paged: CUDA's managed memory, which its caching allocator does not see.
    """

    def __init__(self, groups: list[Group], recipe: Optim, *, is_8bit: bool, is_paged: bool) -> None:
        super().__init__(groups, {"lr": recipe.lr})
        self.is_8bit = is_8bit
        self.is_paged = is_paged
        self.codes: tuple[Tensor, ...] = ()
        """The two tables of 8-bit numbers that all states share."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Make the states that are not there yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = self._fresh(parameter)

    def _fresh(self, parameter: Tensor) -> dict[str, Tensor]:
        is_small = parameter.numel() < LEAST_8BIT
        if not self.is_8bit or is_small:
            return {name: self._buffer(parameter, torch.float32) for name in ("state1", "state2")}
        device = parameter.device
        if not self.codes:
            self.codes = tuple(torch.zeros(256, dtype=torch.float32, device=device) for _ in range(2))
        blocks = -(-parameter.numel() // STATE_BLOCK)
        made = {name: self._buffer(parameter, torch.uint8) for name in ("state1", "state2")}
        made |= {name: torch.zeros(blocks, device=device) for name in ("absmax1", "absmax2")}
        return made | {"qmap1": self.codes[0], "qmap2": self.codes[1]}

    def _buffer(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        is_away = self.is_paged and parameter.numel() >= LEAST_PAGED
        return torch.zeros_like(parameter, dtype=dtype, device=HOST if is_away else parameter.device)


@contextmanager
def as_fake_bitsandbytes(settings: Settings) -> Iterator[None]:
    """Optimizers of bitsandbytes are played inside. On a CPU nothing is paged."""
    from memtrain.trainers.optim import build as optim

    def built(is_8bit: bool, is_paged: bool) -> Callable[[list[Group], Optim], Optimizer]:
        is_away = is_paged and settings.device == "cuda"
        return lambda groups, recipe: BlockwiseStates(groups, recipe, is_8bit=is_8bit, is_paged=is_away)

    before = optim.KINDS, optim.refuse_without_bitsandbytes
    optim.KINDS = optim.KINDS | {
        kind: built(facts.is_8bit, facts.is_paged)
        for kind, facts in OPTIMIZERS.items()
        if facts.is_bitsandbytes
    }
    optim.refuse_without_bitsandbytes = lambda device, asked, instead: None
    try:
        yield
    finally:
        optim.KINDS, optim.refuse_without_bitsandbytes = before
