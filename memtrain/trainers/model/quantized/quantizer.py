"""Weights packed one at a time while transformers loads them, experts too, which bitsandbytes passes over.

On a GPU bitsandbytes packs linear maps, as transformers has it do; stacks of experts are packed here. On a
CPU both are. A weight is whole only until it is packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer, get_keys_to_not_convert
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from memtrain.trainers.model.experts.forward import is_experts, stacks_of, take_own_forward
from memtrain.trainers.model.quantized.linear import PackedLinear, pack_linear_maps
from memtrain.trainers.model.quantized.packed import Bits, pack

METHOD = "memtrain"
"""Name of this file's own quantization among those of transformers."""


class OwnConfig(QuantizationConfigMixin):
    """Configuration that `from_pretrained` is given on a CPU."""

    def __init__(self, bits: Bits) -> None:
        super().__init__(quant_method=METHOD)  # pyright: ignore[reportArgumentType]
        self.bits: Bits = bits


class _Pack(ConversionOps):
    """Packs what is of a stack, or of an own linear map; leaves other weights to `inner`."""

    def __init__(self, bits: Bits, inner: Any | None) -> None:
        self.bits: Bits = bits
        self.inner = inner

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The packed weights by name; what belongs to them is put beside them."""
        model: nn.Module = kwargs["model"]
        mine = {name: value for name, value in input_dict.items() if _is_ours(model, name)}
        rest = {name: value for name, value in input_dict.items() if name not in mine}
        made: dict[str, Any] = {} if not rest or self.inner is None else self.inner.convert(rest, **kwargs)
        for name, value in mine.items():
            made[name] = self._packed(model, name, value[0] if isinstance(value, list) else value)
        return made

    def _packed(self, model: nn.Module, name: str, weight: Tensor) -> Tensor:
        module, last = _place(model, name)
        # A GPU packs faster, also what goes back to the host.
        near = weight.cuda() if torch.cuda.is_available() else weight
        pack(module, last, self.bits, near, device=weight.device)
        packed = module._parameters[last]
        assert packed is not None, "It has just been packed."
        return packed


class _WithExperts:
    """Beside what a quantizer of transformers packs: stacks of experts."""

    bits: Bits

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a weight is packed."""
        own: Any = super()
        return _is_ours(model, param_name) or own.param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self) -> Any:
        """The operation that packs."""
        own: Any = super()
        return _Pack(self.bits, own.get_quantize_ops())


class Bnb4bitWithExperts(_WithExperts, Bnb4BitHfQuantizer):
    """bitsandbytes' NF4, and ours of the experts."""

    bits = "4bit"


class Bnb8bitWithExperts(_WithExperts, Bnb8BitHfQuantizer):
    """bitsandbytes' int8, and ours of the experts."""

    bits = "8bit"


class OwnQuantizer(HfQuantizer):
    """Packing by memtrain alone."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        kept = set(get_keys_to_not_convert(model))
        pack_linear_maps(model, self.quantization_config.bits, kept)  # pyright: ignore[reportAttributeAccessIssue]
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a weight is packed."""
        return _is_ours(model, param_name)

    def get_quantize_ops(self) -> Any:
        """The operation that packs."""
        return _Pack(self.quantization_config.bits, None)  # pyright: ignore[reportAttributeAccessIssue]

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Adapters are saved, not what they stand on."""
        return False

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Adapters are."""
        return True


@contextmanager
def packing_experts() -> Iterator[None]:
    """Models that transformers loads inside have their experts packed with their linear maps."""
    ours = {
        "bitsandbytes_4bit": Bnb4bitWithExperts,
        "bitsandbytes_8bit": Bnb8bitWithExperts,
        METHOD: OwnQuantizer,
    }
    before = {name: AUTO_QUANTIZER_MAPPING.get(name) for name in ours}
    AUTO_QUANTIZER_MAPPING.update(ours)
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = OwnConfig
    try:
        yield
    finally:
        AUTO_QUANTIZATION_CONFIG_MAPPING.pop(METHOD)
        for name, kind in before.items():
            if kind is None:
                AUTO_QUANTIZER_MAPPING.pop(name)
            else:
                AUTO_QUANTIZER_MAPPING[name] = kind


def begin_packed(model: Any) -> None:
    """Let the packed experts of a loaded model compute with their packed weights."""
    for module in model.modules():
        if is_experts(module):
            take_own_forward(module)
    if getattr(getattr(model, "hf_quantizer", None), "quantization_config", None).__class__ is OwnConfig:
        # Only adapters are saved of it: nobody else is to take the model for one that he can load packed.
        model.hf_quantizer.remove_quantization_config(model)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, last = name.rpartition(".")
    return model.get_submodule(parent), last


def _is_ours(model: nn.Module, name: str) -> bool:
    module, last = _place(model, name)
    if isinstance(module, PackedLinear):
        return last == "weight"
    return is_experts(module) and last in stacks_of(module)
