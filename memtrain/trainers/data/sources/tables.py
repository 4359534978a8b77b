"""Tables (Parquet and Arrow files, datasets of the hub) to the rows that a JSON file would hold.

Arrow gives every struct of a column the keys of all of them, null where a row had no such key. A JSON row has
no such keys: they are left out, in structs at any depth, and the row says of which columns (`TableRow.held`),
for a null that was written is the same bytes. Nulls of a column, of a list, of a map, and in JSON text were
written, and stay. Columns of type JSON (Arrow's, and `Json` of `datasets`) become the values of their texts.
A damaged file, or a value that Python cannot hold, is told. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from memtrain.errors import DataError, first_line_of
from memtrain.recipes.formats.fields import BadRow, Row, TableRow
from memtrain.recipes.formats.json_text import MAX_DEPTH, first_doubled, json_at, read_json
from memtrain.trainers.data.sources.packed import most_unpacked, unpacks_too_much
from memtrain.trainers.data.tokenize.template_limits import limit_of_memory

Line = tuple[int, Row | BadRow]
Fix = Callable[[Any], Any]
"""Turns a value of a column, as Arrow gives it, into the one that JSON would hold."""
LISTS = re.compile(r"^(large_|fixed_size_)?list(_view)?<|^large_list_view<")
"""Arrow's types of lists, as it writes them."""
MOST_BATCH_BYTES = 2**31
"""Memory that rows read at once may take. Arrow's allocator takes one GiB of addresses at its first call."""
PYTHON_BYTES = 2**28
"""Bytes of a table that are Python's objects at a time, or one row's."""
ROWS_AT_ONCE = 64
"""Rows of a table turned into Python at a time."""


def parquet(path: Path, file: IO[bytes]) -> Iterator[Line]:
    """The rows of a Parquet file.

    Raises: DataError when it is damaged, or names a column twice.
    """
    from pyarrow.parquet import ParquetFile

    with table_faults(path, "parquet"):
        whole = ParquetFile(file)
        check_schema(whole.schema_arrow)
        yield from table_rows(whole.iter_batches(batch_size=ROWS_AT_ONCE), path)


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
        yield from table_rows(map(validated, batches), path)


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
    twice = first_doubled(schema.names)
    if twice is not None:
        raise ValueError(f"it names the column '{twice}' twice")
    level = list(schema.types)
    for _ in range(MAX_DEPTH):
        level = [kind.field(at).type for kind in level for at in range(kind.num_fields)]
        if not level:
            return
    raise ValueError(f"its columns are nested deeper than {MAX_DEPTH} levels")


def table_rows(batches: Iterable[Any], path: Path | None = None) -> Iterator[Line]:
    """Rows of Arrow record batches (or tables), numbered from 1; `path`: the file that they are of.

    Raises: DataError where a batch takes too much memory, or the file becomes far larger than it is.
    """
    number, columns, schema = 0, dict[str, Column](), None
    unpacked_bytes, most_bytes = 0, most_unpacked(path.stat().st_size) if path is not None else None
    for batch in _within_memory(batches, path):
        if schema is None or not schema.equals(batch.schema, check_metadata=True):
            schema = batch.schema
            columns = columns_of(schema)
        slices = (batch.slice(start, ROWS_AT_ONCE) for start in range(0, batch.num_rows, ROWS_AT_ONCE))
        for some in _within_memory(map(spelt_out, slices), path):
            unpacked_bytes += some.nbytes
            if most_bytes is not None and unpacked_bytes > most_bytes:
                raise unpacks_too_much(cast(Path, path), most_bytes)
            step = max(1, some.num_rows * PYTHON_BYTES // max(PYTHON_BYTES, some.nbytes))
            few = (some.slice(start, step) for start in range(0, some.num_rows, step))
            for rows in _within_memory(map(rows_of, few), path):
                for row in rows:
                    number += 1
                    yield number, as_in_json(row, columns)


def spelt_out(batch: Any) -> Any:
    """The batch with values in place of numbers into a dictionary: its bytes are then those of its rows."""
    import pyarrow as pa

    for at, kind in enumerate(batch.schema.types):
        if pa.types.is_dictionary(kind):
            batch = batch.set_column(at, batch.schema.names[at], batch.column(at).cast(kind.value_type))
    return batch


def _within_memory(made: Iterable[Any], path: Path | None) -> Iterator[Any]:
    """The same, each one made within `MOST_BATCH_BYTES`: of a table of kilobytes a value may be gigabytes.

    Raises: DataError.
    """
    items = iter(made)
    while True:
        try:
            with limit_of_memory(MOST_BATCH_BYTES):
                one = next(items, None)
        except MemoryError:
            raise DataError(
                f"{ROWS_AT_ONCE} rows of the table take more than {MOST_BATCH_BYTES >> 30} GiB of memory",
                str(path or "data"),
                "split its values, or write the rows as JSONL",
            ) from None
        if one is None:
            return
        yield one


class Column:
    """Turns the values of a column, as Arrow gives them, into those that JSON would hold."""

    def __init__(self, name: str, kind: Any, feature: Any) -> None:
        self.name = name
        self.num_left_out = 0
        """Nulls of structs that were left out so far."""
        self._keeps_nulls = False
        self.fix = self._fix_of(kind, feature)
        """What is done to a value that is not null; None where nothing is."""

    def values(self, value: Any) -> tuple[Any, Any]:
        """(the value as in JSON, the same with the nulls of its structs)."""
        before = self.num_left_out
        made = _fixed(value, self.fix)
        if self.num_left_out == before:
            return made, made
        self._keeps_nulls = True
        held = _fixed(value, self.fix)
        self._keeps_nulls = False
        return made, held

    def _fix_of(self, kind: Any, feature: Any) -> Fix | None:
        """What is done to values of an Arrow type; `feature`: that of `datasets`, where there is one."""
        import pyarrow as pa

        if str(kind) == "extension<arrow.json>" or _inner(feature, "_type") == "Json":
            return None if _inner(feature, "decode") is False else lambda text: json_at(text, self.name)
        if isinstance(kind, pa.BaseExtensionType):
            return self._fix_of(kind.storage_type, feature)
        if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            return self._fix_of(kind.value_type, feature)
        if pa.types.is_struct(kind):
            return self._fix_of_struct([kind.field(at) for at in range(kind.num_fields)], feature)
        if pa.types.is_map(kind):
            of_value = self._fix_of(kind.item_type, None)
            return of_value and (lambda given: {key: _fixed(one, of_value) for key, one in given.items()})
        if LISTS.search(str(kind)):
            of_item = self._fix_of(kind.value_type, _inner(feature, "feature"))
            return of_item and (lambda given: [_fixed(one, of_item) for one in given])
        return None

    def _fix_of_struct(self, fields: Sequence[Any], feature: Any) -> Fix:
        inner = {one.name: self._fix_of(one.type, _inner(feature, one.name)) for one in fields}

        def fix(given: Mapping[str, Any]) -> dict[str, Any]:
            made = {
                key: _fixed(one, inner[key])
                for key, one in given.items()
                if one is not None or self._keeps_nulls
            }
            self.num_left_out += len(given) - len(made)
            return made

        return fix


def columns_of(schema: Any) -> dict[str, Column]:
    """The columns of which values are other ones in JSON.

    Raises: ValueError where the metadata of `datasets` are no JSON.
    """
    try:
        about = read_json((schema.metadata or {}).get(b"huggingface", b"{}").decode())
    except BadRow as wrong:
        raise ValueError(f"its metadata of datasets (key huggingface): {wrong.what}") from None
    features = _inner(_inner(about, "info"), "features")
    columns = [Column(one.name, one.type, _inner(features, one.name)) for one in schema]
    return {column.name: column for column in columns if column.fix is not None}


def _inner(feature: Any, name: str) -> Any:
    """A part of a feature of `datasets`; a list of one feature is its older form of a list."""
    if isinstance(feature, list) and name == "feature":
        return cast(list[Any], feature)[0] if feature else None
    return cast(Mapping[str, Any], feature).get(name) if isinstance(feature, Mapping) else None


def _fixed(value: Any, fix: Fix | None) -> Any:
    return value if value is None or fix is None else fix(value)


def as_in_json(row: Row | BadRow, columns: Mapping[str, Column]) -> Row | BadRow:
    """The row as a JSON file would hold it; a BadRow where the text of a column of type JSON is none."""
    if isinstance(row, BadRow) or not columns:
        return row
    made, held = dict(row), dict[str, Any]()
    try:
        for name, column in columns.items():
            made[name], whole = column.values(row[name])
            if whole is not made[name]:
                held[name] = whole
    except BadRow as wrong:
        return wrong
    return TableRow(made, held) if held else made


def rows_of(batch: Any) -> list[Row | BadRow]:
    """The rows of a batch; a value that Python cannot hold makes its row a BadRow."""
    try:
        return batch.to_pylist(maps_as_pydicts="strict")
    except (ValueError, TypeError, OverflowError, KeyError):
        return [row_at(batch, at) for at in range(batch.num_rows)]


def row_at(batch: Any, at: int) -> Row | BadRow:
    """A row, column by column."""
    row: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        read: Callable[..., Any] = column[at].as_py
        try:
            row[name] = read(maps_as_pydicts="strict")
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            what = f"column '{name}' is not UTF-8: byte 0x{byte:02x} at position {error.start}"
            return BadRow(what, "write the column as UTF-8, or as bytes")
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            return BadRow(
                f"column '{name}' ({column.type}) cannot be read: {first_line_of(error)}",
                "write it as a string",
            )
    return row
