"""The safetensors files of a model folder, looked at without reading a weight: whole, and where they say."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.config_file import read_json_object
from memtrain.recipes.reading.regular_file import open_regular

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file. Source: https://github.com/huggingface/safetensors#format."""

AGAIN = "copy or download the model again: an interrupted transfer leaves such files"


def check_weights(folder: Path, key: str = "model.path") -> None:
    """Refuse a folder whose weights cannot be read whole, at the `key` of the recipe that names it.

    Reads headers only: milliseconds for a model of any size. A shard that is cut off is told with the bytes
    that are missing.

    Raises: LaunchError when there are no safetensors files, one is damaged or missing, or the index names
    weights that its files do not hold.
    """
    if (folder / SINGLE).exists():
        header_of(folder / SINGLE, key)
        return
    if (folder / INDEX).exists():
        placed = index_of(folder, key)
        for file in sorted(set(placed.values())):
            inside = header_of(folder / file, key)
            lost = [name for name, place in placed.items() if place == file and name not in inside]
            if lost:
                raise LaunchError(
                    f"{folder / INDEX} lists {lost[0]} in {file}, which has no such weight"
                    + (f" ({len(lost) - 1} more like it)" if len(lost) > 1 else ""),
                    key,
                    AGAIN,
                )
        return
    if any(folder.glob("*.safetensors")):
        return  # under another name, which its config.json may give: left to transformers
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if others:
        raise LaunchError(
            f"the weights of {folder} are pickle files ({', '.join(others[:3])}), which can run code",
            key,
            "only safetensors files are read; convert them with save_pretrained",
        )
    raise LaunchError(f"{folder} has no {SINGLE} and no {INDEX}", key, AGAIN)


def check_shapes(folder: Path, wanted: Mapping[str, Sequence[int]], key: str = "model.path") -> None:
    """Refuse weights of another shape than the configuration's, by their `wanted` shapes.

    Headers alone are read, and names that the files do not have are passed over. Raises: LaunchError.
    """
    files = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
    apart = [
        f"{name} ({held['shape']} in its files, {list(wanted[name])} by its config.json)"
        for file in files
        for name, held in sorted(header_of(file, key).items())
        if name in wanted and list(held["shape"]) != list(wanted[name])
    ]
    if apart:
        more = f" and {len(apart) - 3} more" if len(apart) > 3 else ""
        raise LaunchError(
            f"{folder} has weights of another shape for {', '.join(apart[:3])}{more}",
            f"{folder / 'config.json'}",
            "take the config.json and the weights of one and the same model",
        )


def index_of(folder: Path, key: str = "model.path") -> dict[str, str]:
    """The file of each weight, as the index of a folder says.

    Raises: LaunchError when the index is no index, or names a file that is missing or lies elsewhere.
    """
    placed = read_json_object(folder / INDEX, key).get("weight_map")
    is_map = isinstance(placed, Mapping) and all(
        isinstance(file, str) for file in cast(Mapping[str, Any], placed).values()
    )
    if not is_map or not placed:
        raise LaunchError(f"{folder / INDEX} has no weight_map from weights to files", key, AGAIN)
    for file in sorted(set(cast(dict[str, str], placed).values())):
        if Path(file).name != file:
            raise LaunchError(
                f"{folder / INDEX} lists {json.dumps(file)}, which is not in the folder", key, AGAIN
            )
        if not (folder / file).is_file():
            raise LaunchError(f"{folder} lacks {file}, which its index names", key, AGAIN)
    return cast(dict[str, str], placed)


def header_of(file: Path, key: str = "model.path") -> dict[str, Any]:
    """The header of a safetensors file: its tensors by name.

    Raises: LaunchError when the file cannot be read, is none, or is shorter or longer than its header says.
    """
    try:
        num_bytes = file.stat().st_size
        with open_regular(file) as opened:
            length = opened.read(8)
            size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
            raw = opened.read(size) if 2 <= size <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise LaunchError(f"{file} cannot be read: {error.strerror}", key, "check its permissions") from None
    if not num_bytes:
        raise LaunchError(f"{file} is empty", key, AGAIN)
    if raw[:1] == b"{" and len(raw) < size:
        raise LaunchError(f"{file} is cut off within its header, after {num_bytes:,} bytes", key, AGAIN)
    try:
        header = json.loads(raw) if raw[:1] == b"{" else None
        entries = {name: one for name, one in cast(dict[str, Any], header).items() if name != "__metadata__"}
        end = 8 + size + max((int(one["data_offsets"][1]) for one in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise LaunchError(f"{file} is not a safetensors file{_pointer(file)}", key, AGAIN) from None
    if end != num_bytes:
        is_short = end > num_bytes
        what = f"is cut off: it has {num_bytes:,} of {end:,} bytes" if is_short else "is damaged"
        more = "" if is_short else f": {num_bytes - end:,} bytes more than its header describes"
        raise LaunchError(f"{file} {what}{more}", key, AGAIN)
    return entries


def _pointer(file: Path) -> str:
    """Words about a file in the weights' place, where its kind is known."""
    with open_regular(file) as opened:
        begun = opened.read(64)
    is_pointer = begun.startswith(b"version https://git-lfs")
    return " but the pointer of Git LFS: fetch it with `git lfs pull`" if is_pointer else ""
