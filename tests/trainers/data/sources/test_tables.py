"""Tables: values that Python or JSON cannot hold, doubled columns, damaged files: reported, row by row."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from memtrain.errors import DataError
from memtrain.recipes.formats.fields import BadRow
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.sources.readers import read_file
from memtrain.trainers.data.store.prepare import kept_rows
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

KINDS = ("a.parquet", "a.arrow")


def write(path: Path, table: Any) -> Path:
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    return path


def prompts(folder: Path, path: Path) -> Any:
    data = {"train": str(path), "cache_dir": str(folder / "cache")}
    recipe = Recipe.model_validate({"method": "sft", "model": {"path": "builtin:tiny"}, "data": data})
    return kept_rows(recipe.data, recipe.data.train, "grpo", load_tokenizer("builtin:tiny"), seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_every_type_reach_the_rewards_as_json_or_are_named(tmp_path, kind):
    at = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    row = {
        "prompt": "2 + 2",
        "on": at.date(),
        "at": at,
        "time": datetime.time(1, 2, 3),
        "took": datetime.timedelta(seconds=90),
        "cost": decimal.Decimal("12345678901234567890.10"),
        "parts": [{"when": at.date()}],
        "packed": {"raw": b"\x89PNG"},
    }
    made = prompts(tmp_path, write(tmp_path / kind, pa.Table.from_pylist([row] * 2)))
    assert made.store.columns(1) == {
        "on": "2024-02-29",
        "at": "2024-02-29T12:30:00+00:00",
        "time": "01:02:03",
        "took": 90.0,
        "cost": "12345678901234567890.10",
        "parts": [{"when": "2024-02-29"}],
    }
    why = "nor given to rewards: it is not a text, number or list"
    assert made.notes == (f"not in the rendered text of the rows: column 'packed' ({why}) (all rows)",)


@pytest.mark.parametrize("kind", KINDS)
def test_a_timestamp_beyond_python_is_a_bad_row_in_its_place(tmp_path, kind):
    table = pa.table({"text": ["a", "b", "c"], "at": pa.array([0, 10**15, 1], pa.timestamp("s"))})
    rows = [row for _, row in read_file(write(tmp_path / kind, table))]
    assert [isinstance(row, BadRow) for row in rows] == [False, True, False]
    assert str(rows[1]).startswith("column 'at' (timestamp[")


@pytest.mark.parametrize("kind", KINDS)
def test_a_column_that_is_there_twice_loses_nothing_in_silence(tmp_path, kind):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pytest.raises(DataError, match="it names the column 'text' twice"):
        list(read_file(write(tmp_path / kind, table)))


def test_text_that_is_no_utf8_is_a_bad_row_of_parquet(tmp_path):
    binary = pa.array([b"a", b"caf\xe9", b"c"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, binary.buffers())
    rows = [row for _, row in read_file(write(tmp_path / "a.parquet", pa.table({"text": text})))]
    assert [isinstance(row, BadRow) for row in rows] == [False, True, False]
    assert str(rows[1]) == "column 'text' is not UTF-8: byte 0xe9 at position 3"


def test_damaged_offsets_of_an_arrow_file_are_an_error_and_no_crash(tmp_path):
    path = write(tmp_path / "a.arrow", pa.table({"text": ["abc", "def"]}))
    data = path.read_bytes()
    offsets = (0).to_bytes(4, "little") + (3).to_bytes(4, "little") + (6).to_bytes(4, "little")
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, offsets[:4] + (2**30).to_bytes(4, "little") + offsets[8:]))
    with pytest.raises(DataError, match="not a arrow file") as error:
        list(read_file(path))
    assert error.value.faults[0].where == str(path)


def test_half_a_character_in_a_column_for_rewards_is_a_bad_row(tmp_path):
    for row in ({"prompt": "a", "answer": ["\ud83d"]}, {"prompt": "a", "\ud83d": 1}):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(DataError) as error:
            prompts(tmp_path, path)
        assert error.value.faults[0].what == "the text holds \\ud83d, half of a surrogate pair"
        assert error.value.faults[0].where == f"{path}:1"
