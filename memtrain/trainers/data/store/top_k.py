"""The file of a teacher's likeliest tokens: written in one pass over pieces of rows, read a piece at a time.

One safetensors file. P pieces, N scored tokens of all of them, K tokens kept of each:

    keys    uint64 [P]     digest of each piece: its tokens, and which of them are trained on
    starts  int64 [P + 1]  where the scored tokens of each piece begin
    ids     int32 [N, K]   likeliest first
    logps   float32 [N, K] under the softmax at the temperature of the file
    tail    float32 [N]    log-prob of all other tokens together

No torch here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from memtrain.errors import DataError

FILE = "teacher.safetensors"
VERSION = "1"
_TYPES = {"U64": np.uint64, "I64": np.int64, "I32": np.int32, "F32": np.float32}


@dataclass(frozen=True, slots=True)
class TopKFacts:
    """Facts of a file that a run must agree with, and the share of the part that was cut off."""

    teacher: str
    top_k: int
    temperature: float
    vocabulary: str
    """Digest of the tokens and their ids."""
    num_columns: int
    """Tokens of the vocabulary over which the teacher's distribution is."""
    mean_tail: float = 0.0
    """Mass of the tokens that were not kept, on the mean of all scored tokens."""
    most_tail: float = 0.0
    """The same of the token where it is largest."""


def key_of_piece(ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> int:
    """The digest of a piece of a row."""
    return xxh3_64_intdigest(np.ascontiguousarray(ids, np.int32).tobytes() + loss_mask.tobytes())


class Likely(NamedTuple):
    """Likeliest tokens at n places."""

    ids_nK: NDArray[np.int32]
    logps_nK: NDArray[np.float32]
    tail_n: NDArray[np.float32]


class TopKFile:
    """Likeliest tokens of the pieces of rows, read from where they are."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.facts, self._arrays = _read(self.path)
        keys: NDArray[np.uint64] = self._arrays["keys"]
        self._order = np.argsort(keys, kind="stable")
        self._sorted = keys[self._order]

    def piece(self, key: int) -> Likely | None:
        """Likeliest tokens of a piece; None where it is not there."""
        at = int(np.searchsorted(self._sorted, np.uint64(key)))
        if at == len(self._sorted) or int(self._sorted[at]) != key:
            return None
        number = int(self._order[at])
        low, high = (int(one) for one in self._arrays["starts"][number : number + 2])
        return Likely(*(self._arrays[name][low:high] for name in ("ids", "logps", "tail")))


def _read(path: Path) -> tuple[TopKFacts, Mapping[str, NDArray[Any]]]:
    fix = "make it with `memtrain score-teacher RECIPE`"
    if not path.is_file():
        raise DataError("there is no file of the teacher's top-k tokens", str(path), fix)
    damaged = DataError(
        "the file of the teacher's top-k tokens is damaged", str(path), f"remove it, and {fix}"
    )
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length)) if length < 1 << 20 else {}
        metadata = json.loads(header.pop("__metadata__")["memtrain"])
        version = metadata.pop("version")
        facts = TopKFacts(**metadata)
        ends = [one["data_offsets"][1] for one in header.values()]
        if 8 + length + max(ends) != path.stat().st_size:
            raise damaged
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        raise damaged from None
    if version != VERSION:
        raise DataError(
            f"the file has layout {version}, and this is memtrain with layout {VERSION}", str(path), fix
        )
    return facts, {name: _mapped(path, 8 + length, one, "r") for name, one in header.items()}


def check_facts(facts: TopKFacts, *, top_k: int, temperature: float, vocabulary: str, place: str) -> None:
    """Raise DataError where a file is not the one that a recipe asks for."""
    again = "make it again: memtrain score-teacher RECIPE"
    for name, own, other in (
        ("top_k", top_k, facts.top_k),
        ("temperature", temperature, facts.temperature),
    ):
        if own != other:
            raise DataError(
                f"{name} is {own:g}, and the file was made with {other:g}",
                place,
                f"set it to {other:g}, or {again}",
            )
    if vocabulary != facts.vocabulary:
        what = f"the teacher {facts.teacher} of the file has another tokenizer than the student"
        raise DataError(what, place, "use a teacher and a student of one family")


class TopKWriter:
    """Writes a file as the pieces come; it is there under its name once `finish` was called."""

    def __init__(
        self, folder: Path, keys: NDArray[np.uint64], scored: NDArray[np.int64], facts: TopKFacts
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.part = folder / FILE, folder / f"{FILE}.part"
        self.facts = facts
        starts = np.concatenate([[0], np.cumsum(scored)]).astype(np.int64)
        total, kept = int(starts[-1]), min(facts.top_k, facts.num_columns)
        shapes = {
            "keys": ("U64", [len(keys)]),
            "starts": ("I64", [len(starts)]),
            "ids": ("I32", [total, kept]),
        }
        shapes |= {"logps": ("F32", [total, kept]), "tail": ("F32", [total])}
        self._tensors, end = {}, 0
        for name, (kind, shape) in shapes.items():
            size = math.prod(shape) * np.dtype(_TYPES[kind]).itemsize
            self._tensors[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        header = self._header()
        with self.part.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + end)
        self._arrays = {
            name: _mapped(self.part, len(header), one, "r+") for name, one in self._tensors.items()
        }
        self._arrays["keys"][:], self._arrays["starts"][:] = keys, starts
        self._sum, self._most, self._count = 0.0, 0.0, 0

    def put(self, number: int, ids: NDArray[Any], logps: NDArray[Any], tail: NDArray[Any]) -> None:
        """The likeliest tokens of piece `number`."""
        low, high = (int(one) for one in self._arrays["starts"][number : number + 2])
        assert high - low == len(tail), "A piece has as many scored tokens as were counted."
        for name, values in (("ids", ids), ("logps", logps), ("tail", tail)):
            self._arrays[name][low:high] = values
        mass = np.exp(tail.astype(np.float64))
        self._sum, self._count = self._sum + float(mass.sum()), self._count + len(mass)
        self._most = max(self._most, float(mass.max(initial=0.0)))

    def finish(self) -> TopKFacts:
        """Give the file its name; its facts, with the mass of the tokens that were cut off."""
        for array in self._arrays.values():
            if isinstance(array, np.memmap):
                array.flush()
        mean = self._sum / max(1, self._count)
        self.facts = facts = replace(self.facts, mean_tail=mean, most_tail=self._most)
        with self.part.open("r+b") as file:
            file.write(self._header())
            file.flush()
            os.fsync(file.fileno())
        self.part.replace(self.path)
        return facts

    def _header(self) -> bytes:
        """The header of the format, as long before the pass as after it."""
        metadata = json.dumps({"version": VERSION, **asdict(self.facts)})
        text = json.dumps({"__metadata__": {"memtrain": metadata}, **self._tensors}).encode()
        length = -(-(len(text) + 96) // 256) * 256 if not hasattr(self, "_length") else self._length
        self._length = length
        return length.to_bytes(8, "little") + text.ljust(length)


def _mapped(path: Path, begin: int, one: Mapping[str, Any], mode: Any) -> NDArray[Any]:
    dtype, shape = _TYPES[one["dtype"]], tuple(one["shape"])
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, mode, offset=begin + one["data_offsets"][0], shape=shape)
