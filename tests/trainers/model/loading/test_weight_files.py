"""Weight files of interrupted downloads: reported with their bytes before a weight is read."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from memtrain.errors import LaunchError
from memtrain.trainers.model.loading.weight_files import INDEX, SINGLE, check_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index: `a` in the first, `b` and `c` in the second."""
    save_file({"a": torch.zeros(4, 4)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2), "c": torch.ones(3)}, tmp_path / "two.safetensors")
    placed = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return tmp_path


def refused(folder: Path) -> str:
    with pytest.raises(LaunchError) as error:
        check_weights(folder)
    fault = error.value.faults[0]
    assert fault.where == "model.path"
    assert fault.fix
    return fault.what


def index(folder: Path, **changes: object) -> None:
    given = json.loads((folder / INDEX).read_text())
    given["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(given))


def test_whole_files_pass(folder: Path):
    check_weights(folder)
    save_file({"a": torch.zeros(4)}, folder / SINGLE)
    check_weights(folder)


@pytest.mark.parametrize("left", [0, 3, 9, 60, -1])
def test_a_file_that_is_cut_off_is_reported(folder: Path, left: int):
    file = folder / "one.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(left % size)
    said = refused(folder)
    assert str(file) in said
    if left == -1:
        assert f"it has {size - 1:,} of {size:,} bytes" in said
    else:
        assert any(words in said for words in ("is empty", "is not a safetensors file", "cut off within"))


def test_bytes_past_the_end_are_reported(folder: Path):
    with (folder / "one.safetensors").open("ab") as opened:
        opened.write(b"more")
    assert "4 bytes more than its header describes" in refused(folder)


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": 3}', b'{"a": {"data_offsets": "x"}}', b"\xff" * 8])
def test_a_header_that_says_nothing_is_reported(folder: Path, header: bytes):
    (folder / "one.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "is not a safetensors file" in refused(folder)


def test_a_header_longer_than_any_is_not_read(folder: Path):
    (folder / "one.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "is not a safetensors file" in refused(folder)


def test_a_pointer_of_git_lfs_is_known(folder: Path):
    (folder / "one.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    assert "git lfs pull" in refused(folder)


def test_an_index_without_a_map_is_reported(folder: Path):
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}'):
        (folder / INDEX).write_text(text)
        assert "has no weight_map" in refused(folder)
    (folder / INDEX).write_text("")
    assert "is empty" in refused(folder)


def test_an_index_names_files_of_its_folder_that_are_there(folder: Path):
    index(folder, a="../one.safetensors")
    assert "which is not in the folder" in refused(folder)
    index(folder, a="none.safetensors")
    assert "lacks none.safetensors" in refused(folder)


def test_a_weight_that_its_file_has_not_is_reported(folder: Path):
    index(folder, d="two.safetensors")
    assert "lists d in two.safetensors, which has no such weight" in refused(folder)


def test_pickle_files_are_refused_by_name(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert "pickle files (pytorch_model.bin), which can run code" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    assert f"has no {SINGLE}" in refused(tmp_path)
