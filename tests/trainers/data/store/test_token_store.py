"""Stores: what was put in comes out, and a half-made one is never there."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.errors import DataError
from memtrain.trainers.data.store.cache import kept, key_of
from memtrain.trainers.data.store.token_store import META_FILE, StoreWriter, TokenRow, TokenStore, as_rows

SAID = {
    "format": "preference",
    "parts": ("prompt", "chosen", "rejected"),
    "streams": ("a.jsonl", "b.jsonl"),
    "sources": (0, 1),
    "num_read": 3,
    "num_skipped": 0,
    "skipped": (),
    "num_empty": 0,
    "first_empty": None,
    "unrendered": {},
    "made_of": {},
}
PAIRS = [
    TokenRow(np.array([1, 2, 3, 4, 5], np.int32), (2, 2, 1), ((2, 4), (4, 5)), 0, 7, label=0.5),
    TokenRow(np.array([9, 8, 7], np.int32), (1, 1, 1), ((1, 2), (2, 3)), 1, 1, merged=True),
    TokenRow(np.array([6, 6, 6, 6], np.int32), (0, 2, 2), ((0, 2), (3, 4)), 1, 3, label=-1.0),
]


def write(folder: Path, rows: list[TokenRow], *, batch: int = 2, **said) -> TokenStore:
    folder.mkdir()
    said = SAID | said
    writer = StoreWriter(
        folder, num_parts=len(said["parts"]), has_label=True, has_columns=bool(rows[0].columns)
    )
    for first in range(0, len(rows), batch):
        writer.add(as_rows(rows[first : first + batch], len(said["parts"])))
    writer.finish(**said)
    return TokenStore.open(folder)


def test_a_store_gives_back_rows_parts_spans_and_places(tmp_path):
    store = write(tmp_path / "s", PAIRS)
    assert (store.num_rows, store.num_tokens) == (3, 12)
    assert store.lengths.tolist() == [5, 3, 4]
    assert store.row_ptr.tolist() == [0, 5, 8, 12]
    assert store.row(1).tolist() == [9, 8, 7]
    assert store.part(0, "chosen").tolist() == [3, 4]
    assert store.part_lengths.tolist() == [[2, 2, 1], [1, 1, 1], [0, 2, 2]]
    assert store.spans(2) == [(0, 2), (3, 4)]
    assert store.loss_mask(2).tolist() == [True, True, False, True]
    assert [store.origin(i) for i in range(3)] == ["a.jsonl:7", "b.jsonl:1", "b.jsonl:3"]
    assert store.labels[[0, 2]].tolist() == [0.5, -1.0]
    assert np.isnan(store.labels[1])
    assert store.rows_of_source(1).tolist() == [1, 2]
    assert (store.meta.num_merged, store.meta.longest_tokens) == (1, 5)


def test_a_first_token_is_not_counted_as_loss_token(tmp_path):
    """Nothing predicts it: of (0, 2) one token counts."""
    store = write(tmp_path / "s", PAIRS)
    assert store.loss_tokens_per_row.tolist() == [3, 2, 2]
    assert store.meta.num_loss_tokens == 7


def test_columns_are_read_one_row_at_a_time(tmp_path):
    rows = [TokenRow(np.array([i], np.int32), (1,), (), 0, i, columns={"answer": "é" * i}) for i in range(5)]
    store = write(tmp_path / "s", rows, parts=("prompt",), format="prompt")
    assert [store.columns(i)["answer"] for i in (4, 0, 3)] == ["éééé", "", "ééé"]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=1), min_size=1, max_size=9), st.integers(1, 4)
)
def test_the_batches_it_was_written_in_leave_no_trace(tmp_path_factory, lengths, batch):
    folder = tmp_path_factory.mktemp("store")
    rows = [
        TokenRow(np.arange(n, dtype=np.int32), (n,), ((0, n),) * (n % 2), 0, line)
        for line, (n,) in enumerate(lengths)
    ]
    write(folder / "one", rows, batch=len(rows), parts=("text",))
    write(folder / "many", rows, batch=batch, parts=("text",))
    for path in (folder / "one").iterdir():
        assert path.read_bytes() == (folder / "many" / path.name).read_bytes()


def test_a_store_that_was_tampered_with_is_refused(tmp_path):
    write(tmp_path / "s", PAIRS)
    with (tmp_path / "s" / "tokens.bin").open("ab") as file:
        file.write(b"1234")
    with pytest.raises(DataError, match=r"'tokens.bin' has 52 bytes, not 48"):
        TokenStore.open(tmp_path / "s")
    with pytest.raises(DataError, match="there are no tokenized rows"):
        TokenStore.open(tmp_path)


def test_equal_things_have_equal_keys_and_others_not():
    assert key_of({"a": 1, "b": [2]}) == key_of({"b": [2], "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})


def test_a_folder_is_made_once(tmp_path):
    made: list[Path] = []

    def make(part: Path) -> None:
        made.append(part)
        (part / META_FILE).write_text("{}")

    assert kept(tmp_path / "x", META_FILE, make)
    assert not kept(tmp_path / "x", META_FILE, make)
    assert len(made) == 1


def test_a_folder_whose_making_fails_is_not_there(tmp_path):
    def make(part: Path) -> None:
        (part / META_FILE).write_text("{}")
        raise DataError("wrong")

    with pytest.raises(DataError, match="wrong"):
        kept(tmp_path / "x", META_FILE, make)
    assert [path.name for path in tmp_path.iterdir()] == [".locks"]


def _slow(folder: Path, seconds: float) -> None:
    def make(part: Path) -> None:
        (part / META_FILE).write_text(str(os.getpid()))
        (part / "half").write_text("")
        time.sleep(seconds)
        (part / "half").unlink()

    kept(folder, META_FILE, make)


def test_a_killed_build_leaves_nothing_that_could_be_taken_for_whole(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_slow, args=(tmp_path / "x", 60))
    process.start()
    while not list(tmp_path.glob(".x.part-*/half")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "x").exists()
    _slow(tmp_path / "x", 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".locks", "x"]
    assert not (tmp_path / "x" / "half").exists()


def test_two_processes_that_want_the_same_folder_make_it_once(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_slow, args=(tmp_path / "x", 0.3)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "x" / META_FILE).read_text() in {str(process.pid) for process in processes}


def flip(path: Path, at: int) -> None:
    """Turn one bit of a file."""
    held = bytearray(path.read_bytes())
    held[at] ^= 4
    path.write_bytes(held)


@pytest.mark.parametrize(
    "name", ["part_ptr.bin", "span_ptr.bin", "spans.bin", "origin.bin", "sums.bin", "meta.json"]
)
def test_a_flipped_bit_in_an_index_is_seen_when_the_store_is_opened(tmp_path, name):
    folder = write(tmp_path / "s", PAIRS).folder
    at = (folder / name).read_text().index('"num_tokens": 12') + 15 if name == "meta.json" else 1
    flip(folder / name, at)
    with pytest.raises(DataError, match=f"'{name}' is damaged") as error:
        TokenStore.open(folder)
    assert error.value.faults[0].fix.startswith(f"remove '{folder}'; it will be made again")


def test_a_flipped_bit_in_the_tokens_is_seen_when_its_row_is_used_and_not_before(tmp_path):
    """Rows of 65,536 tokens are blocks of 256 KiB."""
    ids = np.arange(65_536, dtype=np.int32)
    rows = [TokenRow(ids, (len(ids),), ((0, len(ids)),), 0, line) for line in range(4)]
    folder = write(tmp_path / "s", rows, format="text", parts=("text",)).folder
    flip(folder / "tokens.bin", 2 * 2**18 + 1000)
    store = TokenStore.open(folder)
    for row in (0, 1, 3):
        assert store.row(row).tolist() == ids.tolist()
    with pytest.raises(DataError) as error:
        store.row(2)
    assert error.value.faults[0].what == (
        "'tokens.bin' is damaged: bytes 524,288 to 786,432 differ from the written bytes"
    )


def test_a_flipped_bit_in_the_columns_and_the_labels_is_seen(tmp_path):
    rows = [
        TokenRow(np.array([1, 2], np.int32), (2,), (), 0, 1, columns={"answer": "7"}),
        TokenRow(np.array([3, 4], np.int32), (2,), (), 0, 2, columns={"answer": "8"}),
    ]
    folder = write(tmp_path / "s", rows, format="prompt", parts=("prompt",)).folder
    flip(folder / "columns.jsonl", 12)
    flip(folder / "label.bin", 2)
    store = TokenStore.open(folder)
    for use in (lambda: store.columns(0), lambda: store.labels):
        with pytest.raises(DataError, match="is damaged"):
            use()
