"""Tables: rows as JSON holds them; values that Python or JSON cannot hold, doubled columns, damaged files."""

import datetime
import decimal
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from memtrain.errors import DataError
from memtrain.recipes.formats.fields import BadRow
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.data import Source
from memtrain.trainers.data.sources.readers import read_file
from memtrain.trainers.data.sources.sources import locate
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


MIXED = [
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Go."}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "move", "arguments": {"x": 0}}}]},
        ],
        "tools": [{"name": "move", "parameters": {"x": {"type": "integer", "any": [None, 1]}}}],
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "url": "a"}], "name": "Ana"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "turn", "arguments": {"by": 9}}}]},
        ],
        "tools": [{"name": "turn", "description": "Turn.", "parameters": {"by": {"kind": {"or": 1}}}}],
    },
]
"""Rows of which each has keys that the other lacks, at every depth."""


def on_disk(folder: Path, rows: list[Any]) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(folder / "disk")
    (path,) = (folder / "disk").glob("*.arrow")
    return path


def as_file_form(folder: Path, rows: list[Any]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(folder / "file.arrow", table.schema) as file:
        file.write_table(table)
    return folder / "file.arrow"


WRITERS = {
    "parquet": lambda folder, rows: write(folder / "a.parquet", pa.Table.from_pylist(rows)),
    "arrow stream": lambda folder, rows: write(folder / "a.arrow", pa.Table.from_pylist(rows)),
    "arrow file": as_file_form,
    "save_to_disk": on_disk,
}


@pytest.mark.parametrize("way", WRITERS)
def test_rows_of_a_table_have_no_keys_of_other_rows_at_any_depth(tmp_path, way):
    assert [row for _, row in read_file(WRITERS[way](tmp_path, MIXED))] == MIXED


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_hub_dataset_have_no_keys_of_other_rows_either(tmp_path, monkeypatch, streaming):
    import huggingface_hub

    texts = {"a": MIXED[:1], "b": MIXED[1:]}
    for name, rows in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *_, streaming=False, **__: load(
            "json", data_files=str(tmp_path / "*.jsonl"), split="train", streaming=streaming,
            features=datasets.Dataset.from_list(MIXED).features, cache_dir=str(tmp_path / "hf"),
        ),
    )  # fmt: skip
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    info = SimpleNamespace(sha="0")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    (stream,) = locate(Source(source="some/dataset"), "messages", streaming=streaming).streams
    rows = [row for _, row in stream.read()]
    assert sorted(rows, key=str) == sorted(MIXED * 2, key=str)
    if streaming:
        assert stream.take is not None
        assert [row in MIXED for _, row in stream.take(3, 0)] == [True] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_nulls_of_columns_lists_maps_and_json_text_were_written_and_stay(tmp_path, kind):
    of_map = pa.map_(pa.string(), pa.struct([("a", pa.int64()), ("b", pa.int64())]))
    texts = pa.array(["null", '{"b": null}'], pa.json_())
    deep = pa.StructArray.from_arrays([texts, pa.array([1, None])], names=["a", "c"])
    table = pa.table(
        {
            "column": pa.array([None, 1]),
            "list": pa.array([[None, 1], None]),
            "map": pa.array([[("x", None), ("y", {"a": 1})], []], of_map),
            "text": ['{"a": null}', "b"],
            "json": pa.array(['{"a": null, "b": [{}]}', "null"], pa.json_()),
            "deep": pa.ListArray.from_arrays([0, 1, 2], deep),
        }
    )
    assert [row for _, row in read_file(write(tmp_path / kind, table))] == [
        {
            "column": None,
            "list": [None, 1],
            "map": {"x": None, "y": {"a": 1}},
            "text": '{"a": null}',
            "json": {"a": None, "b": [{}]},
            "deep": [{"a": None, "c": 1}],
        },
        {
            "column": 1,
            "list": None,
            "map": {},
            "text": "b",
            "json": None,
            "deep": [{"a": {"b": None}}],
        },
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_datasets_says_are_json_are_read_as_such(tmp_path, kind):
    """Its older versions write plain strings, and say so in the metadata alone."""
    leaf, undecoded = {"_type": "Json"}, {"_type": "Json", "decode": False}
    features = {
        "a": leaf,
        "b": {"_type": "List", "feature": leaf},
        "c": [{"d": leaf, "e": {"_type": "Value"}}],
        "f": undecoded,
    }
    rows = [{"a": '{"x": null}', "b": ["1"], "c": [{"d": "[2]", "e": "[3]"}], "f": "4"}]
    table = pa.Table.from_pylist(rows)
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    path = write(tmp_path / kind, table.replace_schema_metadata(about))
    assert [row for _, row in read_file(path)] == [
        {"a": {"x": None}, "b": [1], "c": [{"d": [2], "e": "[3]"}], "f": "4"}
    ]
    path = write(tmp_path / kind, table.replace_schema_metadata({"huggingface": "{"}))
    with pytest.raises(DataError, match="its metadata of datasets"):
        list(read_file(path))


def test_a_column_of_type_json_that_is_none_is_a_bad_row_in_its_place(tmp_path):
    table = pa.table({"a": pa.array(["1", "{", '{"b": 1, "b": 2}'], pa.json_())})
    rows = [row for _, row in read_file(write(tmp_path / "a.parquet", table))]
    assert rows[0] == {"a": 1}
    assert [str(row)[:22] for row in rows[1:]] == ["column 'a' is not JSON"] * 2


def test_rewards_get_a_tables_columns_as_datasets_gives_them(tmp_path):
    rows = [{"prompt": "1 + 1", "info": {"a": 2}}, {"prompt": "2 + 2", "info": {"b": 4}}]
    made = prompts(tmp_path, write(tmp_path / "a.parquet", pa.Table.from_pylist(rows)))
    held = [made.store.columns(at)["info"] for at in range(2)]
    assert held == [{"a": 2, "b": None}, {"a": None, "b": 4}]
    assert made.notes == ()


@pytest.mark.parametrize("way", WRITERS)
def test_tools_of_a_table_are_rendered_as_those_of_json_and_left_out_keys_are_told(tmp_path, way):
    def call(name, arguments):
        return [{"type": "function", "function": {"name": name, "arguments": arguments}}]

    rows = [
        {
            "messages": [
                {"role": "user", "content": "Go."},
                {"role": "assistant", "content": "", "tool_calls": call(name, arguments)},
            ],
            "tools": [{"type": "function", "function": {"name": name, "parameters": {"properties": own}}}],
        }
        for name, arguments, own in (
            ("move", {"x": 1}, {"x": {"type": "integer"}}),
            ("turn", {"by": 9}, {"by": {"type": "integer"}}),
        )
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = [tokens_of_chats(path) for path in (tmp_path / "a.jsonl", WRITERS[way](tmp_path, rows))]
    assert made[0].store.num_tokens == made[1].store.num_tokens
    ids = [one.store.tokens(0, one.store.num_tokens).tolist() for one in made]
    assert ids[0] == ids[1]
    assert made[0].notes == ()
    assert made[1].notes == (
        "not read, the keys without a value of column 'messages' (all rows), the keys without a value of "
        "column 'tools' (all rows): a table gives every row the keys of all rows, and cannot say which of "
        "them were written; write the column as JSON text to keep those",
    )


def test_null_fields_of_messages_are_no_news(tmp_path):
    """They are left out of JSON rows, too."""
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "c"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    made = tokens_of_chats(write(tmp_path / "a.parquet", pa.Table.from_pylist(rows)))
    assert "without a value" not in str(made.notes)


def tokens_of_chats(path: Path) -> Any:
    data = {"train": str(path), "cache_dir": str(path.parent / "cache")}
    model = {"path": "builtin:tiny", "chat_template": "qwen3"}
    recipe = Recipe.model_validate({"method": "sft", "model": model, "data": data})
    tokenizer = load_tokenizer("builtin:tiny", chat_template="qwen3")
    return kept_rows(recipe.data, recipe.data.train, "sft", tokenizer, seed=0)
