"""The head of a safetensors file: names, types and shapes of its tensors, without their values.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, cast

import torch

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Names of the safetensors format, widest first: written in this order, every tensor starts aligned."""

Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each tensor, by its name."""


MOST_HEADER_BYTES = 100_000_000
"""Bytes of a header that the format allows."""


def shapes_in(path: Path) -> Shapes:
    """Tensors of a safetensors file, by its header. Raises: OSError, also where it is none."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(MOST_HEADER_BYTES, path.stat().st_size - 8):
            raise OSError(errno.EINVAL, "it is no safetensors file: its header is longer than it", str(path))
        raw = file.read(size)
    try:
        entries = cast(dict[str, Any], json.loads(raw)).items()
        return {
            name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise OSError(errno.EINVAL, "it is no safetensors file: its header is damaged", str(path)) from None
