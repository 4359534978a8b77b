"""Frozen weights in 4-bit NF4 or 8-bit: by bitsandbytes on a GPU, by our own code on a CPU and in shards."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import packs_itself
from memtrain.trainers.model.quantized.quantizer import OwnConfig


def quantization_config(settings: Settings) -> Any | None:
    """Value of `quantization_config` for `from_pretrained`; None when the weights stay as they are.

    4bit: NF4 with double quantization (about 0.516 bytes a weight). 8bit: LLM.int8. The LM head, norms and
    embeddings keep `settings.dtype`. In shards the layout is our own, with the same numbers: bitsandbytes
    keeps the scales of a weight beside it, whole on every rank.

    Source: Dettmers et al. 2023, arXiv:2305.14314, section 3 (NF4, double quantization);
    Dettmers et al. 2022, arXiv:2208.07339 (8-bit).

    Raises: LaunchError when bitsandbytes is missing on CUDA.
    """
    if settings.quantize == "none":
        return None
    if settings.device != "cpu":
        refuse_without_bitsandbytes(
            settings.device, f"model.quantize: {settings.quantize}", "model.quantize: none"
        )
    if packs_itself(settings):
        return OwnConfig(settings.quantize)
    from transformers import BitsAndBytesConfig

    if settings.quantize == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, settings.dtype),
        bnb_4bit_quant_storage=torch.uint8,
    )


def refuse_without_bitsandbytes(device: str, asked: str, instead: str) -> None:
    """Nothing when bitsandbytes can be used on `device`.

    Raises: LaunchError that names what was `asked` for (`key: value`) and what to write `instead`.
    """
    key = asked.partition(":")[0]
    if device != "cuda":
        raise LaunchError(
            f"{asked} needs a CUDA device; this run is on {device}", key, f"run on a GPU, or set {instead}"
        )
    if find_spec("bitsandbytes") is None:
        raise LaunchError(
            f"{asked} needs bitsandbytes, which is not installed",
            where=key,
            fix=f"pip install 'memtrain[quant]', or set {instead}",
        )
