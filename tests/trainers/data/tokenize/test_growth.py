"""Tokenizers whose steps multiply a text are refused before they see one; published steps are not."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from memtrain.errors import DataError
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.data.store.prepare import prepare
from memtrain.trainers.data.tokenize import workers
from memtrain.trainers.data.tokenize.growth import check_steps
from memtrain.trainers.data.tokenize.tiny_tokenizer import FOLDER
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def charsmap(text: bytes) -> str:
    return base64.b64encode((8).to_bytes(4, "little") + bytes(8) + text + b"\0").decode()


BOMBS = {
    "replaced": {"normalizer": replace({"String": "a"}, "b" * 1000)},
    "replaced in steps": {"normalizer": sequence(*[replace({"String": "a"}, "a" * 8)] * 3)},
    "in sequences": {"normalizer": sequence(sequence(*[replace({"Regex": "."}, "a" * 20)] * 2))},
    "where nothing is": {"normalizer": replace({"Regex": "x*"}, "b" * 101)},
    "prepended": {"normalizer": {"type": "Prepend", "prepend": "a" * 1001}},
    "prepended, then replaced": {
        "normalizer": sequence({"type": "Prepend", "prepend": "a" * 99}, replace({"String": "a"}, "b" * 50))
    },
    "by a table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"a" * 400)}},
    "by both": {
        "normalizer": replace({"String": "a"}, "b" * 20),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "a" * 20},
    },
    "decoded": {"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "b" * 101)]}},
    "special tokens": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 11,
            "special_tokens": {"x": {"id": "x", "ids": [1] * 100, "tokens": ["x"] * 100}},
        }
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_steps_that_multiply_a_text_are_refused(name):
    with pytest.raises(DataError, match="it would fill the memory"):
        check_steps(BOMBS[name], "tokenizer.json")


USUAL = {
    "Llama's": {
        "normalizer": sequence({"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")),
        "decoder": {"type": "Sequence", "decoders": [replace({"String": "▁"}, " "), {"type": "Fuse"}]},
    },
    "T5's": {
        "normalizer": sequence(
            {"type": "Precompiled", "precompiled_charsmap": charsmap("صلى الله عليه وسلم".encode())},
            replace({"Regex": " {2,}"}, "▁"),
        ),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
    },
    "CLIP's": {"normalizer": sequence({"type": "NFC"}, replace({"Regex": "\\s+"}, " "))},
    "BERT's": {"normalizer": {"type": "BertNormalizer"}, "decoder": {"type": "WordPiece", "prefix": "##"}},
    "none": {"normalizer": None},
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_steps_of_published_tokenizers_are_taken(name):
    check_steps(USUAL[name], "tokenizer.json")


@pytest.mark.parametrize("name", ["replaced in steps", "prepended"])
def test_a_folders_tokenizer_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch, name):
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    given = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps({**given, **BOMBS[name]}), encoding="utf-8")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    with pytest.raises(DataError, match="it would fill the memory") as error:
        load_tokenizer(str(tmp_path))
    assert error.value.faults[0].where == str(tmp_path / "tokenizer.json")


def test_a_loaded_tokenizer_is_looked_at_too(monkeypatch):
    monkeypatch.setattr("memtrain.trainers.data.tokenize.growth.MOST_ADDED", -1)
    with pytest.raises(DataError, match="adds more than"):
        load_tokenizer("builtin:tiny")


@pytest.mark.parametrize("columns", [("text",), ("prompt", "completion"), ("messages",)])
def test_a_row_beyond_the_limit_is_left_out_and_counted(tmp_path, monkeypatch, columns):
    monkeypatch.setattr(workers, "MOST_ROW_CHARS", 600)
    monkeypatch.setattr("memtrain.trainers.data.tokenize.plain_rows.MOST_ROW_CHARS", 600)

    def row(text: str) -> dict[str, Any]:
        if columns == ("messages",):
            return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]}
        return dict.fromkeys(columns, text)

    rows = [row("a"), row("a" * 700), row("b")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    data = {"train": str(tmp_path / "a.jsonl"), "on_bad_row": "skip", "cache_dir": str(tmp_path / "cache")}
    made = prepare(
        Recipe.model_validate({"method": "sft", "model": {"path": "builtin:tiny"}, "data": data})
    ).train
    assert (made.num_rows, made.num_skipped) == (2, 1)
    assert "a.jsonl:2: the row has" in str(made.notes)


POST: list[dict[str, object] | int] = [
    {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<no>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    },
    {"type": "BertProcessing", "sep": ["x", 9**9], "cls": ["y", 3]},
    {"type": "RobertaProcessing", "sep": ["x", 5000], "cls": ["y", 3]}
    | dict.fromkeys(("trim_offsets", "add_prefix_space"), True),
    3,
]


def test_a_tokenizer_that_breaks_on_a_text_or_adds_tokens_that_it_lacks_is_refused(tmp_path: Path):
    for file in FOLDER.glob("tokenizer*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    given = json.loads((FOLDER / "tokenizer.json").read_text())
    for one in POST:
        (tmp_path / "tokenizer.json").write_text(json.dumps(given | {"post_processor": one}))
        with pytest.raises(DataError, match="breaks on a text|has no such token|cannot load") as error:
            load_tokenizer(str(tmp_path))
        assert error.value.faults[0].fix
