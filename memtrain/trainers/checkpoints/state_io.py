"""State to disk and back, bit for bit, without pickle: nested containers of plain values and tensors.

A state is saved as `NAME.safetensors` (every tensor, named by its path in the state) and `NAME.json` (the
structure, with the plain values in place). Tensors are written one at a time, so that saving needs host
memory for the largest tensor only, and not for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

State = Any
"""None, bool, int, float, str, tensor, numpy array; and lists, tuples and mappings of them."""

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


def save_state(state: State, path: Path) -> None:
    """Write `path.safetensors` and `path.json`.

    Tensors of any device come back on the CPU, contiguous. One tensor that appears twice (tied weights) is
    written once, and is one tensor again after loading; views that merely overlap are written each. A mapping
    comes back as a dict in the same order. The files are not synced to disk here.

    Raises: TypeError for a value that is none of the above, such as an object of a class; OSError.
    """
    tensors: dict[str, Tensor] = {}
    structure = _take_apart(state, "", tensors, {})
    _write_tensors(tensors, path.with_name(path.name + ".safetensors"))
    path.with_name(path.name + ".json").write_text(json.dumps(structure))


def load_state(path: Path) -> State:
    """The state that `save_state` wrote, equal bit for bit, tensors on the CPU.

    Raises: OSError, ValueError or safetensors' own error when the files are not what `save_state` writes;
    a checkpoint's checksums are verified before it is loaded.
    """
    structure = json.loads(path.with_name(path.name + ".json").read_text())
    with safe_open(path.with_name(path.name + ".safetensors"), "pt", device="cpu") as file:
        # Cloned, because a view of the mapped file is not aligned for vector instructions: sums over it would
        # be taken in another order than in the uninterrupted run.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    return _put_together(structure, tensors)


def _take_apart(value: State, name: str, tensors: dict[str, Tensor], seen: dict[tuple, str]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return {"tensor": _add_tensor(value, name, tensors, seen)}
    if isinstance(value, np.ndarray):
        return {"array": _add_tensor(torch.from_numpy(value), name, tensors, seen)}
    if isinstance(value, list):
        return [_take_apart(item, _below(name, i), tensors, seen) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_take_apart(item, _below(name, i), tensors, seen) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [_take_apart(key, "", {}, {}), _take_apart(item, _below(name, key), tensors, seen)]
                for key, item in value.items()
            ]
        }
    raise TypeError(f"a {type(value).__name__} at '{name}' cannot be saved without pickle")


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _add_tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor], seen: dict[tuple, str]) -> str:
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(f"the tensor at '{name}' ({tensor.dtype}, {tensor.layout}) cannot be saved")
    # Two empty tensors share the null pointer without being one tensor.
    same = (tensor.device, tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride())
    if same in seen:
        return seen[same]
    # Two keys can spell one path ("a.b" and "a" holding "b"), and the format keeps one name for itself.
    while not name or name in tensors or name == "__metadata__":
        name += "#"
    tensors[name] = tensor.detach()
    seen[same] = name
    return name


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file: length of the header, the header as JSON, the tensors end to end.

    Source: https://github.com/huggingface/safetensors#format
    """
    widest_first = list(DTYPES)
    ordered = sorted(tensors.items(), key=lambda item: widest_first.index(item[1].dtype))
    header: dict[str, object] = {}
    offset_bytes = 0
    for name, tensor in ordered:
        end_bytes = offset_bytes + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset_bytes, end_bytes],
        }
        offset_bytes = end_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        _write_bytes((tensor for _, tensor in ordered), file)


def _write_bytes(tensors: Iterable[Tensor], file: BinaryIO) -> None:
    for tensor in tensors:
        flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)


def _put_together(node: Any, tensors: Mapping[str, Tensor]) -> State:
    if isinstance(node, list):
        return [_put_together(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, inside),) = node.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "array":
        return tensors[inside].numpy()
    if kind == "tuple":
        return tuple(_put_together(item, tensors) for item in inside)
    assert kind == "dict", f"a state has no '{kind}'"
    return {_put_together(key, tensors): _put_together(item, tensors) for key, item in inside}
