"""The bytes of a file as its reader wants them: unpacked (gzip, bzip2, xz, zstd), and digested on the way.

A packed file is read to its true end: one that is cut short, or holds anything after its last stream, is an
error and never fewer rows. No torch here.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from memtrain.errors import DataError
from memtrain.recipes.reading.regular_file import open_regular

PACKINGS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
"""Endings of packed files, and their compression."""
CHUNK_BYTES = 2**18
MOST_UNPACKING_BYTES = 2**30
"""Memory that unpacking xz may take; its own highest setting takes 65 MiB."""


def most_unpacked(file_bytes: int) -> int:
    """Most bytes that a packed file may become: a thousand times its own (gzip's limit), and 1 GiB."""
    return 2**30 + 1000 * file_bytes


def unpacks_too_much(path: Path, most_bytes: int) -> DataError:
    """The error of a file that becomes more than that."""
    size = path.stat().st_size
    return DataError(
        f"the file of {size:,} bytes unpacks to more than {most_bytes / 2**30:,.1f} GiB: no rows do",
        str(path),
        "download it again; if its rows are all alike, give fewer of them, unpacked",
    )


class Pulled(io.RawIOBase):
    """A stream of the bytes that `pull` gives: at most so many at a time, none at the end."""

    def __init__(self, pull: Callable[[int], bytes]) -> None:
        self._pull = pull

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; how many bytes there were, 0 at the end."""
        data = self._pull(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Digest:
    """The digest (xxh3, 128 bits) of the bytes that were read through it."""

    def __init__(self) -> None:
        import xxhash

        self._state = xxhash.xxh3_128()

    def watching(self, file: IO[bytes]) -> IO[bytes]:
        """The same bytes in the same order, digested as they are read."""

        def pull(size: int) -> bytes:
            data = file.read(size)
            self._state.update(data)
            return data

        return io.BufferedReader(Pulled(pull), CHUNK_BYTES)

    def finish(self, file: IO[bytes]) -> None:
        """Digest the unread rest of a watched file, whose reader may have closed it early."""
        while data := file.read(CHUNK_BYTES):
            self._state.update(data)

    def hexdigest(self) -> str:
        """The digest so far."""
        return self._state.hexdigest()


class _Streams:
    """Unpacks bzip2 or xz: stream after stream, and nothing else, to the end of the file.

    Python's own readers end silently at the first bytes after a stream that are no stream themselves.
    """

    def __init__(self, file: IO[bytes], new: Callable[[], Any]) -> None:
        self.file, self.new = file, new
        self.decoder: Any = None

    def pull(self, size: int) -> bytes:
        """At most `size` unpacked bytes; none at the end.

        Raises: EOFError when the file ends inside a stream.
        """
        while True:
            if self.decoder is None or self.decoder.eof:
                given = self._next_stream()
                if not given:
                    return b""
                self.decoder = self.new()
            elif self.decoder.needs_input:
                given = self.file.read(CHUNK_BYTES)
                if not given:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            else:
                given = b""
            if data := self.decoder.decompress(given, size):
                return data

    def _next_stream(self) -> bytes:
        """Packed bytes from the beginning of the next stream on; zeros between streams are padding."""
        given = b"" if self.decoder is None else self.decoder.unused_data.lstrip(b"\0")
        while not given and (more := self.file.read(CHUNK_BYTES)):
            given = more if self.decoder is None else more.lstrip(b"\0")
        return given


def unpacked(file: IO[bytes], suffix: str) -> IO[bytes]:
    """The unpacked bytes of a file whose name ends in `suffix`."""
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))
    if suffix == ".zst":
        import pyarrow as pa

        stream: Any = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")
        return io.BufferedReader(Pulled(stream.read), CHUNK_BYTES)
    if suffix == ".bz2":
        streams = _Streams(file, bz2.BZ2Decompressor)
    else:
        streams = _Streams(file, lambda: lzma.LZMADecompressor(memlimit=MOST_UNPACKING_BYTES))
    return io.BufferedReader(Pulled(streams.pull), CHUNK_BYTES)


def counted(file: IO[bytes], path: Path) -> IO[bytes]:
    """The same bytes, up to the most that the file at `path` may become.

    Raises: DataError beyond them.
    """
    most, given = most_unpacked(path.stat().st_size), 0

    def pull(size: int) -> bytes:
        nonlocal given
        data = file.read(min(size, CHUNK_BYTES))
        given += len(data)
        if given > most:
            raise unpacks_too_much(path, most)
        return data

    return io.BufferedReader(Pulled(pull), CHUNK_BYTES)


@contextmanager
def opened(path: Path, digest: Digest | None = None) -> Iterator[IO[bytes]]:
    """The unpacked bytes of a file; `digest` sees the packed ones, to the end where the reader leaves some.

    Raises: DataError when a packed file is damaged or cut short.
    """
    suffix = path.suffix.lower()
    with open_regular(path) as raw:
        file = raw if digest is None else digest.watching(raw)
        if suffix not in PACKINGS:
            yield file
        else:
            try:
                yield counted(unpacked(file, suffix), path)
            except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise DataError(
                    f"not a whole {PACKINGS[suffix]} file: {error}", str(path), "download or pack it again"
                ) from None
        if digest is not None:
            digest.finish(raw)
