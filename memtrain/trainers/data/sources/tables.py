"""Parquet and Arrow files to rows, a few at a time; a damaged file, or a value Python cannot hold, is told.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from memtrain.errors import DataError, first_line_of
from memtrain.recipes.formats.fields import BadRow, Row
from memtrain.recipes.formats.json_text import MAX_DEPTH

Line = tuple[int, Row | BadRow]
ROWS_AT_ONCE = 256
"""Rows of a table turned into Python at a time."""


def parquet(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The rows of a Parquet file.

    Raises: DataError when it is damaged, or names a column twice.
    """
    from pyarrow.parquet import ParquetFile

    with table_faults(path, "parquet"):
        whole = ParquetFile(file)
        check_schema(whole.schema_arrow)
        yield from table_rows(whole.iter_batches(batch_size=ROWS_AT_ONCE))


def arrow(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The rows of an Arrow file, in the stream form (as `datasets` writes it) or the file form.

    Raises: DataError when it is damaged, or names a column twice.
    """
    from pyarrow import ipc

    with table_faults(path, "arrow"):
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            reader = ipc.open_file(file)
            check_schema(reader.schema)
            batches: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
        else:
            stream = ipc.open_stream(file)
            check_schema(stream.schema)
            batches = iter(stream)
        yield from table_rows(map(validated, batches))


def validated(batch: Any) -> Any:
    """The batch, if its offsets and texts are sound: pyarrow takes them as the file says, and may crash.

    Raises: ArrowInvalid.
    """
    batch.validate(full=True)
    return batch


@contextmanager
def table_faults(path: Path, kind: str) -> Iterator[None]:
    """Context in which pyarrow's errors about a damaged file become one DataError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, ValueError, TypeError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"not a {kind} file: {first_line_of(error)}", str(path), "write the file again"
        ) from None


def check_schema(schema: Any) -> None:
    """Raise ValueError for columns that Python's rows could not hold: doubled names, endless nesting."""
    names = list(schema.names)
    if len(set(names)) < len(names):
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"it names the column '{twice}' twice")
    level = list(schema.types)
    for _ in range(MAX_DEPTH):
        level = [kind.field(at).type for kind in level for at in range(kind.num_fields)]
        if not level:
            return
    raise ValueError(f"its columns are nested deeper than {MAX_DEPTH} levels")


def table_rows(batches: Iterable[Any]) -> Iterator[Line]:
    """Rows of Arrow record batches, numbered from 1."""
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            some = batch.slice(start, ROWS_AT_ONCE)
            for row in rows_of(some):
                number += 1
                yield number, row


def rows_of(batch: Any) -> list[Row | BadRow]:
    """The rows of a batch; a value that Python cannot hold makes its row a BadRow."""
    try:
        return batch.to_pylist()
    except (ValueError, TypeError, OverflowError):
        return [row_at(batch, at) for at in range(batch.num_rows)]


def row_at(batch: Any, at: int) -> Row | BadRow:
    """A row, column by column."""
    row: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        read: Callable[[], Any] = column[at].as_py
        try:
            row[name] = read()
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            what = f"column '{name}' is not UTF-8: byte 0x{byte:02x} at position {error.start}"
            return BadRow(what, "write the column as UTF-8, or as bytes")
        except (ValueError, TypeError, OverflowError) as error:
            return BadRow(
                f"column '{name}' ({column.type}) cannot be read: {first_line_of(error)}",
                "write it as a string",
            )
    return row
