"""Files whose blocks are digested as they are written, and compared when they are first used.

A block is 256 KiB: a row that is read from the disk costs the digest of one block, once. No torch here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memtrain.errors import DataError

BLOCK_BYTES = 2**18
Bytes = NDArray[np.uint8]
Sums = NDArray[np.uint64]


class SummedFile:
    """A new file, written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        from xxhash import xxh3_64

        self.path = path
        self.num_bytes = 0
        self._file = path.open("wb")
        self._state, self._filled = xxh3_64(), 0
        self._sums: list[int] = []

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self.num_bytes += len(data)
        rest = memoryview(data)
        while len(rest):
            some = rest[: BLOCK_BYTES - self._filled]
            self._state.update(some)
            self._filled += len(some)
            rest = rest[len(some) :]
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def sums(self) -> Sums:
        """uint64, digest (xxh3) of each block; no more can be written."""
        if self._filled:
            self._end_block()
        return np.array(self._sums, np.uint64)

    def _end_block(self) -> None:
        self._sums.append(self._state.intdigest())
        self._state.reset()
        self._filled = 0


class CheckedFile:
    """A file on disk, memory-mapped, of which each block is compared with its digest before its first use."""

    def __init__(self, path: Path, num_bytes: int, sums: Sums) -> None:
        given = path.stat().st_size if path.is_file() else -1
        if given != num_bytes:
            raise DataError(
                f"'{path.name}' has {given} bytes, not {num_bytes}",
                str(path),
                f"remove '{path.parent}'; it will be made again",
            )
        self.path = path
        # A plain array over the map: a view of the map's own class takes seven times as long to make.
        self._bytes: Bytes = (
            np.asarray(np.memmap(path, np.uint8, "r")) if num_bytes else np.zeros(0, np.uint8)
        )
        self._sums = sums
        self._is_sound = np.zeros(len(sums), np.bool_)

    def whole(self) -> Bytes:
        """All bytes.

        Raises: DataError when they differ from the written bytes.
        """
        return self.part(0, len(self._bytes))

    def part(self, start: int, end: int) -> Bytes:
        """Bytes `start` to `end`, as a view.

        Raises: DataError when they differ from the written bytes.
        """
        first, last = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        if not self._is_sound[first:last].all():
            for block in range(first, last):
                self._compare(block)
        return self._bytes[start:end]

    def _compare(self, block: int) -> None:
        from xxhash import xxh3_64_intdigest

        if self._is_sound[block]:
            return
        first = block * BLOCK_BYTES
        given = self._bytes[first : first + BLOCK_BYTES]
        if xxh3_64_intdigest(given.data) != int(self._sums[block]):
            raise DataError(
                f"'{self.path.name}' is damaged: bytes {first:,} to {first + len(given):,} differ from "
                "the written bytes",
                str(self.path),
                f"remove '{self.path.parent}'; it will be made again. Check the disk",
            )
        self._is_sound[block] = True
