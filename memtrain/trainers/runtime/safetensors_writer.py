"""Files in the safetensors format that are written a tensor at a time.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

from torch import Tensor

from memtrain.trainers.runtime.safetensors_header import DTYPES


def begin_file(file: BinaryIO, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Write the header of a file of such tensors, which may have no data; where each begins, in bytes.

    Tensors of one dtype keep their order, and the file gets its length. With names in alphabetical order the
    bytes are those of `safetensors.torch.save_file`. Raises: OSError.
    """
    widest_first = list(DTYPES)
    ordered = sorted(tensors.items(), key=lambda one: widest_first.index(one[1].dtype))
    # Without this entry transformers reads no file of weights.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: dict[str, int] = {}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        places[name], offset = offset, end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    file.flush()
    first = 8 + len(encoded)
    file.truncate(first + offset)
    return {name: first + place for name, place in places.items()}
