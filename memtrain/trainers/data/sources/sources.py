"""A source of the recipe to streams of rows: files, folders, globs, hub datasets, and data made on the spot.

No torch here. Nothing is held in memory but the row in hand.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memtrain.errors import DataError
from memtrain.recipes.reading.regular_file import open_regular
from memtrain.recipes.sections.data import Format, Source, TextUnit
from memtrain.trainers.data.sources import builtin_arithmetic as arithmetic
from memtrain.trainers.data.sources.dataset_card import configuration_of
from memtrain.trainers.data.sources.folders import (
    files_in,
    files_of_configuration,
    folders_among,
    refuse_split,
    unread_notes,
)
from memtrain.trainers.data.sources.hub import hub_faults, loading_from_hub
from memtrain.trainers.data.sources.packed import Digest
from memtrain.trainers.data.sources.readers import READERS, TEXT, Line, ending, read_file
from memtrain.trainers.data.sources.tables import ROWS_AT_ONCE as TABLE_ROWS
from memtrain.trainers.data.sources.tables import table_rows

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SHUFFLED_ROWS = 10_000
MADE_HERE = "arithmetic:"
"""Begin of the digest of built-in rows, which ends in their number: more of them begin with fewer."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows that are read in order: one file, or one dataset."""

    name: str
    """Origin of a row, as an error names it: the path of the file, or the dataset."""
    read: Callable[[], Iterator[Line]]
    digest: Callable[[], str]
    """A digest of the whole content: the same rows have the same digest."""
    read_as: Callable[[str], Iterator[Line]] | None = None
    """Reads the rows of the content with this digest: an error after the last one where it was another."""
    take: Callable[[int, int], Iterator[Line]] | None = None
    """Reads at most so many rows, sampled with a seed, where that needs no count of all rows."""


@dataclass(frozen=True, slots=True)
class Located:
    """Files and remarks of a source."""

    streams: tuple[Stream, ...]
    """In a fixed order."""
    notes: tuple[str, ...] = ()
    """Files that lie among the data and are not read, by name and bytes."""


def locate(source: Source, form: Format, *, streaming: bool = False) -> Located:
    """The streams of a source. `form` is the format that `builtin:arithmetic` writes.

    Raises: DataError when there is nothing to read, or `streaming` has no effect on it.
    """
    found = located(source, form, streaming)
    if streaming and not found.streams[0].name.startswith("hub:"):
        raise DataError(
            f"data.streaming has no effect on '{source.source}': it avoids a local copy of hub datasets",
            "data.streaming",
            "remove it; files are always read as a stream",
        )
    return found


def located(source: Source, form: Format, streaming: bool) -> Located:
    """The streams of a source, by its kind."""
    if not is_on_hub(source):
        refuse_hub_keys(source)
    if source.source.startswith("builtin:"):
        return Located((builtin(source, form),))
    path, unit = Path(source.source).expanduser(), source.text_unit or "line"
    if path.is_dir():
        chosen = configuration_of(path, source)
        if chosen is None:
            files, unread = files_in(path, source.split)
        else:
            files, unread = files_of_configuration(path, chosen, source.split)
        return Located(streams_of(files, unit), tuple(unread_notes(str(path), unread)))
    if path.exists():
        if not path.is_file():
            raise DataError(
                f"'{path}' is a pipe or a device, not a file", str(path), "write the rows to a file first"
            )
        refuse_split(source, [path])
        return Located((file_stream(path, unit),))
    if glob.has_magic(source.source):
        matches = sorted(Path(found) for found in glob.glob(str(path), recursive=True))
        files = [match for match in matches if match.is_file() or not match.exists()]
        if not files:
            raise DataError(
                f"no file matches '{source.source}'",
                "data",
                f"check the pattern; a relative one starts at the current folder, {Path.cwd()}",
            )
        refuse_split(source, files)
        notes = unread_notes(str(fixed_part(path)), folders_among(matches)) if "**" not in path.parts else ()
        return Located(streams_of(files, unit), tuple(notes))
    if ending(path) in READERS or not HUB_ID.fullmatch(source.source):
        raise DataError(*missing_file(path))
    return Located((hub_streamed(source) if streaming else hub_stream(source),))


def is_on_hub(source: Source) -> bool:
    """Whether a source is a dataset of the hub: no built-in, no path that exists, no name of a file."""
    path = Path(source.source).expanduser()
    is_local = source.source.startswith("builtin:") or path.exists() or glob.has_magic(source.source)
    return not is_local and ending(path) not in READERS and bool(HUB_ID.fullmatch(source.source))


def refuse_hub_keys(source: Source) -> None:
    """Refuse keys of a hub dataset beside a source that is none: `name` has a meaning for folders alone.

    Raises: DataError.
    """
    what = (
        f"'{source.source}' is built in" if source.source.startswith("builtin:") else "it is on this machine"
    )
    if source.revision is not None:
        raise DataError(
            f"revision: {source.revision} has no effect on '{source.source}': {what}",
            "data.revision",
            "remove it; for a revision of a dataset of the hub, give its id as source",
        )
    if source.name is not None and not Path(source.source).expanduser().is_dir():
        raise DataError(
            f"name: {source.name} has no effect on '{source.source}': {what}",
            "data.name",
            "remove it; a name chooses a configuration of a hub dataset, or one in a folder's README.md",
        )


def at_key(error: DataError, key: str) -> DataError:
    """The error of a source whose place in the recipe is `key`."""
    own = ("data", "data.name", "data.split", "data.revision")
    faults = (
        replace(one, where=key + one.where.removeprefix("data")) if one.where in own else one
        for one in error.faults
    )
    return DataError(tuple(faults))


def fixed_part(pattern: Path) -> Path:
    """The folder of a glob, up to its first sign."""
    return next(parent for parent in pattern.parents if not glob.has_magic(str(parent)))


def streams_of(files: Sequence[Path], unit: TextUnit) -> tuple[Stream, ...]:
    """The streams of files, in their order."""
    return tuple(file_stream(file, unit) for file in files)


def missing_file(path: Path) -> tuple[str, str, str]:
    """(what, where, fix) for a file that is not there."""
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    if near:
        return f"there is no file '{path}'", "data", f"did you mean '{path.with_name(near[0])}'?"
    if not path.parent.is_dir():
        return (
            f"there is no file '{path}'",
            "data",
            f"there is no folder '{path.parent}' either (from {Path.cwd()})",
        )
    return f"there is no file '{path}'", "data", f"paths are relative to the current folder, {Path.cwd()}"


def file_stream(path: Path, unit: TextUnit) -> Stream:
    """The stream of one file; `unit` is a row of it where it is text."""
    return Stream(
        str(path),
        lambda: read_file(path, unit),
        lambda: content_digest(path, unit),
        lambda digest: read_as(path, unit, digest),
    )


def read_as(path: Path, unit: TextUnit, expected: str) -> Iterator[Line]:
    """The rows of a file, digested as they are read.

    Raises: DataError after the last row when the file was not the one with the expected digest.
    """
    digest = Digest()
    yield from read_file(path, unit, digest)
    if digest_words(path, unit, digest) != expected:
        raise DataError(
            f"'{path.name}' changed while it was read", str(path), "try again when no process writes to it"
        )


def content_digest(path: Path, unit: TextUnit = "line") -> str:
    """Digest of a file's bytes (xxh3, 128 bits) and of how they are read."""
    digest = Digest()
    try:
        with open_regular(path) as file:
            digest.finish(file)
    except OSError as error:
        what = f"cannot read '{path}': {error.strerror or error}"
        raise DataError(what, str(path), "check its permissions, and its disk") from None
    return digest_words(path, unit, digest)


def digest_words(path: Path, unit: TextUnit, digest: Digest) -> str:
    """A digest of bytes, and how they are read."""
    how = f"{ending(path)} by {unit}" if ending(path) == TEXT else ending(path)
    return f"{how}:{digest.hexdigest()}"


def builtin(source: Source, form: Format) -> Stream:
    """The stream of data made on the spot.

    Raises: DataError for a name or a split that is not made here.
    """
    if source.source != "builtin:arithmetic":
        raise DataError(f"there is no built-in dataset '{source.source}'", "data", "use builtin:arithmetic")
    if source.split not in arithmetic.SPLITS:
        known = ", ".join(arithmetic.SPLITS)
        raise DataError(f"builtin:arithmetic has no split '{source.split}'", "data", f"use one of {known}")
    if form not in arithmetic.FORMS:
        raise DataError(
            f"builtin:arithmetic has no format {form}", "data", f"use one of {', '.join(arithmetic.FORMS)}"
        )
    count = source.limit or arithmetic.DEFAULT_ROWS
    seed = arithmetic.SPLITS[source.split]

    def read(count: int = count, _seed: int = 0) -> Iterator[Line]:
        return enumerate(arithmetic.rows(count, seed, form), start=1)

    identity = f"{MADE_HERE}{arithmetic.VERSION}:{seed}:{form}:{count}"
    return Stream(source.source, read, lambda: identity, take=read)


def hub_stream(source: Source) -> Stream:
    """The stream of a dataset of the Hugging Face hub, copied to the disk at the first use.

    Raises: DataError when it cannot be loaded: no network, no such dataset, configuration or split.
    """
    from datasets import load_dataset

    with loading_from_hub(source):
        loaded: Any = load_dataset(source.source, source.name, split=source.split, revision=source.revision)
    return Stream(
        f"hub:{source.source}",
        lambda: table_rows(loaded.with_format("arrow").iter(batch_size=TABLE_ROWS)),
        lambda: f"hub:{source.source}:{source.split}:{loaded._fingerprint}",
    )


def hub_streamed(source: Source) -> Stream:
    """The stream of a dataset of the hub that is read over the network and never copied to the disk.

    A limit takes rows from shuffled files through a buffer: not from the whole, which nobody has counted.
    Raises: DataError when it cannot be reached.
    """
    from datasets import load_dataset
    from huggingface_hub import HfApi

    with loading_from_hub(source, streaming=True):
        revision = HfApi().dataset_info(source.source, revision=source.revision).sha
        loaded: Any = load_dataset(
            source.source, source.name, split=source.split, revision=revision, streaming=True
        )

    def read(rows: Any = loaded) -> Iterator[Line]:
        with hub_faults(source):
            yield from table_rows(rows.with_format("arrow").iter(batch_size=TABLE_ROWS))

    def take(limit: int, seed: int) -> Iterator[Line]:
        return read(loaded.shuffle(seed=seed, buffer_size=SHUFFLED_ROWS).take(limit))

    identity = f"hub:{source.source}:{source.name}:{source.split}:{revision}:streamed"
    return Stream(f"hub:{source.source}", read, lambda: identity, take=take)


def rows_like(digest: str) -> str:
    """The same for two digests of streams that have rows in common, whatever their numbers of rows."""
    return digest.rpartition(":")[0] if digest.startswith(MADE_HERE) else digest


def sampled(
    streams: Sequence[Stream], limit: int | None, seed: int, digests: Sequence[str] = ()
) -> Iterator[tuple[int, Line]]:
    """(number of the stream, row) of at most `limit` rows, sampled over all of them, in their order.

    With a limit, the rows are counted first: the streams are read twice, never held. `digests` of the streams
    are compared with what is read, where they are given.
    """

    def rows_of(index: int) -> Iterator[Line]:
        stream = streams[index]
        return stream.read_as(digests[index]) if digests and stream.read_as else stream.read()

    every = ((index, line) for index in range(len(streams)) for line in rows_of(index))
    if limit is None:
        yield from every
        return
    if len(streams) == 1 and streams[0].take is not None:
        yield from ((0, line) for line in streams[0].take(limit, seed))
        return
    num_rows = sum(1 for stream in streams for _ in stream.read())
    if num_rows <= limit:
        yield from every
        return
    chosen = np.sort(np.random.default_rng(seed).permutation(num_rows)[:limit])
    wanted = iter(chosen.tolist())
    following = next(wanted)
    for number, item in enumerate(every):
        if number == following:
            yield item
            following = next(wanted, -1)
