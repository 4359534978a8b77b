"""Data files, mutated: hostile values, broken containers, packings and folders; each through `prepare`.

    python benchmarks/mutants_of_data.py [--mutants 5000] [--seed 0] [--cli 5] [-o FILE]

A mutant is a number: it decides the method, the format, the container, the packing and the mutations, of
values (what a row may hold) and of bytes (what a disk or a download may do). Each ends in one of two ways: in
one DataError with a place, or in tokenized rows for which
 - rows in = rows out + bad rows reported; the rows of the file are counted by other code than the readers,
 - the words of every row that nothing changed are in its tokens,
 - every field that was added is in the tokens, in the columns for rewards, or named.
Anything else is a fault: another exception, more than 60 s, a process that dies. Processes of 100 mutants are
forked, so that one that dies is seen. `--cli`: that many also through `memtrain plan`.
"""

from __future__ import annotations

import argparse
import bz2
import csv
import datetime
import decimal
import functools
import gzip
import io
import json
import lzma
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from result_files import write_result

from memtrain.errors import DataError, printable
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.model import Model
from memtrain.trainers.data.store import prepare as preparing
from memtrain.trainers.data.store.token_store import TokenStore

LIMIT_S = 60
CHUNK = 100
WORDS = ["pens", "trains", "noon", "sum", "half", "é", "日本", "naïve\n", "a  b", "x" * 400]
METHODS = {
    "text": ("sft",),
    "prompt_completion": ("sft",),
    "messages": ("sft",),
    "ids": ("sft",),
    "preference": ("dpo", "reward", "kto"),
    "unpaired": ("kto",),
    "prompt": ("grpo",),
}
TABLES = (".parquet", ".arrow")
FLAT = (".csv", ".tsv")
KINDS = (".jsonl", ".ndjson", ".json", *FLAT, *TABLES, ".txt")
HOSTILE: list[Any] = [
    None,
    True,
    0,
    -1,
    7,
    2**31,
    2**63,
    10**4000,
    1e300,
    float("nan"),
    float("-inf"),
    "",
    " \n\t",
    "\x1b[31mred",
    "\ud83d half",
    "\x00",
    "\u202eevil",
    "x" * 100_000,
    [],
    {},
    [None],
    [[]],
    ["a", "b"],
    [{"role": "user"}],
    [{"role": "narrator", "content": "x"}],
    [{"from": "human", "value": "hi", "content": "both"}],
    [{"role": "user", "content": [{"type": "image", "text": "x"}]}],
    [
        {"role": "user", "content": [{"type": "text", "text": "hi", "extra": 1}]},
        {"role": "assistant", "content": ""},
    ],
    {"a": {"b": [1]}},
    b"\xff\x00bytes",
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    datetime.timedelta(seconds=5),
    decimal.Decimal("1.5"),
]
MESSAGE_FIELDS = {
    "reasoning_content": "because",
    "name": "Ann",
    "weight": 0.3,
    "train": False,
    "thinking": "hm",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
}


class Hang(BaseException):
    """Raised by the timer; nothing may catch it."""


@dataclass(slots=True)
class Mutant:
    """One mutated file or folder, and what is known of it."""

    number: int
    form: str
    method: str
    path: Path
    on_bad_row: str
    said: list[str] = field(default_factory=list)
    """Its mutations."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    untouched: set[int] = field(default_factory=set)
    """Rows that no mutation has changed, by their place in the file."""
    added: set[str] = field(default_factory=set)
    """Names of fields that were added to untouched rows."""
    is_whole: bool = True
    """Whether no byte was changed after the rows were written."""
    unread: list[str] = field(default_factory=list)
    """Names of files beside the data, which have to be reported."""


def row_of(random: random.Random, form: str, number: int) -> dict[str, Any]:
    """A sound row, with words that tell it from the others."""

    def said(what: str) -> str:
        return f"{what}{number:03} " + " ".join(random.choice(WORDS) for _ in range(random.randint(1, 6)))

    def message(role: str) -> dict[str, Any]:
        return {"role": role, "content": said(role).strip()}

    def either(what: str, role: str) -> Any:
        return [message(role)] if is_chat else f"{said(what)} end"

    is_chat = random.random() < 0.3
    match form:
        case "text":
            return {"text": said("text")}
        case "prompt_completion":
            return {"prompt": either("prompt", "user"), "completion": either("completion", "assistant")}
        case "messages":
            return {"messages": [message("user"), message("assistant")] * random.randint(1, 2)}
        case "ids":
            return {"input_ids": [random.randint(1, 500) for _ in range(random.randint(2, 30))]}
        case "preference":
            pair = {"chosen": either("chosen", "assistant"), "rejected": either("rejected", "assistant")}
            return {"prompt": either("prompt", "user"), **pair, "margin": random.choice([0.5, 1, None])}
        case "unpaired":
            answer = either("completion", "assistant")
            return {"prompt": either("prompt", "user"), "completion": answer, "label": random.random() < 0.5}
        case _:
            return {"prompt": either("prompt", "user"), "answer": str(number)}


def texts_of(value: Any) -> list[str]:
    """Strings that have to be in the text of a row."""
    if isinstance(value, str):
        return [value]
    return [message["content"] for message in value] if isinstance(value, list) else []


def make(number: int, folder: Path) -> Mutant:
    """The mutant of a number, written into an empty folder."""
    rng = random.Random(number)
    form = rng.choice(list(METHODS))
    kind = ".txt" if form == "text" and rng.random() < 0.3 else rng.choice(KINDS[:-1])
    made = Mutant(number, form, rng.choice(METHODS[form]), folder, rng.choice(["error", "skip"]))
    made.rows = [row_of(rng, form, at) for at in range(rng.randint(1, 12))]
    if kind in FLAT:
        made.rows = [{key: str(value) for key, value in row.items()} for row in made.rows]
    made.untouched = set(range(len(made.rows)))
    for _ in range(rng.choice([0, 1, 1, 2])):
        change_row(rng, made, kind)
    suffix = kind
    data = written(made, kind, rng)
    if kind not in TABLES and rng.random() < 0.35:
        packing = rng.choice(list(PACKERS))
        data, suffix = PACKERS[packing](data), kind + packing
    for _ in range(rng.choice([0, 0, 1, 2])):
        data = change_bytes(rng, made, data)
    made.said.insert(0, suffix)
    if rng.random() < 0.2:
        beside(rng, made, folder, suffix, data)
    else:
        made.path = folder / f"rows{suffix}"
        made.path.write_bytes(data)
    return made


def change_row(rng: random.Random, made: Mutant, kind: str) -> None:
    """A hostile value, a field more or less, in one row."""
    at = rng.randrange(len(made.rows))
    row = dict(made.rows[at])
    what = rng.choice(["value", "value", "missing", "column", "field", "nested", "system"])
    if kind == ".txt":
        what = "value"
    key = rng.choice(list(row)) if row else "x"
    lists = [name for name, value in row.items() if isinstance(value, list) and is_messages(value)]
    if what == "value":
        value = rng.choice(HOSTILE)
        row[key] = str(value) if kind in FLAT and value is not None else value
        made.untouched.discard(at)
        made.added.discard(key)
    elif what == "missing":
        row.pop(key, None)
        made.added.discard(key)
        made.untouched.discard(at)
    elif what == "nested":
        value: Any = "deep"
        for _ in range(rng.choice([50, 99, 150, 900])):
            value = [value]
        row["nested"] = str(value) if kind in FLAT else value
        made.untouched.discard(at)
    elif what == "field" and lists:
        name = rng.choice(list(MESSAGE_FIELDS))
        messages = [dict(one) for one in row[lists[0]]]
        messages[-1][name] = MESSAGE_FIELDS[name]
        row[lists[0]] = messages
        made.untouched.discard(at)
        if name in ("reasoning_content", "name", "thinking"):
            made.added.add(name)
    else:
        name = "system" if what == "system" else rng.choice(["id", "source", "note\x1b[2J"])
        row[name] = rng.choice(["some words", "more"])
        made.added.add(name)
    made.said.append(f"{what} of row {at}")
    made.rows[at] = row


def is_messages(value: list[Any]) -> bool:
    """Whether a list is one of messages."""
    return bool(value) and all(isinstance(one, dict) for one in value)


def json_of(value: Any) -> Any:
    """A value with a JSON form, by its text where it has none."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def dumped(row: dict[str, Any], rng: random.Random, made: Mutant, at: int) -> str:
    """A row as JSON; sometimes with one key doubled."""
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    text = json.dumps(row, ensure_ascii=rng.random() < 0.5 or not encodes(row), default=json_of)
    sys.set_int_max_str_digits(digits)
    if row and rng.random() < 0.01:
        key = next(iter(row))
        text = text[:-1] + f", {json.dumps(key)}: 1}}"
        made.untouched.discard(at)
        made.said.append(f"doubled key in row {at}")
    return text


def encodes(row: dict[str, Any]) -> bool:
    """Whether all of a row has a UTF-8 form."""
    try:
        repr(row).encode()
        json.dumps(row, ensure_ascii=False, default=json_of).encode()
    except (UnicodeEncodeError, ValueError):
        return False
    return True


def written(made: Mutant, kind: str, rng: random.Random) -> bytes:
    """The rows in a container. Tables take a row's values as text where a column would have two types."""
    rows = made.rows
    if kind in (".jsonl", ".ndjson"):
        return "".join(dumped(row, rng, made, at) + "\n" for at, row in enumerate(rows)).encode()
    if kind == ".json":
        body = [dumped(row, rng, made, at) for at, row in enumerate(rows)]
        cut = rng.randint(0, len(body))
        style = rng.choice(["list", "list", "objects", "two lists"])
        if style == "two lists":
            return f"[{', '.join(body[:cut])}]\n[{', '.join(body[cut:])}]".encode()
        return ("\n".join(body) if style == "objects" else f"[{', '.join(body)}]").encode()
    if kind == ".txt":
        return "".join(str(row.get("text", "")).replace("\n", " ") + "\n" for row in rows).encode(
            "utf-8", "replace"
        )
    names = list(dict.fromkeys(name for row in rows for name in row))
    if kind in FLAT:
        buffer = io.StringIO(newline="")
        writer = csv.DictWriter(buffer, names, delimiter="," if kind == ".csv" else "\t", restval="")
        writer.writeheader()
        writer.writerows(
            {name: "" if value is None else value for name, value in row.items()} for row in rows
        )
        return buffer.getvalue().encode("utf-8", "replace")
    table = pa.table({name: column_of([row.get(name) for row in rows], made, kind) for name in names})
    sink = pa.BufferOutputStream()
    if kind == ".parquet":
        pa.parquet.write_table(table, sink, row_group_size=rng.choice([2, 100]))
    else:
        opened = pa.ipc.new_file if rng.random() < 0.5 else pa.ipc.new_stream
        with opened(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=rng.choice([2, 100]))
    return sink.getvalue().to_pybytes()


def column_of(values: list[Any], made: Mutant, kind: str) -> Any:
    """A column of the values, or of their texts where no table can hold them together."""
    try:
        column = pa.array(values)
        table, sink = pa.table({"x": column}), pa.BufferOutputStream()
        if kind == ".parquet":
            pa.parquet.write_table(table, sink)
        else:
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, UnicodeError):
        made.untouched.clear()
        made.added.clear()
        texts = [None if one is None else repr(one)[:200_000] for one in values]
        return pa.array([one and one.encode("utf-8", "replace").decode() for one in texts], pa.string())
    return column


def zstd(data: bytes) -> bytes:
    """Packed as `zstd` does."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def unzstd(data: bytes) -> bytes:
    """Unpacked, whole."""
    return pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()


def unxz(data: bytes) -> bytes:
    """Unpacked, without the zeros that may follow a stream as padding: Python's own reader refuses them."""
    return lzma.decompress(data.rstrip(b"\0"))


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": functools.partial(gzip.compress, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
UNPACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": unxz,
    ".zst": unzstd,
}


def change_bytes(rng: random.Random, made: Mutant, data: bytes) -> bytes:
    """What a disk, a download or an editor may do to a file."""
    made.is_whole = False
    at = rng.randrange(len(data) + 1)
    what = rng.choice(["flip", "flip", "cut", "insert", "twice", "zeros", "junk", "bom", "crlf", "line"])
    made.said.append(f"{what} at {at}")
    match what:
        case "flip" if data:
            at %= len(data)
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case "cut":
            return data[:at]
        case "insert":
            return data[:at] + rng.randbytes(rng.randint(1, 20)) + data[at:]
        case "twice":
            return data + data
        case "zeros":
            return data[:at] + bytes(rng.randint(1, 64)) + data[at:]
        case "junk":
            return data + rng.choice([b"junk", b"\n{}", b"\x00\x00\x00\x00", b"]", b"\xff\xfe"])
        case "bom":
            return rng.choice([b"\xef\xbb\xbf", b"\xff\xfe"]) + data
        case "crlf":
            return data.replace(b"\n", b"\r\n")
        case _:
            lines = data.split(b"\n")
            del lines[rng.randrange(len(lines))]
            return b"\n".join(lines)


def beside(rng: random.Random, made: Mutant, folder: Path, suffix: str, data: bytes) -> None:
    """The file in a folder, among files that may hide it or be hidden by it."""
    made.path = folder / "data"
    made.path.mkdir()
    name = rng.choice(["train", "part-0", "README_faq", "sub/rows"])
    target = made.path / f"{name}{suffix}"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(data)
    others = rng.sample(["notes.xlsx", "README.md", "test" + suffix, "more" + suffix, ".hidden" + suffix], 2)
    for other in others:
        (made.path / other).write_bytes(data if other.endswith(suffix) else b"x" * 100)
    made.said.append(f"folder with {name} and {', '.join(others)}")
    has_splits = name == "train" or any(other.startswith("test") for other in others)
    for other in others:
        if not (other == "more" + suffix and not has_splits):
            made.unread.append(other)


def rows_in(path: Path) -> int | None:
    """Rows of a file, counted by other code than the readers'; None where that code cannot read it."""
    data, suffix = path.read_bytes(), path.suffix
    try:
        if suffix in UNPACKERS:
            data, suffix = UNPACKERS[suffix](data), Path(path.stem).suffix
        if suffix == ".parquet":
            return pa.parquet.read_table(pa.BufferReader(data)).num_rows
        if suffix == ".arrow":
            opened = pa.ipc.open_file if data.startswith(b"ARROW1") else pa.ipc.open_stream
            return opened(pa.BufferReader(data)).read_all().num_rows
        if suffix in (".jsonl", ".ndjson"):
            return sum(1 for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip())
        text = data.decode("utf-8-sig")
        if suffix == ".txt":
            lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
            return sum(1 for line in lines if line and not line.isspace())
        if suffix in FLAT:
            rows = list(
                csv.reader(io.StringIO(text, newline=""), delimiter="," if suffix == ".csv" else "\t")
            )
            return sum(1 for row in rows[1:] if row)
        return values_in(text)
    except (OSError, EOFError, ValueError, csv.Error, lzma.LZMAError, pa.ArrowException, RecursionError):
        return None


def values_in(text: str) -> int:
    """Values at the top of a JSON text; those of lists there one by one."""
    decoder, at, count = json.JSONDecoder(), 0, 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = decoder.raw_decode(text, at)
        count += len(value) if isinstance(value, list) else 1
    return count


def recipe_of(made: Mutant, cache: Path) -> Recipe:
    """A recipe that learns from a mutant."""
    said: dict[str, Any] = {
        "method": made.method,
        "model": {"path": "builtin:tiny"},
        "data": {
            "train": str(made.path),
            "cache_dir": str(cache),
            "on_bad_row": made.on_bad_row,
            "format": made.form if made.form != "prompt" else "auto",
        },
    }
    if made.method == "grpo":
        said["rewards"] = {"functions": ["exact_answer"]}
    return Recipe.model_validate(said)


def outcome_of(made: Mutant, folder: Path) -> tuple[str, str]:
    """(`refused`, `made` or the kind of a fault; what was said or is wrong)."""

    def ring(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        prepared = preparing.prepare(recipe_of(made, folder / "cache"))
    except DataError as error:
        return refused(error)
    except Hang:
        return "hang", f"more than {LIMIT_S} s"
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    lost = losses(made, TokenStore.open(prepared.train.folder), " ".join(prepared.notes))
    return ("silent loss", lost) if lost else ("made", "")


def refused(error: DataError) -> tuple[str, str]:
    """What an error says, or what is wrong with how it says it."""
    text = error.text()
    if not all(fault.what and fault.where for fault in error.faults):
        return "no place", text
    if text != printable(text) or len(text) > 10_000:
        return "raw text", text
    return "refused", text


def losses(made: Mutant, store: TokenStore, notes: str) -> str:
    """What went in and neither came out nor was reported; empty where nothing is lost."""
    meta = store.meta
    given = [rows_in(Path(stream)) for stream in meta.streams]
    if None in given:
        return f"{meta.num_read} rows of a file that other code cannot read"
    copies = 2 if made.form == "preference" and made.method == "kto" else 1
    if (meta.num_read, store.num_rows) != (
        sum(filter(None, given)),
        (meta.num_read - meta.num_skipped) * copies,
    ):
        return f"{given} rows in, {meta.num_read} read, {store.num_rows} out, {meta.num_skipped} told"
    for name in made.unread:
        if Path(name).name not in notes:
            return f"the file {name} is neither read nor named"
    if not made.is_whole:
        return ""
    for name in made.added:
        is_column = made.form == "prompt" and any(name in store.columns(i) for i in range(store.num_rows))
        is_reported = name.split("\x1b")[0] in notes or is_column or all_bad(made, store)
        if not is_reported and not (name == "system" and is_spoken(made, store)):
            return f"the field {name!r} is in no text and not named: {notes}"
    return missing_words(made, store, notes)


def is_spoken(made: Mutant, store: TokenStore) -> bool:
    """Whether the column `system` is in the text of each row that has one (ShareGPT's conversations)."""
    said = [(at, row["system"]) for at, row in enumerate(made.rows) if "system" in row]
    return made.form == "messages" and all(
        str(text) in tokenizer().decode(store.row(at)) for at, text in said if at < store.num_rows
    )


def all_bad(made: Mutant, store: TokenStore) -> bool:
    """Whether rows were left out: the one with the field may be among them."""
    return store.meta.num_skipped > 0


def missing_words(made: Mutant, store: TokenStore, notes: str) -> str:
    """The first untouched row whose words are not in its tokens."""
    if made.form == "ids" or len(store.meta.streams) > 1:
        return ""
    decoded = [tokenizer().decode(store.row(i).tolist()) for i in range(store.num_rows)]
    columns = {"text", "prompt", "completion", "messages", "chosen", "rejected"}
    kept = " ".join(decoded)
    for at in sorted(made.untouched) if not store.meta.num_skipped else ():
        for name in columns & set(made.rows[at]):
            for text in texts_of(made.rows[at][name]):
                words = text.replace("\n", " ") if made.said[0].startswith(".txt") else text
                if words.strip() and words.strip() not in kept:
                    return f"row {at}: {words[:60]!r} of {name} is in no row"
    return ""


load = preparing.tokenizer_of


def chunk(numbers: list[int], place: Path) -> None:
    """Run mutants in this process; a line for each in a file, begun and ended."""
    preparing.tokenizer_of = tokenizer_once
    with place.open("w") as file:
        for number in numbers:
            file.write(json.dumps({"begun": number}) + "\n")
            file.flush()
            with tempfile.TemporaryDirectory() as folder:
                made = make(number, Path(folder))
                began = time.monotonic()
                kind, said = outcome_of(made, Path(folder))
                ended = {
                    "kind": kind,
                    "method": made.method,
                    "said": made.said,
                    "s": time.monotonic() - began,
                }
                file.write(json.dumps(ended | {"number": number, "text": printable(said)[:2000]}) + "\n")


_loaded: list[Any] = []


def tokenizer_once(model: Any) -> Any:
    """The built-in tokenizer: every mutant has the same."""
    if not _loaded:
        _loaded.append(load(model))
    return _loaded[0]


def tokenizer() -> Any:
    """The tokenizer of all mutants."""
    return _loaded[0]


def run(
    first: int, count: int, say: Callable[[str], None] = lambda text: None, *, processes: int = 1
) -> list[dict[str, Any]]:
    """The outcomes of mutants `first` to `first + count`, in forked processes of 100 each."""
    outcomes: list[dict[str, Any]] = []
    context = multiprocessing.get_context("fork")
    tokenizer_once(Model(path="builtin:tiny"))
    ends = range(first, first + count, CHUNK)
    waiting = [list(range(at, min(at + CHUNK, first + count))) for at in ends]
    with tempfile.TemporaryDirectory() as folder:
        while waiting:
            now, waiting = waiting[:processes], waiting[processes:]
            places = [Path(folder) / f"{at}.jsonl" for at in range(len(now))]
            started = [context.Process(target=chunk, args=work) for work in zip(now, places, strict=True)]
            for process in started:
                process.start()
            for process, numbers, place in zip(started, now, places, strict=True):
                process.join()
                lines = [json.loads(line) for line in place.read_text().splitlines()]
                outcomes += [line for line in lines if "kind" in line]
                if process.exitcode:
                    died = lines[-1].get("begun", numbers[0])
                    text = f"exit code {process.exitcode}"
                    outcomes.append({"kind": "died", "number": died, "text": text, "s": 0.0})
                    waiting.append([number for number in numbers if number > died])
            say(f"{len(outcomes):,} of {count:,}: {dict(Counter(one['kind'] for one in outcomes))}")
    return outcomes


def through_cli(number: int) -> dict[str, Any]:
    """A mutant through `memtrain plan`: an exit code of the table, and no traceback."""
    with tempfile.TemporaryDirectory() as folder:
        made = make(number, Path(folder))
        recipe = Path(folder) / "recipe.json"
        recipe.write_text(recipe_of(made, Path(folder) / "cache").model_dump_json(exclude_unset=True))
        command = [sys.executable, "-m", "memtrain", "plan", str(recipe.rename(recipe.with_suffix(".yaml")))]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    is_sound = done.returncode in (0, 3, 4) and "Traceback" not in done.stderr + done.stdout
    kind = "cli" if is_sound else "cli fault"
    return {
        "kind": kind,
        "number": number,
        "text": printable(done.stderr[-2000:]),
        "code": done.returncode,
        "s": 0.0,
    }


SOUND = ("made", "refused", "cli")


def main() -> int:
    """Run, count, and write the result; 1 when there is a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutants", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--cli", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    began, cpu = time.monotonic(), os.times()
    emit = functools.partial(print, flush=True)
    outcomes = run(given.seed, given.mutants, emit, processes=given.processes)
    outcomes += [through_cli(given.seed + at) for at in range(given.cli)]
    spent = os.times()
    faults = [one for one in outcomes if one["kind"] not in SOUND]
    result = {
        "mutants": given.mutants,
        "seed": given.seed,
        "outcomes": dict(sorted(Counter(one["kind"] for one in outcomes).items())),
        "containers": dict(sorted(Counter(one["said"][0] for one in outcomes if "said" in one).items())),
        "methods": dict(sorted(Counter(one["method"] for one in outcomes if "method" in one).items())),
        "slowest_s": round(max(one["s"] for one in outcomes), 2),
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": round(sum(spent[:4]) - sum(cpu[:4])),
        "faults": faults[:50],
    }
    for one in faults[:20]:
        print(json.dumps(one, indent=1))
    if given.output is not None:
        write_result(given.output, result)
    print(json.dumps({key: value for key, value in result.items() if key != "faults"}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
