"""Nothing that is no file is opened: a pipe without a writer would hold every command for ever."""

import os
import signal
import socket
from pathlib import Path

import pytest

from memtrain.cli.commands.rescue import _read
from memtrain.errors import MemtrainError
from memtrain.memory.model_shape.config_file import read_config_json, read_json_object
from memtrain.recipes.importers.importing import _text
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.reading.regular_file import check_regular, open_regular, read_regular
from memtrain.recipes.reading.token_files import tokens_of
from memtrain.recipes.sections.data import Source
from memtrain.trainers.data.sources.readers import READERS, read_file
from memtrain.trainers.data.sources.sources import content_digest, locate
from memtrain.trainers.data.tokenize.tiny_tokenizer import FOLDER
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer, template_text
from memtrain.trainers.model.loading.locate import find_origin
from memtrain.trainers.model.loading.weight_files import header_of, index_of
from memtrain.trainers.tools.trained_model import trained_model


@pytest.fixture(autouse=True)
def waits_for_nothing():
    """A test that waits for a writer fails."""

    def late(number, frame):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def test_what_is_no_file_is_named_as_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    held = socket.socket(socket.AF_UNIX)
    held.bind("socket")
    (tmp_path / "link").symlink_to(pipe(tmp_path / "pipe"))
    (tmp_path / "file").write_text("a")
    (tmp_path / "to_file").symlink_to("file")
    kinds = {
        "pipe": "a pipe",
        "link": "a pipe",
        "socket": "a socket",
        "/dev/zero": "a device",
        ".": "a folder",
    }
    for name, kind in kinds.items():
        with pytest.raises(OSError, match=f"it is {kind}, not a file"):
            check_regular(name)
        with pytest.raises(OSError):
            open_regular(name)
    held.close()
    check_regular("nothing")
    with pytest.raises(FileNotFoundError):
        open_regular("nothing")
    assert read_regular("file") == read_regular("to_file") == "a"


OPENERS = {
    "recipe.yaml": load_recipe,
    "words.txt": lambda path: tokens_of([str(path)]),
    "axolotl.yaml": _text,
    "traceback.txt": lambda path: _read(str(path)),
    "a.json": lambda path: read_json_object(path, "model.path"),
    "config.json": lambda path: read_config_json(path, "model.path"),
    "model.safetensors": header_of,
    "model.safetensors.index.json": lambda path: index_of(path.parent),
    "template.jinja": lambda path: template_text(str(path)),
    "digest.jsonl": content_digest,
    "one.jsonl": lambda path: locate(Source(source=str(path)), "text"),
    "README.md": lambda path: locate(Source(source=str(path.parent)), "text"),
    **{f"rows{ending}": lambda path: list(read_file(path)) for ending in (*READERS, ".jsonl.gz", ".txt.zst")},
}


@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize("what", ["a pipe", "a device"])
def test_a_path_that_is_no_file_is_refused_by_all_that_open_one(tmp_path, name, what):
    path = tmp_path / name
    if what == "a pipe":
        pipe(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(MemtrainError) as error:
        OPENERS[name](path)
    assert error.value.faults[0].fix


FILES_OF_A_MODEL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "adapter_config.json",
    "anything",
)


@pytest.mark.parametrize("name", FILES_OF_A_MODEL)
def test_a_model_folder_with_a_pipe_in_it_is_refused_whatever_the_pipe_is_named(tmp_path, name):
    for file in FOLDER.iterdir():
        if file.name != name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    if name != "config.json":
        (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    pipe(tmp_path / name)
    for opens in (
        lambda: load_tokenizer(str(tmp_path)),
        lambda: read_config_json(tmp_path, "model.path"),
        lambda: find_origin(str(tmp_path), None),
        lambda: trained_model(tmp_path),
    ):
        with pytest.raises(MemtrainError, match=f"{name} cannot be read: it is a pipe, not a file"):
            opens()
