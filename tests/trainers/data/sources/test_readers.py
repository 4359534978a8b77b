"""Sources: every kind of file gives the same rows, every broken one a single clear error."""

import bz2
import csv
import gzip
import json
import lzma
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memtrain.errors import DataError
from memtrain.recipes.formats.fields import BadRow
from memtrain.recipes.sections.data import Source
from memtrain.trainers.data.sources import readers
from memtrain.trainers.data.sources.packed import PACKINGS
from memtrain.trainers.data.sources.readers import read_file
from memtrain.trainers.data.sources.sources import locate, sampled

ROWS = [{"prompt": f'p{i}, "é"\n', "completion": f"c{i} 日本"} for i in range(5)]


def zstd(data: bytes) -> bytes:
    """Packed as `zstd` does."""
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(data)
    return buffer.getvalue().to_pybytes()


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def write(path: Path, rows: list[dict]) -> Path:
    """The rows in the kind of file that the path's ending says."""
    kind = readers.ending(path)
    if kind in (".jsonl", ".ndjson"):
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    elif kind == ".json":
        data = json.dumps(rows, indent=1, ensure_ascii=False).encode()
    elif kind in (".csv", ".tsv"):
        with path.with_suffix(".tmp").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="," if kind == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
        data = path.with_suffix(".tmp").read_bytes()
        path.with_suffix(".tmp").unlink()
    else:
        table = pa.Table.from_pylist(rows)
        if kind == ".parquet":
            pa.parquet.write_table(table, path)
        else:
            with pa.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
        return path
    path.write_bytes(PACKERS[path.suffix](data) if path.suffix in PACKERS else data)
    return path


def rows_of(place: Path | str, **source) -> list:
    streams = locate(Source(source=str(place), **source), "prompt_completion").streams
    return [row for _, (_, row) in sampled(streams, source.get("limit"), seed=0)]


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "a.jsonl.gz",
        "a.jsonl.bz2",
        "a.jsonl.xz",
        "a.JSONL.zst",
        "a.json.zst",
        "a.csv.xz",
        "a.ndjson",
        "a.json",
        "a.json.gz",
        "a.csv",
        "a.csv.gz",
        "a.tsv",
        "a.parquet",
        "a.arrow",
    ],
)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    assert rows_of(write(tmp_path / name, ROWS)) == ROWS


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"text": "a"}\n\n{"text": "b"}', encoding="utf-8")
    assert list(read_file(path)) == [(1, {"text": "a"}), (3, {"text": "b"})]
    path = tmp_path / "a.json"
    path.write_text('[\n {"text":\n  "a"},\n {"text": "b"}\n]\n')
    assert list(read_file(path)) == [(2, {"text": "a"}), (4, {"text": "b"})]


def test_json_objects_one_after_another_are_rows_too(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert [row for _, row in read_file(path)] == [{"text": "a"}, {"text": "b"}]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.text(max_size=40), min_size=1, max_size=5), st.integers(5, 40))
def test_json_is_read_in_chunks_of_any_size(tmp_path_factory, texts, chunk):
    path = tmp_path_factory.mktemp("json") / "a.json"
    rows = [{"text": text, "n": [1, {"deep": text}]} for text in texts]
    path.write_text(json.dumps(rows, indent=2))
    whole, readers.JSON_CHUNK_CHARS = readers.JSON_CHUNK_CHARS, chunk
    try:
        assert [row for _, row in read_file(path)] == rows
    finally:
        readers.JSON_CHUNK_CHARS = whole


def test_json_lists_one_after_another_lose_no_row(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('\n[{"text": "a"}]\n[{"text": "b"},\n {"text": "c"}] {"text": "d"}')
    assert list(read_file(path)) == [
        (n, {"text": text}) for n, text in [(2, "a"), (3, "b"), (4, "c"), (5, "d")]
    ]


def test_rows_of_a_list_on_one_line_have_places_of_their_own(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a"}, 7, {"text": "c"}]))
    assert [number for number, _ in read_file(path)] == [1, 2, 3]


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_streams_one_after_another_lose_no_row(tmp_path, suffix):
    """The second stream is longer than the readers' buffers of 256 KiB, packed and unpacked."""
    digits = random.Random(0)
    rows = [ROWS[0], *({"text": f"{digits.getrandbits(9_000):x}"} for _ in range(400))]
    one, *others = (json.dumps(row).encode() + b"\n" for row in rows)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACKERS[suffix](one) + PACKERS[suffix](b"".join(others)))
    assert [row for _, row in read_file(path)] == rows


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("damage", ["cut", "junk after it"])
def test_a_damaged_packed_file_is_an_error_and_not_fewer_rows(tmp_path, suffix, damage):
    packed = PACKERS[suffix](b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(20_000)))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed[:-20] if damage == "cut" else packed + b"junk, which no packing begins with")
    with pytest.raises(DataError, match=f"not a whole {PACKINGS[suffix]} file") as error:
        list(read_file(path))
    assert error.value.faults[0].where == str(path)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("line", [(1, "é a"), (2, "b"), (5, "  c"), (6, "d")]),
        ("paragraph", [(1, "é a\nb"), (5, "  c\nd")]),
        ("document", [(1, "é a\r\nb\n\n \n  c\nd")]),
    ],
)
def test_a_row_of_a_text_file_is_a_line_a_paragraph_or_the_whole(tmp_path, unit, expected):
    path = tmp_path / "a.txt"
    path.write_bytes("é a\r\nb\n\n \n  c\nd".encode())
    assert [(line, row["text"]) for line, row in read_file(path, unit)] == expected


def test_a_text_file_in_other_units_is_other_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n")
    digests = {
        locate(Source(source=str(path), text_unit=unit), "text").streams[0].digest()
        for unit in ("line", "document")
    }
    assert len(digests) == 2


def test_a_long_document_is_cut_into_rows_and_nothing_is_lost(tmp_path):
    path = tmp_path / "a.txt"
    said = "".join(f"Speaker {i}:\nsome words é\r\n\n" for i in range(5000))
    path.write_bytes(said.encode())
    rows = [row["text"] for _, row in read_file(path, "document")]
    assert "".join(rows) == said
    assert len(rows) > 3
    assert all(len(row) <= readers.TEXT_ROW_CHARS for row in rows)
    assert all(row.endswith("\n\n") for row in rows)


def test_a_row_of_five_megabytes_is_a_row(tmp_path):
    for name in ("a.jsonl", "a.json", "a.csv"):
        big = {"prompt": "x " * 2_500_000, "completion": "y"}
        assert rows_of(write(tmp_path / name, [big])) == [big]


def test_a_folder_is_all_its_files_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[2:])
    write(tmp_path / "a.jsonl", ROWS[:2])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / ".hidden" / "c.jsonl", ROWS)
    assert rows_of(tmp_path) == ROWS
    assert rows_of(f"{tmp_path}/*.jsonl") == ROWS
    assert rows_of(f"{tmp_path}/b*") == ROWS[2:]


def test_a_folder_has_splits_where_its_names_say_so(tmp_path):
    (tmp_path / "train").mkdir()
    write(tmp_path / "train" / "0.parquet", ROWS[:3])
    write(tmp_path / "test-00000-of-00001.parquet", ROWS[3:])
    assert rows_of(tmp_path) == ROWS[:3]
    assert rows_of(tmp_path, split="test") == ROWS[3:]
    with pytest.raises(DataError, match="has no split 'validation'"):
        rows_of(tmp_path, split="validation")


def notes_of(place: Path | str, **source) -> tuple[str, ...]:
    return locate(Source(source=str(place), **source), "prompt_completion").notes


def test_files_of_a_folder_that_are_not_read_are_named_with_their_bytes(tmp_path):
    for name in ("train.jsonl", "part-0.jsonl", "test.jsonl"):
        write(tmp_path / name, ROWS)
    size = (tmp_path / "part-0.jsonl").stat().st_size
    (tmp_path / "table.xlsx").write_bytes(b"x" * 2048)
    (tmp_path / "README.txt").write_text("about")
    assert rows_of(tmp_path) == ROWS
    assert set(notes_of(tmp_path)) == {
        f"not read in {tmp_path}, not a readable kind of file: table.xlsx (2.0 KiB)",
        f"not read in {tmp_path}, of no split while other names say theirs: part-0.jsonl ({size} B)",
        f"not read in {tmp_path}, of the split test: test.jsonl ({size} B)",
        f"not read in {tmp_path}, a text about the data: README.txt (5 B)",
    }


def test_a_subfolder_of_a_split_does_not_hide_what_lies_above_it(tmp_path):
    (tmp_path / "train").mkdir()
    write(tmp_path / "train" / "0.jsonl", ROWS)
    write(tmp_path / "more.jsonl", ROWS)
    assert any("more.jsonl" in note for note in notes_of(tmp_path))


def test_data_whose_name_begins_like_a_readme_is_read(tmp_path):
    write(tmp_path / "README_faq.jsonl", ROWS)
    assert (rows_of(tmp_path), notes_of(tmp_path)) == (ROWS, ())


def test_linked_folders_are_read_once_and_a_broken_link_is_an_error(tmp_path):
    (tmp_path / "there").mkdir()
    write(tmp_path / "there" / "a.jsonl", ROWS)
    data = tmp_path / "data"
    data.mkdir()
    (data / "sub").symlink_to(tmp_path / "there")
    (data / "again").symlink_to(data)
    assert rows_of(data) == ROWS
    (data / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match="there is no file '.*b.jsonl'"):
        rows_of(data)


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "locked").mkdir()
    list_folder = os.scandir

    def scandir(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match="cannot list the folder '.*locked': Permission denied"):
        rows_of(tmp_path)


def test_a_pipe_is_refused_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="is a pipe or a device, not a file"):
        rows_of(tmp_path / "a.jsonl")


def test_folders_that_a_glob_matches_are_named(tmp_path):
    write(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "sub").mkdir()
    assert notes_of(f"{tmp_path}/*") == (f"not read in {tmp_path}, a folder, a pipe or a device: sub (0 B)",)


def test_a_limit_samples_over_the_whole_and_keeps_the_order(tmp_path):
    rows = [{"text": str(i)} for i in range(1000)]
    path = write(tmp_path / "a.jsonl", rows)
    some = [int(row["text"]) for row in rows_of(path, limit=50)]
    assert len(set(some)) == 50
    assert some == sorted(some)
    assert some[-1] > 800
    assert some == [int(row["text"]) for row in rows_of(path, limit=50)]
    assert rows_of(path, limit=5000) == rows


def test_the_digest_is_of_the_content_and_not_of_the_name(tmp_path):
    def digest(path: Path) -> str:
        return locate(Source(source=str(path)), "text").streams[0].digest()

    one, same = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", ROWS)
    assert digest(one) == digest(same)
    os.utime(one, (1, 1))
    assert digest(one) == digest(same)
    assert digest(write(tmp_path / "c.jsonl", ROWS[1:])) != digest(one)


def test_a_row_that_cannot_be_read_stands_in_its_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": \n{"text": "\xff"}\n[1]\n{"text": "b"}\n')
    lines = list(read_file(path))
    assert [number for number, _ in lines] == [1, 2, 3, 4, 5]
    assert [isinstance(row, BadRow) for _, row in lines] == [False, True, True, True, False]


def test_a_streamed_hub_dataset_gives_its_rows_and_no_more_than_its_limit(monkeypatch):
    import datasets
    import huggingface_hub

    said = {}

    def load(*given, **named):
        said.update(named)
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset()

    class Api:
        def dataset_info(self, *given, **named):
            return huggingface_hub.DatasetInfo(id="some/dataset", sha="abc")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    (stream,) = locate(Source(source="some/dataset"), "text", streaming=True).streams
    assert [row for _, row in stream.read()] == ROWS
    assert (said["streaming"], said["revision"]) == (True, "abc")
    rows = [row for _, (_, row) in sampled([stream], 2, seed=0)]
    assert len(rows) == 2
    assert all(row in ROWS for row in rows)


def test_streaming_has_no_effect_on_files_and_says_so(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match="data.streaming has no effect on"):
        locate(Source(source=str(path)), "text", streaming=True)


def test_a_hub_dataset_gives_its_rows(monkeypatch):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *given, **named: None)

    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: datasets.Dataset.from_list(ROWS))
    assert rows_of("some/dataset") == ROWS
