"""Small files that become large ones: read within limits of memory and bytes, and refused beyond them."""

import gzip
import resource
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from memtrain.errors import DataError
from memtrain.recipes.formats.fields import BadRow
from memtrain.trainers.data.sources import packed, tables
from memtrain.trainers.data.sources.readers import read_file
from memtrain.trainers.data.tokenize import workers
from memtrain.trainers.data.tokenize.workers import check_chars

MIB = 2**20


def repeated(path: Path, text: str, count: int) -> Path:
    """A table of equal rows, which is little more than one of them."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([text]))
    pa.parquet.write_table(pa.table({"text": column}), path, compression="zstd")
    return path


def test_a_table_whose_rows_fill_the_memory_is_refused_and_the_limit_is_lifted(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_BATCH_BYTES", 128 * MIB)
    path = repeated(tmp_path / "a.parquet", "a" * 8 * MIB, 64)
    assert path.stat().st_size < MIB
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match="64 rows of the table take more than"):
        list(read_file(path))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz"])
def test_a_file_that_becomes_far_larger_than_it_is_is_refused_on_the_way(tmp_path, monkeypatch, name):
    monkeypatch.setattr(packed, "most_unpacked", lambda size: 8 * MIB)
    monkeypatch.setattr(tables, "most_unpacked", lambda size: 8 * MIB)
    path, text, rows = tmp_path / name, "a" * (MIB // 4), 400
    if name == "a.parquet":
        repeated(path, text, rows)
    else:
        path.write_bytes(gzip.compress(f'{{"text": "{text}"}}\n'.encode() * rows))
    given: list[int] = []
    with pytest.raises(DataError, match="unpacks to more than 0.0 GiB: no rows do") as error:
        given.extend(number for number, _ in read_file(path))
    assert len(given) * len(text) <= 8 * MIB
    assert error.value.faults[0].where == str(path)


def test_the_bytes_that_a_file_may_become_leave_room_for_packed_text(tmp_path):
    assert packed.most_unpacked(2000) > 2**30
    assert packed.most_unpacked(2**30) == 2**30 + 1000 * 2**30


def test_large_values_of_a_table_become_pythons_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PYTHON_BYTES", MIB)
    sizes: list[int] = []
    rows_of = tables.rows_of
    monkeypatch.setattr(tables, "rows_of", lambda some: sizes.append(some.num_rows) or rows_of(some))
    rows = list(read_file(repeated(tmp_path / "a.parquet", "a" * (MIB // 4), 40)))
    assert [number for number, _ in rows] == list(range(1, 41))
    assert max(sizes) <= 4


def test_a_row_beyond_every_context_is_a_bad_row_and_is_not_tokenized(monkeypatch):
    check_chars("a" * workers.MOST_ROW_CHARS)
    with pytest.raises(BadRow, match="the row has 4,194,305 characters, more than 4,194,304"):
        check_chars("a" * (workers.MOST_ROW_CHARS + 1))
