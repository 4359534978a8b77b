"""Configurations of a folder are those of `load_dataset`; name, revision, split have effect or are told."""

import json
from pathlib import Path

import pytest

from memtrain.errors import DataError
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.data import Source
from memtrain.trainers.data.sources.sources import locate
from memtrain.trainers.data.store.prepare import prepare

FILES = (
    "easy/train-0.jsonl",
    "easy/test-0.jsonl",
    "hard/train-0.jsonl",
    "hard/train-1.jsonl",
    "more/test.jsonl",
)


@pytest.fixture
def folder(tmp_path):
    """A folder of files of two rows, each of which says its file."""
    for name in FILES:
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(2)))
    return tmp_path / "set"


def with_card(folder: Path, configs: str) -> None:
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configs}---\n# About\n")


def texts_of(folder: Path, **given: str) -> list[str]:
    located = locate(Source(source=str(folder), **given), "text")
    return [row["text"] for stream in located.streams for _, row in stream.read()]


def loaded(folder: Path, name: str | None, split: str) -> list[str]:
    import datasets

    return datasets.load_dataset(
        str(folder), name, split=split, cache_dir=str(folder.parent / "hf"), download_mode="force_redownload"
    )["text"][:]


CARDS = {
    "a path": "- config_name: default\n  data_files: easy/train-0.jsonl\n",
    "a glob": "- config_name: default\n  data_files: '*/train-*'\n",
    "a list": "- config_name: default\n  data_files: [hard/train-1.jsonl, easy/*]\n",
    "splits": (
        "- config_name: one\n  data_files:\n  - split: train\n    path: easy/train-*\n"
        "  - split: test\n    path: [easy/test-*, 'more/*']\n"
    ),
    "a folder": "- config_name: default\n  data_dir: easy\n",
    "patterns in a folder": (
        "- config_name: easy\n  data_files: easy/train-0.jsonl\n"
        "- config_name: default\n  data_dir: hard\n  data_files: 'train-*'\n"
    ),
    "everything": "- config_name: default\n  data_files: '**/*.jsonl'\n",
    "named default": (
        "- config_name: hard\n  data_files: 'hard/*'\n  default: true\n"
        "- config_name: easy\n  data_files: 'easy/*'\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("card", CARDS)
def test_a_folder_with_a_card_is_what_load_dataset_makes_of_it(folder, card):
    with_card(folder, CARDS[card])
    assert texts_of(folder) == loaded(folder, None, "train")
    if card == "splits":
        assert texts_of(folder, split="test") == loaded(folder, None, "test")


def test_a_name_chooses_one_configuration_and_the_files_of_others_are_named(folder):
    both = "- config_name: {}\n  data_files:\n  - split: train\n    path: {}/train-*\n"
    with_card(folder, both.format("easy", "easy") + both.format("hard", "hard"))
    assert {name: len(texts_of(folder, name=name)) for name in ("easy", "hard")} == {"easy": 2, "hard": 4}
    (note,) = locate(Source(source=str(folder), name="easy"), "text").notes[1:]
    assert "not of the split train of the configuration easy: " in note
    assert note.count("hard/train") == 2


def test_a_mapping_of_splits_to_paths_is_read_too(folder):
    with_card(
        folder, "- config_name: default\n  data_files: {train: easy/train-0.jsonl, test: more/test.jsonl}\n"
    )
    assert texts_of(folder, split="test") == ["more/test.jsonl 0", "more/test.jsonl 1"]


REFUSED = {
    "- config_name: a\n  data_files: 'easy/*'\n- config_name: b\n  data_files: 'hard/*'\n": "no default one",
    "- config_name: default\n  data_files: 'none/*'\n": "no file of",
    "- config_name: default\n  data_files: none.jsonl\n": "names the file none.jsonl, which is not there",
    "- config_name: default\n  data_files: ../other.jsonl\n": "'../other.jsonl', which is not in this folder",
    "- config_name: default\n  data_files: easy/../../a.jsonl\n": "which is not in this folder",
    "- config_name: default\n  data_files: /etc/passwd\n": "which is not in this folder",
    "- config_name: default\n  data_files: 'https://x.org/a.jsonl'\n": "which is not in this folder",
    "- config_name: default\n  data_dir: ..\n": "not a folder in this one",
    "- config_name: default\n  data_files: 3\n": "not paths or splits with paths",
    "- config_name: default\n  data_files: 'easy/*'\n  sep: ';'\n": "sets sep, which memtrain does not read",
    "- data_files: 'easy/*'\n": "a configuration without config_name",
    "- config_name: [\n": "its YAML cannot be read",
}


@pytest.mark.parametrize("card", REFUSED)
def test_a_card_that_cannot_be_followed_is_refused(folder, card):
    with_card(folder, card)
    with pytest.raises(DataError, match=REFUSED[card]):
        texts_of(folder)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"name": "x"}, "has no configuration 'x'"),
        ({"split": "test"}, "has no split 'test'"),
        ({"revision": "main"}, "revision: main has no effect"),
    ],
)
def test_a_key_that_the_card_does_not_answer_is_refused_at_its_place(folder, given, what):
    with_card(folder, "- config_name: default\n  data_files: easy/train-0.jsonl\n")
    with pytest.raises(DataError, match=what) as error:
        texts_of(folder, **given)
    assert error.value.faults[0].where == f"data.{next(iter(given))}"


KEYS = ({"name": "hard"}, {"revision": "main"}, {"split": "validation"}, {"split": "train[:10]"})


@pytest.mark.parametrize("given", KEYS, ids=str)
@pytest.mark.parametrize("kind", ["a file", "a folder", "a glob", "built in"])
def test_a_key_of_a_hub_dataset_is_refused_where_it_has_no_effect(tmp_path, kind, given):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}\n')
    sources = {
        "a file": tmp_path / "a.jsonl",
        "a folder": tmp_path,
        "a glob": tmp_path / "*.jsonl",
        "built in": "builtin:arithmetic",
    }
    with pytest.raises(DataError) as error:
        texts_of(sources[kind], **given)
    (fault,) = error.value.faults
    assert next(iter(given.values())) in fault.what
    assert fault.fix


def test_a_split_that_the_name_of_a_file_says_is_taken(tmp_path):
    for name in ("validation", "test-0"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}\n')
    assert texts_of(tmp_path / "validation.jsonl", split="validation") == ["a"]
    assert texts_of(tmp_path / "test*.jsonl", split="test") == ["a"]
    assert texts_of(tmp_path / "validation.jsonl", split="train") == ["a"]


def notes_of(folder: Path, train: object, held_out: object) -> tuple[str, ...]:
    data = {"train": train, "eval": held_out, "cache_dir": str(folder / "cache")}
    recipe = Recipe.model_validate({"method": "sft", "model": {"path": "builtin:tiny"}, "data": data})
    made = prepare(recipe).eval
    assert made is not None
    return made.notes


def test_held_out_rows_that_are_trained_on_are_told_also_of_a_copy_and_of_a_part(tmp_path):
    for name in ("a", "b", "other"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "b" if name == "b" else "a"}) + "\n")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    a, b, other, link = (str(tmp_path / f"{name}.jsonl") for name in ("a", "b", "other", "link"))
    made_here = {"source": "builtin:arithmetic", "limit": 8}
    for train, held_out, name in (
        (a, a, a),
        (a, other, other),
        ([a, b], link, link),
        (a, {"source": a, "limit": 1}, a),
        (made_here, {**made_here, "limit": 2}, "builtin:arithmetic"),
    ):
        (note,) = notes_of(tmp_path, train, held_out)
        assert note.startswith(f"the rows of {name} are trained on too")
    assert notes_of(tmp_path, a, b) == ()
    assert notes_of(tmp_path, made_here, {**made_here, "split": "test"}) == ()
