"""Messages between ranks, as JSON and bytes: nothing in a message can run, whoever has sent it.

torch's own collectives for objects pickle them, and to unpickle is to run what a stranger may have written.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import struct
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

LENGTH = struct.Struct("<Q")
OWN = "memtrain."
"""Modules whose records are made anew from a message."""

NUMBER_TYPES = {str(dtype): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip


def to_bytes(item: object) -> bytes:
    """A message: plain values, lists, tuples, mappings, tensors (which arrive on the CPU), numpy arrays, and
    dataclasses and pydantic models of memtrain, of these.

    Raises: TypeError for anything else.
    """
    parts: list[bytes] = []
    header = json.dumps(_taken_apart(item, parts), ensure_ascii=True).encode()
    sizes = json.dumps([len(part) for part in parts]).encode()
    return b"".join((LENGTH.pack(len(header)), LENGTH.pack(len(sizes)), header, sizes, *parts))


def from_bytes(message: bytes) -> Any:
    """Value that `to_bytes` was given.

    Raises: ValueError for a message that speaks of records that are not memtrain's.
    """
    start, end = 2 * LENGTH.size, 2 * LENGTH.size + LENGTH.unpack_from(message)[0]
    after = end + LENGTH.unpack_from(message, LENGTH.size)[0]
    parts: list[bytes] = []
    for size in json.loads(message[end:after]):
        parts.append(message[after : after + size])
        after += size
    return _put_together(json.loads(message[start:end]), parts)


def _taken_apart(value: Any, parts: list[bytes]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {"bytes": _part(value, parts)}
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return {"tensor": [_part(raw, parts), str(value.dtype), list(value.shape)]}
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects is no message between ranks")
        return {"array": [_part(value.tobytes(), parts), value.dtype.str, list(value.shape)]}
    if isinstance(value, list):
        return [_taken_apart(item, parts) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_taken_apart(item, parts) for item in value]}
    if isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value).items()
        return {"dict": [[_taken_apart(key, parts), _taken_apart(item, parts)] for key, item in pairs]}
    kind = type(value)
    fields = _fields(kind)
    if fields is None:
        raise TypeError(f"a {kind.__name__} is no message between ranks")
    values = {name: _taken_apart(getattr(value, name), parts) for name in fields}
    return {"record": [kind.__module__, kind.__qualname__, values]}


def _part(raw: bytes, parts: list[bytes]) -> int:
    parts.append(raw)
    return len(parts) - 1


def _fields(kind: type) -> list[str] | None:
    """Fields of a record of memtrain; None for a class that is none."""
    if not kind.__module__.startswith(OWN):
        return None
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind.model_fields) if issubclass(kind, BaseModel) else None


def _put_together(node: Any, parts: list[bytes]) -> Any:
    if isinstance(node, list):
        return [_put_together(item, parts) for item in node]
    if not isinstance(node, dict):
        return node
    ((kind, inside),) = node.items()
    if kind == "bytes":
        return parts[inside]
    if kind == "tuple":
        return tuple(_put_together(item, parts) for item in inside)
    if kind == "dict":
        return {_put_together(key, parts): _put_together(item, parts) for key, item in inside}
    if kind == "record":
        module, name, values = inside
        return _record(module, name, values, parts)
    number, dtype, shape = inside
    raw = bytearray(parts[number])
    if kind == "array":
        return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
    if not raw:
        return torch.empty(shape, dtype=NUMBER_TYPES[dtype])
    return torch.frombuffer(raw, dtype=NUMBER_TYPES[dtype]).reshape(shape)


def _record(module: str, name: str, values: Mapping[str, Any], parts: list[bytes]) -> Any:
    if not module.startswith(OWN):
        raise ValueError(f"a message between ranks speaks of {module}.{name}, which is no record of memtrain")
    kind = getattr(importlib.import_module(module), name)
    if not isinstance(kind, type) or _fields(kind) != list(values):
        raise ValueError(f"a message between ranks speaks of {module}.{name}, which has other fields")
    return kind(**{field: _put_together(value, parts) for field, value in values.items()})
