"""One file to its rows: JSONL, JSON, CSV, TSV, Parquet, Arrow and text, gzipped or not, read as a stream.

A row that cannot be read is a `BadRow` in its place, so that reading goes on after it; a file that cannot be
read is a DataError. No torch here.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from memtrain.errors import DataError
from memtrain.recipes.data import TextUnit
from memtrain.recipes.formats.fields import BadRow, Row, kind_of, shown

Line = tuple[int, Row | BadRow]
"""The number of a row in its file (lines for text formats, rows for tables; from 1), and the row."""

MAX_ROW_BYTES = 2**28
"""A longer row is taken for a broken file: 256 MiB is some 60 million tokens."""
JSON_CHUNK_CHARS = 2**16
TEXT_ROW_CHARS = 2**15
"""A text file is cut into rows of at most this many characters, some 8,000 tokens."""
TEXT = ".txt"
ROWS_AT_ONCE = 256
"""Rows of a table turned into Python at a time."""


def jsonl(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The objects of a JSON Lines file; blank lines are passed over."""
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if len(line) > MAX_ROW_BYTES:
            raise DataError(
                f"the line is longer than {MAX_ROW_BYTES >> 20} MiB", f"{path}:{number}", "split the row"
            )
        if not line.isspace():
            yield number, json_row(line)


def json_row(line: bytes) -> Row | BadRow:
    """The object on one line."""
    try:
        value = json.loads(line.decode().rstrip())
    except UnicodeDecodeError as error:
        return not_utf8(error)
    except json.JSONDecodeError as error:
        return BadRow(
            f"broken JSON: {error.msg} (column {error.colno})", "mend the line; each line is one object"
        )
    except RecursionError:
        return BadRow("JSON nested too deep")
    return as_row(value)


def not_utf8(error: UnicodeDecodeError) -> BadRow:
    """What is wrong with bytes that are no UTF-8."""
    byte = error.object[error.start]
    return BadRow(f"not UTF-8: byte 0x{byte:02x} at position {error.start}", "save the file as UTF-8")


def as_row(value: Any) -> Row | BadRow:
    """The value itself when it is an object."""
    if isinstance(value, dict):
        return value
    return BadRow(f"a row is an object, and this is {kind_of(value)} ({shown(value)})", 'write {"text": ...}')


def json_values(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The objects of a JSON file: one list of objects, or objects one after another.

    Raises: DataError where the JSON is broken: nothing can be read after that.
    """
    decoder = json.JSONDecoder()
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    buffer, at, line, in_list, ended = "", 0, 1, False, False
    while True:
        while at < len(buffer) and (buffer[at].isspace() or (in_list and buffer[at] == ",")):
            line += buffer[at] == "\n"
            at += 1
        if at == len(buffer) and not ended:
            buffer, at = text.read(JSON_CHUNK_CHARS), 0
            ended = not buffer
            continue
        if ended and at == len(buffer):
            if in_list:
                raise DataError(
                    "the JSON list has no end", f"{path}:{line}", "the file is cut short: mend it"
                )
            return
        if line == 1 and not in_list and buffer[at] == "[":
            in_list, at = True, at + 1
            continue
        if in_list and buffer[at] == "]":
            return
        try:
            value, end = decoder.raw_decode(buffer, at)
        except json.JSONDecodeError as error:
            more = "" if ended else text.read(max(JSON_CHUNK_CHARS, len(buffer) - at))
            cut_short = error.msg.startswith("Unterminated") or error.pos > len(buffer) - 16
            if not more or not cut_short or len(buffer) - at > MAX_ROW_BYTES:
                place = line + buffer.count("\n", at, error.pos)
                raise DataError(f"broken JSON: {error.msg}", f"{path}:{place}", "mend the file") from None
            buffer, at = buffer[at:] + more, 0
            continue
        yield line, as_row(value)
        line += buffer.count("\n", at, end)
        at = end


def separated(path: Path, file: IO[bytes], delimiter: str) -> Iterator[Line]:
    """The rows of a CSV file under its header line.

    Raises: DataError when the header repeats a name, or a quote never ends.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    rows = csv.reader(
        io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True
    )
    try:
        header = next(rows, [])
        if len(set(header)) < len(header):
            raise DataError(
                f"the header names a column twice: {', '.join(header)}", f"{path}:1", "rename one"
            )
        for cells in rows:
            if len(cells) == len(header):
                yield rows.line_num, dict(zip(header, cells, strict=True))
            elif cells:
                wrong = BadRow(
                    f"the row has {len(cells)} cells and the header {len(header)}",
                    'put text that holds a comma, a quote or a line break in "quotes"',
                )
                yield rows.line_num, wrong
    except csv.Error as error:
        raise DataError(f"broken CSV: {error}", f"{path}:{rows.line_num}", "mend the quotes") from None


def parquet(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The rows of a Parquet file."""
    from pyarrow.parquet import ParquetFile

    return table_rows(ParquetFile(file).iter_batches(batch_size=ROWS_AT_ONCE))


def arrow(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The rows of an Arrow file, in the stream form (as `datasets` writes it) or the file form."""
    from pyarrow import ipc

    magic = file.read(6)
    file.seek(0)
    if magic == b"ARROW1":
        reader = ipc.open_file(file)
        return table_rows(reader.get_batch(index) for index in range(reader.num_record_batches))
    return table_rows(iter(ipc.open_stream(file)))


def table_rows(batches: Iterator[Any]) -> Iterator[Line]:
    """Rows of Arrow record batches, numbered from 1."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                number += 1
                yield number, row


def text_lines(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The lines of a text file, each a row `text` without its line end; blank ones are passed over.

    Raises: DataError where a line is longer than 256 MiB.
    """
    yield from text_blocks(path, file, is_paragraph=False)


def text_blocks(path: Path, file: IO[bytes], *, is_paragraph: bool = True) -> Iterator[Line]:
    """The paragraphs of a text file, each a row `text`: lines that follow each other, up to a blank one.

    Raises: DataError where a line or a paragraph is longer than 256 MiB.
    """
    stream = io.TextIOWrapper(file, encoding="utf-8-sig")
    block: list[str] = []
    first, size, number = 1, 0, 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        size += len(line)
        if size > MAX_ROW_BYTES:
            what = f"the {'paragraph' if is_paragraph else 'line'} is longer than {MAX_ROW_BYTES >> 20} MiB"
            raise DataError(what, f"{path}:{first}", "set data.text_unit: document, which cuts long text")
        if not line.isspace():
            block.append(line)
        if block and (line.isspace() or not is_paragraph):
            yield first, {"text": "".join(block).rstrip("\n")}
            block = []
        if not block:
            first, size = number + 1, 0
    if block:
        yield first, {"text": "".join(block).rstrip("\n")}


def text_pieces(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """Consecutive pieces of a text file, each a row `text` of at most 32,768 characters.

    A piece ends after the last blank line that fits, else after the last line end, else where it is full:
    nothing is lost, and the pieces put together are the file.
    """
    stream = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    held, line = "", 1
    while True:
        more = stream.read(TEXT_ROW_CHARS - len(held))
        held += more
        if not held:
            return
        end = len(held) if len(held) < TEXT_ROW_CHARS else text_cut(held)
        yield line, {"text": held[:end]}
        line += held.count("\n", 0, end)
        held = held[end:]


def text_cut(held: str) -> int:
    """Where a full piece of text ends."""
    for mark in ("\n\n", "\n", " "):
        place = held.rfind(mark)
        if place > 0:
            return place + len(mark)
    return len(held)


READERS: dict[str, Callable[[Path, IO[bytes]], Iterator[Line]]] = {
    ".jsonl": jsonl,
    ".ndjson": jsonl,
    ".json": json_values,
    ".csv": lambda path, file: separated(path, file, ","),
    ".tsv": lambda path, file: separated(path, file, "\t"),
    ".parquet": parquet,
    ".arrow": arrow,
    TEXT: text_lines,
}
"""Readers by the ending of the file's name, before a `.gz`."""
TEXT_READERS: dict[TextUnit, Callable[[Path, IO[bytes]], Iterator[Line]]] = {
    "line": text_lines,
    "paragraph": text_blocks,
    "document": text_pieces,
}
"""Readers of text by what a row of it is."""
SEEKING = (".parquet", ".arrow")


def ending(path: Path) -> str:
    """The ending that says how to read a file, without `.gz`."""
    inner = path.with_suffix("") if path.suffix == ".gz" else path
    return inner.suffix.lower()


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked."""
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def read_file(path: Path, unit: TextUnit = "line") -> Iterator[Line]:
    """The rows of a file, in order; `unit` is a row of it where it is text.

    Raises: DataError when the file is missing, of an unknown kind, or cannot be read to its end.
    """
    reader = TEXT_READERS[unit] if ending(path) == TEXT else READERS.get(ending(path))
    if reader is None:
        raise DataError(
            f"'{path.name}' is of no kind that can be read",
            str(path),
            f"readable: {', '.join(READERS)} (.gz too)",
        )
    if path.suffix == ".gz" and ending(path) in SEEKING:
        raise DataError(f"'{path.name}' cannot be read through gzip", str(path), "unpack it with gunzip")
    try:
        with opened(path) as file:
            yield from reader(path, file)
    except UnicodeDecodeError as error:
        raise DataError(not_utf8(error).what, str(path), "save the file as UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"not a whole gzip file: {error}", str(path), "download or pack it again") from None
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'", str(path)) from None
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}", str(path)) from None
    except ValueError as error:
        if ending(path) not in SEEKING:
            raise
        first = str(error).splitlines()[0]
        raise DataError(
            f"not a {ending(path)[1:]} file: {first}", str(path), "write the file again"
        ) from None
