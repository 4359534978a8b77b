"""State to disk and back, bit for bit, without pickle: nested containers of plain values and tensors.

A state is saved as `NAME.safetensors` (every tensor, named by its path in the state) and `NAME.json` (the
structure, with the plain values in place). Tensors are copied to the host a piece at a time, so that saving
needs no host memory for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from memtrain.trainers.runtime.parallel_write import write_tensors_at
from memtrain.trainers.runtime.safetensors_header import DTYPES
from memtrain.trainers.runtime.safetensors_writer import begin_file

State = Any
"""None, bool, int, float, str, tensor, numpy array; and lists, tuples and mappings of them."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Tensors that were taken out of a state, by their names in the file."""

    root: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    seen: dict[tuple[Any, ...], str] = field(default_factory=dict[tuple[Any, ...], str])
    """Name of each tensor by where it lies in memory."""


def save_state(state: State, path: Path, *, root: str = "") -> None:
    """Write `path.safetensors` and `path.json`.

    `root`: beginning that names of tensors in the file leave out; the keys of the state keep it. Tensors of
    any device come back on the CPU, contiguous. One tensor that appears twice (tied weights) is written once,
    and is one tensor again after loading; views that merely overlap are written each. A mapping comes back as
    a dict in the same order. The files are not synced to disk here.

    Raises: TypeError for a value that is none of the above, such as an object of a class; OSError.
    """
    taken = _Taken(root)
    structure = _take_apart(state, "", taken)
    _write_tensors(taken.tensors, path.with_name(path.name + ".safetensors"))
    path.with_name(path.name + ".json").write_text(json.dumps(structure))


def load_state(path: Path, only: AbstractSet[str] | None = None) -> State:
    """The state that `save_state` wrote, equal bit for bit, tensors on the CPU.

    `only`: of a mapping, these entries; nothing of the others is read.

    Raises: OSError, ValueError or safetensors' own error when the files are not what `save_state` writes;
    a checkpoint's checksums are verified before it is loaded.
    """
    structure = json.loads(path.with_name(path.name + ".json").read_text())
    with safe_open(path.with_name(path.name + ".safetensors"), "pt", device="cpu") as file:
        if only is not None:
            structure["dict"] = [[key, item] for key, item in structure["dict"] if key in only]
        wanted = _names_in(structure)
        # Cloned, because a view of the mapped file is not aligned for vector instructions: sums over it would
        # be taken in another order than in the uninterrupted run.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys() if name in wanted}  # noqa: SIM118
    return _put_together(structure, tensors)


def _take_apart(value: State, name: str, taken: _Taken) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return {"tensor": _add_tensor(value, name, taken)}
    if isinstance(value, np.ndarray):
        return {"array": _add_tensor(torch.from_numpy(value), name, taken)}
    if isinstance(value, list):
        return [_take_apart(item, _below(name, i), taken) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_take_apart(item, _below(name, i), taken) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return {
            "dict": [
                [_take_apart(key, "", _Taken()), _take_apart(item, _below(name, key), taken)]
                for key, item in value.items()
            ]
        }
    raise TypeError(f"a {type(value).__name__} at '{name}' cannot be saved without pickle")


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _add_tensor(tensor: Tensor, name: str, taken: _Taken) -> str:
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(f"the tensor at '{name}' ({tensor.dtype}, {tensor.layout}) cannot be saved")
    # Two empty tensors share the null pointer without being one tensor.
    same = (tensor.device, tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride())
    if same in taken.seen:
        return taken.seen[same]
    name = name.removeprefix(taken.root)
    # Two keys can spell one path ("a.b" and "a" holding "b"), and the format keeps one name for itself.
    while not name or name in taken.tensors or name == "__metadata__":
        name += "#"
    taken.tensors[name] = tensor.detach()
    taken.seen[same] = name
    return name


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    with open(path, "wb") as file:
        places = begin_file(file, tensors)
        write_tensors_at(file.fileno(), [(tensors[name], place) for name, place in places.items()])


def _names_in(node: Any) -> set[str]:
    """Names of the tensors of a structure."""
    if isinstance(node, list):
        return {name for item in node for name in _names_in(item)}
    if not isinstance(node, dict):
        return set()
    ((kind, inside),) = node.items()
    return {inside} if kind in ("tensor", "array") else _names_in(inside)


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
