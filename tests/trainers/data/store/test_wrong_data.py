"""Wrong data files: one clear error each, with the file and the line, and never a traceback."""

import gzip
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtrain.cli.plan.make_plan import make_plan
from memtrain.errors import DataError
from memtrain.recipes.formats.fields import AS_TEXT, NO_MEDIA, OTHER_COLUMN
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.store.prepare import prepare
from memtrain.trainers.data.store.token_store import TokenStore
from memtrain.trainers.data.tokenize import workers

GOOD = b'{"prompt": "a", "completion": "b"}\n'
JSONL_FIX = "correct the row"
OR_SKIPPED = ", or set data.on_bad_row: skip to leave out such rows"
"""End of the cure of every bad row, which the table leaves out."""
OF_ROWS = (
    "bytes that are no UTF-8",
    "invalid JSON",
    "a row that is no object",
    "columns that change",
    "a number for a prompt",
    "half a character",
    "too many cells",
    "a key that is there twice",
    "a doubled key inside a JSON file",
    "JSON nested without end",
    "JSON nested as deep as Python reads",
    "a number of 5,000 digits",
    "an unknown role",
    "an image with a text beside it",
    "an image in a part without a type",
    "an image as the whole content",
    "sound among parts",
    "images of a message",
    "an image within a text",
    "a part of an unknown type",
    "a column of images",
    "a sound as datasets store it",
    "two system messages",
    "a message that says two things",
    "an id beyond 64 bits",
    "an id that the tokenizer has not",
)
"""Faults of one row."""
READABLE = ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .txt (packed too: .gz, .bz2, .xz, .zst)"
WHOLE_GZIP = gzip.compress(GOOD * 500)

WRONG: dict[str, tuple[str, bytes, str, str, str]] = {
    "bytes that are no UTF-8": (
        "d.jsonl",
        GOOD + b'{"prompt": "caf\xe9", "completion": "b"}\n',
        "not UTF-8: byte 0xe9 at position 15",
        "{file}:2",
        "save the file as UTF-8",
    ),
    "invalid JSON": (
        "d.jsonl",
        GOOD * 2 + b'{"prompt": "a", "completion": }\n' + GOOD,
        "invalid JSON: Expecting value (column 31)",
        "{file}:3",
        "fix the line; each line is one JSON object",
    ),
    "an empty file": (
        "d.jsonl",
        b"",
        "there are no rows in '{file}'",
        "{file}",
        "the file is empty: give another",
    ),
    "a row that is no object": (
        "d.jsonl",
        GOOD + b'["a", "b"]\n',
        "a row must be a JSON object, but this is a list (['a', 'b'])",
        "{file}:2",
        'write {"text": ...}',
    ),
    "columns that change": (
        "d.jsonl",
        GOOD + b'{"question": "a", "answer": "b"}\n',
        "the row has no column 'prompt'; it has question, answer",
        "{file}:2",
        "data.columns: {prompt: question}; and data.strings_are: turns where its strings are turns of a chat",
    ),
    "a number for a prompt": (
        "d.jsonl",
        GOOD + b'{"prompt": 7, "completion": "b"}\n',
        "column 'prompt' is a number (7), not a string or a list of messages",
        "{file}:2",
        OTHER_COLUMN,
    ),
    "half a character": (
        "d.jsonl",
        GOOD + b'{"prompt": "\\ud83d", "completion": "b"}\n',
        "the text holds \\ud83d, half of a surrogate pair",
        "{file}:2",
        "fix the escapes in the file",
    ),
    "no gzip file": (
        "d.jsonl.gz",
        GOOD,
        "not a whole gzip file: Not a gzipped file (b'{\"')",
        "{file}",
        "download or pack it again",
    ),
    "half a gzip file": (
        "d.jsonl.gz",
        WHOLE_GZIP[: len(WHOLE_GZIP) - 12],
        "not a whole gzip file: Compressed file ended before the end-of-stream marker was reached",
        "{file}",
        "download or pack it again",
    ),
    "too many cells": (
        "d.csv",
        b"prompt,completion\na,b\nhello, world,b\n",
        "the row has 3 cells and the header 2",
        "{file}:3",
        'put text that holds a comma, a quote or a line break in "quotes"',
    ),
    "a column named twice": (
        "d.csv",
        b"prompt,prompt\na,b\n",
        "the header names a column twice: prompt, prompt",
        "{file}:1",
        "rename one",
    ),
    "a quote without an end": (
        "d.csv",
        b'prompt,completion\na,"b\n',
        "invalid CSV: unexpected end of data",
        "{file}:2",
        "fix the quotes",
    ),
    "a list cut short": (
        "d.json",
        b"[" + GOOD + b"," + GOOD,
        "the JSON list does not end",
        "{file}:3",
        "the file is truncated: replace it",
    ),
    "a JSON file with a mistake": (
        "d.json",
        b"[\n" + GOOD + b",\n{prompt: 1},\n" + GOOD * 300 + b"]",
        "invalid JSON: Expecting property name enclosed in double quotes",
        "{file}:4",
        "fix the file",
    ),
    "no Parquet file": (
        "d.parquet",
        GOOD,
        "not a parquet file: Parquet magic bytes not found in footer. Either the file is corrupted or this "
        "is not a parquet file.",
        "{file}",
        "write the file again",
    ),
    "a JSON file with text after its list": (
        "d.json",
        b"[" + GOOD + b"]\nand more",
        "invalid JSON: Expecting value",
        "{file}:3",
        "fix the file",
    ),
    "a key that is there twice": (
        "d.jsonl",
        GOOD + b'{"prompt": "a", "completion": "b", "completion": "c"}\n',
        "the key 'completion' is there twice in one object",
        "{file}:2",
        "keep one of the two",
    ),
    "a doubled key inside a JSON file": (
        "d.json",
        b'[{"prompt": "a", "completion": "b"},\n{"prompt": [{"a": 1, "a": 2}], "completion": ""}]',
        "the key 'a' is there twice in one object",
        "{file}:2",
        "keep one of the two",
    ),
    "JSON nested without end": (
        "d.jsonl",
        GOOD + b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        "JSON nested deeper than 100 levels",
        "{file}:2",
        "write the value flat, or remove the row",
    ),
    "JSON nested as deep as Python reads": (
        "d.jsonl",
        GOOD + b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}\n",
        "JSON nested deeper than 100 levels",
        "{file}:2",
        "write the value flat, or remove the row",
    ),
    "a JSON file nested without end": (
        "d.json",
        b"[" + GOOD + b', {"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]\n",
        "JSON nested deeper than 100 levels",
        "{file}:2",
        "write the value flat, or remove the row",
    ),
    "a number of 5,000 digits": (
        "d.jsonl",
        GOOD + b'{"prompt": ' + b"9" * 5000 + b"}\n",
        "a whole number of more than 4,300 digits",
        "{file}:2",
        "write it as a string, or remove the row",
    ),
    "a number of 5,000 digits in a JSON file": (
        "d.json",
        b'[{"prompt": ' + b"9" * 5000 + b"}]\n",
        "a whole number of more than 4,300 digits",
        "{file}:1",
        "write it as a string, or remove the row",
    ),
    "Parquet through zstd": (
        "d.parquet.zst",
        b"",
        "'d.parquet.zst' cannot be read through zstd",
        "{file}",
        "unpack it with zstd -d",
    ),
    "a file of another kind": (
        "d.xlsx",
        b"PK",
        "'d.xlsx' is not a readable kind of file",
        "{file}",
        f"give a file of a kind that is read: {READABLE}",
    ),
    "a UTF-16 text file": (
        "d.txt",
        "hello".encode("utf-16"),
        "the file is UTF-16, not UTF-8",
        "{file}",
        "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE",
    ),
    "a UTF-16 file without a mark": (
        "d.csv",
        "text\nhello".encode("utf-16-le"),
        "the file is UTF-16LE, not UTF-8",
        "{file}",
        "convert it: iconv -f UTF-16LE -t UTF-8 FILE > NEW_FILE",
    ),
    "a UTF-16 text file of the other order, without a mark": (
        "d.txt",
        "hello".encode("utf-16-be"),
        "the file is UTF-16BE, not UTF-8",
        "{file}",
        "convert it: iconv -f UTF-16BE -t UTF-8 FILE > NEW_FILE",
    ),
    "columns of no format": (
        "d.jsonl",
        b'{"query": "a", "response": "b"}\n',
        "no format fits the columns query, response: rows need prompt and completion, or messages, or text, "
        "or input_ids, or instruction and output, or question and answer",
        "{file}:1",
        "data.columns: {question: query, answer: response}",
    ),
    "an unknown role": (
        "d.jsonl",
        b'{"messages": [{"role": "narrator", "content": "x"}]}\n',
        "messages[0] has the role 'narrator'",
        "{file}:1",
        "use one of the roles system, developer, user, human, assistant, gpt, chatgpt, bot, model, tool, "
        "function, observation, function_call",
    ),
    "an image with a text beside it": (
        "d.jsonl",
        b'{"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]}\n',
        "the content of messages[0] has an image",
        "{file}:1",
        NO_MEDIA,
    ),
    "an image in a part without a type": (
        "d.jsonl",
        b'{"messages": [{"role": "user", "content": [{"image": "a.png"}, {"text": "x"}]}]}\n',
        "the content of messages[0] has an image",
        "{file}:1",
        NO_MEDIA,
    ),
    "an image as the whole content": (
        "d.jsonl",
        b'{"messages": [{"role": "user", "content": {"type": "image", "image": "a.png"}}]}\n',
        "the content of messages[0] has an image",
        "{file}:1",
        NO_MEDIA,
    ),
    "sound among parts": (
        "d.jsonl",
        b'{"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}\n',
        "the content of messages[0] has audio",
        "{file}:1",
        NO_MEDIA,
    ),
    "images of a message": (
        "d.jsonl",
        b'{"messages": [{"role": "user", "content": "x", "images": ["a.png"]}]}\n',
        "messages[0] has an image",
        "{file}:1",
        NO_MEDIA,
    ),
    "an image within a text": (
        "d.jsonl",
        b'{"prompt": "a", "completion": "b", "seen": "data:image/png;base64,iVBO"}\n',
        "the row has images (column 'seen')",
        "{file}:1",
        NO_MEDIA,
    ),
    "images and columns of unknown names": (
        "d.jsonl",
        b'{"image": "a.png", "caption": "b"}\n',
        "the row has images (column 'image')",
        "{file}:1",
        NO_MEDIA,
    ),
    "a part of an unknown type": (
        "d.jsonl",
        b'{"messages": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]}\n',
        "the content of messages[0] has a part that is not text: {'type': 'refusal', 'text': 'x'}",
        "{file}:1",
        AS_TEXT,
    ),
    "a column of images": (
        "d.jsonl",
        GOOD + b'{"prompt": "<image> what?", "completion": "b", "images": ["a.png"]}\n',
        "the row has images (column 'images')",
        "{file}:2",
        NO_MEDIA,
    ),
    "a sound as datasets store it": (
        "d.jsonl",
        b'{"prompt": "a", "completion": "b", "clip": {"bytes": null, "path": "a.wav"}}\n',
        "the row has images or audio (column 'clip')",
        "{file}:1",
        NO_MEDIA,
    ),
    "two system messages": (
        "d.jsonl",
        b'{"conversations": [{"from": "system", "value": "x"}], "system": "y"}\n',
        "column 'system' and conversations[0] are two different system messages",
        "{file}:1",
        "remove one of them",
    ),
    "a message that says two things": (
        "d.jsonl",
        b'{"messages": [{"from": "user", "value": "x", "content": "y"}]}\n',
        "messages[0] has both a content and a value",
        "{file}:1",
        "keep one of the two",
    ),
    "an id beyond 64 bits": (
        "d.jsonl",
        b'{"input_ids": [1, 99999999999999999999]}\n',
        "column 'input_ids' holds the id 99999999999999999999",
        "{file}:1",
        "a token id is 0 to 2,147,483,647",
    ),
    "an id that the tokenizer has not": (
        "d.jsonl",
        b'{"input_ids": [1, 2, 5000]}\n',
        "the row holds the id 5000, and the tokenizer has 1024 tokens",
        "{file}:1",
        "tokenize the rows with the model's own tokenizer",
    ),
}


def recipe_of(path: Path, cache: Path, **data) -> Recipe:
    return Recipe.model_validate(
        {
            "method": "sft",
            "model": {"path": "builtin:tiny"},
            "data": {"train": str(path), "cache_dir": str(cache), **data},
        }
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_one_clear_error(tmp_path, name):
    file, content, what, where, fix = WRONG[name]
    path = tmp_path / file
    path.write_bytes(content)
    fix += OR_SKIPPED if name in OF_ROWS or fix == JSONL_FIX else ""
    with pytest.raises(DataError) as error:
        prepare(recipe_of(path, tmp_path / "cache"))
    reported = f"error: {what}\n   at: {where}\n  try: {fix}".replace("{file}", str(path))
    assert error.value.text() == reported
    assert not list((tmp_path / "cache").glob("tokens/[!.]*"))


def test_a_missing_file_proposes_the_near_one(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(GOOD)
    with pytest.raises(DataError) as error:
        prepare(recipe_of(tmp_path / "trian.jsonl", tmp_path / "cache"))
    assert error.value.faults[0].what == f"there is no file '{tmp_path}/trian.jsonl'"
    assert error.value.faults[0].fix == f"did you mean '{tmp_path}/train.jsonl'?"


def test_a_folder_without_data_says_what_is_readable(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"")
    with pytest.raises(DataError) as error:
        prepare(recipe_of(tmp_path / "photos", tmp_path / "cache"))
    assert error.value.faults[0].what == f"no readable file in the folder '{tmp_path}/photos'"
    assert error.value.faults[0].fix == f"give files of a kind that is read: {READABLE}"


def test_skipped_rows_are_counted_and_reported(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD + b"{\n" + GOOD + b'{"prompt": "a"}\n')
    split = prepare(recipe_of(path, tmp_path / "cache", on_bad_row="skip")).train
    assert (split.num_rows, split.num_skipped) == (2, 2)
    assert TokenStore.open(split.folder).meta.skipped == (
        f"{path}:2: invalid JSON: Expecting property name enclosed in double quotes (column 2)",
        f"{path}:4: the row has no column 'completion'; it has prompt",
    )


def test_a_file_of_bad_rows_only_is_an_error(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "", "completion": ""}\n' * 3)
    with pytest.raises(DataError, match="all 3 rows are bad, the first: .*d.jsonl:1: 'prompt' and"):
        prepare(recipe_of(path, tmp_path / "cache", on_bad_row="skip"))


@pytest.mark.parametrize(
    "margin", ["1e300", "-10001", "NaN", "Infinity", "9" * 400, '"1e300"'], ids=lambda text: text[:8]
)
def test_an_absurd_margin_is_refused_where_it_is_read(tmp_path, margin):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": ' + margin + "}\n")
    data = {"train": str(path), "cache_dir": str(tmp_path)}
    recipe = Recipe.model_validate({"method": "reward", "model": {"path": "builtin:tiny"}, "data": data})
    with pytest.raises(DataError) as error:
        prepare(recipe)
    assert error.value.faults[0].what.endswith("not a number from -10,000 to 10,000")
    assert error.value.faults[0].where == f"{path}:1"


def test_bad_rows_before_the_first_good_one_are_skipped_however_many(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"{\n" * 50 + GOOD)
    split = prepare(recipe_of(path, tmp_path / "cache", on_bad_row="skip")).train
    assert (split.num_rows, split.num_skipped) == (1, 50)


def test_a_tokenizing_process_that_is_killed_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "d.jsonl"
    path.write_bytes(GOOD * 10)
    batches = workers.batches

    def then_killed(rows: Any) -> Iterator[Any]:
        yield from batches(rows)
        for child in multiprocessing.active_children():
            child.kill()

    monkeypatch.setattr(workers, "batches", then_killed)
    with pytest.raises(DataError) as error:
        prepare(recipe_of(path, tmp_path / "cache", processes=2))
    assert error.value.text() == (
        "error: one of the 2 processes that tokenize was killed, or ended\n"
        "   at: data.processes\n"
        "  try: perhaps out of host memory: lower data.processes"
    )
    assert not list((tmp_path / "cache").glob("tokens/[!.]*"))


def test_a_missing_file_names_the_line_of_the_recipe(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "method: sft\nmodel: {path: builtin:tiny}\n"
        "data:\n  train:\n    - builtin:arithmetic\n    - gone.jsonl\n"
    )
    with pytest.raises(DataError) as error:
        make_plan(load_recipe(str(recipe)))
    assert error.value.faults[0].where == f"{recipe}:6:7 (data.train[1])"
