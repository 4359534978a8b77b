"""Reader of a file's rows: JSONL, JSON, CSV, TSV, Parquet, Arrow and text, packed or not, read as a stream.

A row that cannot be read is a `BadRow` in its place, so that reading goes on after it; a file that cannot be
read is a DataError. No torch here.
"""

from __future__ import annotations

import csv
import io
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from memtrain.errors import DataError
from memtrain.recipes.formats.fields import BadRow, Row, kind_of, shown
from memtrain.recipes.formats.json_text import JsonReader
from memtrain.recipes.sections.data import TextUnit
from memtrain.trainers.data.sources.packed import PACKINGS, Digest, opened
from memtrain.trainers.data.sources.tables import arrow, parquet

Line = tuple[int, Row | BadRow]
"""The number of a row in its file (lines for text formats, rows for tables; from 1), and the row. Rows that
share a line of JSON are numbered as rows, so that no two have one place."""

MAX_ROW_BYTES = 2**28
"""A longer row is taken for a broken file: 256 MiB is some 60 million tokens."""
JSON_CHUNK_CHARS = 2**16
TEXT_ROW_CHARS = 2**15
"""A text file is cut into rows of at most this many characters, some 8,000 tokens."""
TEXT = ".txt"


def jsonl(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The objects of a JSON Lines file; blank lines are passed over."""
    number, reader = 0, JsonReader()
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if len(line) > MAX_ROW_BYTES:
            raise DataError(
                f"the line is longer than {MAX_ROW_BYTES >> 20} MiB", f"{path}:{number}", "split the row"
            )
        if not line.isspace():
            yield number, json_row(line, reader)


def json_row(line: bytes, reader: JsonReader) -> Row | BadRow:
    """The object on one line."""
    try:
        return as_row(reader.whole(line.decode().rstrip()))
    except UnicodeDecodeError as error:
        return not_utf8(error)
    except BadRow as wrong:
        return wrong


def not_utf8(error: UnicodeDecodeError) -> BadRow:
    """Fault of bytes that are no UTF-8."""
    byte = error.object[error.start]
    if error.start == 0 and error.object[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return BadRow("the file is UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE")
    return BadRow(f"not UTF-8: byte 0x{byte:02x} at position {error.start}", "save the file as UTF-8")


def refuse_unmarked_utf16(path: Path) -> None:
    """Refuse a file whose first two bytes are a character and a zero: UTF-16 that does not say so. As UTF-8
    its text would be read with a zero beside every letter.

    Raises: DataError.
    """
    with opened(path) as file:
        start = file.read(2)
    if len(start) == 2 and start.count(0) == 1:
        name = "UTF-16BE" if start[0] == 0 else "UTF-16LE"
        raise DataError(
            f"the file is {name}, not UTF-8",
            str(path),
            f"convert it: iconv -f {name} -t UTF-8 FILE > NEW_FILE",
        )


def as_row(value: Any) -> Row | BadRow:
    """The value itself when it is an object."""
    if isinstance(value, dict):
        return value
    return BadRow(
        f"a row must be a JSON object, but this is {kind_of(value)} ({shown(value)})", 'write {"text": ...}'
    )


def json_values(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The objects of a JSON file: lists of objects, or objects, one after another.

    Raises: DataError where the JSON is broken: nothing can be read after that.
    """
    reader = JsonReader()
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    buffer, at, line, number, in_list, ended = "", 0, 1, 0, False, False
    while True:
        while at < len(buffer) and (buffer[at].isspace() or (in_list and buffer[at] == ",")):
            line += buffer[at] == "\n"
            at += 1
        if at == len(buffer) and not ended:
            buffer, at = text.read(JSON_CHUNK_CHARS), 0
            ended = not buffer
            continue
        if at == len(buffer):
            if in_list:
                raise DataError(
                    "the JSON list does not end", f"{path}:{line}", "the file is truncated: replace it"
                )
            return
        if buffer[at] == ("]" if in_list else "["):
            in_list, at = not in_list, at + 1
            continue
        try:
            value, end = reader.next(buffer, at)
        except json.JSONDecodeError as error:
            more = "" if ended else text.read(max(JSON_CHUNK_CHARS, len(buffer) - at))
            cut_short = error.msg.startswith("Unterminated") or error.pos > len(buffer) - 16
            if not more or not cut_short or len(buffer) - at > MAX_ROW_BYTES:
                place = line + buffer.count("\n", at, error.pos)
                raise DataError(f"invalid JSON: {error.msg}", f"{path}:{place}", "fix the file") from None
            buffer, at = buffer[at:] + more, 0
            continue
        except BadRow as wrong:
            raise DataError(wrong.what, f"{path}:{line}", wrong.fix) from None
        number = max(line, number + 1)
        yield number, checked_row(value, reader, buffer[at:end])
        line += buffer.count("\n", at, end)
        at = end


def checked_row(value: Any, reader: JsonReader, text: str) -> Row | BadRow:
    """The value, read from `text`, where it is an object that loses nothing."""
    try:
        reader.check(value, text)
    except BadRow as wrong:
        return wrong
    return as_row(value)


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
        raise DataError(f"invalid CSV: {error}", f"{path}:{rows.line_num}", "fix the quotes") from None


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
    """End of a full piece of text."""
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
"""Readers by the ending of the file's name, before that of its packing."""
TEXT_READERS: dict[TextUnit, Callable[[Path, IO[bytes]], Iterator[Line]]] = {
    "line": text_lines,
    "paragraph": text_blocks,
    "document": text_pieces,
}
"""Readers of text by the unit of a row."""
SEEKING = (".parquet", ".arrow")
READABLE = f"{', '.join(READERS)} (packed too: {', '.join(PACKINGS)})"


def ending(path: Path) -> str:
    """The ending that says how to read a file, without that of its packing."""
    inner = path.with_suffix("") if path.suffix.lower() in PACKINGS else path
    return inner.suffix.lower()


def read_file(path: Path, unit: TextUnit = "line", digest: Digest | None = None) -> Iterator[Line]:
    """The rows of a file, in order; `unit` is a row of it where it is text.

    `digest` is of all bytes of the file once the last row was read; a table's are read again for it.
    Raises: DataError when the file is missing, of an unknown kind, or cannot be read to its end.
    """
    reader = TEXT_READERS[unit] if ending(path) == TEXT else READERS.get(ending(path))
    if reader is None:
        raise DataError(
            f"'{path.name}' is not a readable kind of file",
            str(path),
            f"give a file of a kind that is read: {READABLE}",
        )
    is_table, packing = ending(path) in SEEKING, PACKINGS.get(path.suffix.lower())
    if is_table and packing:
        raise DataError(
            f"'{path.name}' cannot be read through {packing}", str(path), f"unpack it with {packing} -d"
        )
    try:
        if not is_table:
            refuse_unmarked_utf16(path)
        with opened(path, None if is_table else digest) as file:
            yield from reader(path, file)
        if is_table and digest is not None:
            with opened(path, digest):
                pass
    except UnicodeDecodeError as error:
        fault = not_utf8(error)
        raise DataError(fault.what, str(path), fault.fix) from None
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}'", str(path), "check the path") from None
    except OSError as error:
        what = f"cannot read '{path}': {error.strerror or error}"
        raise DataError(what, str(path), "check its permissions, and its disk") from None
