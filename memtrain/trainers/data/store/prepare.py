"""The rows of a recipe to token stores: found, read, tokenized once and kept; and which rows are trained on.

No torch here. The rows are stored whole, every row of every source once; truncation, packing, mixture weights
and the held-out part are indices over them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memtrain import __version__
from memtrain.errors import DataError
from memtrain.memory.plan.plan import PreparedData, PreparedSplit, SourceShare, TurnEnd
from memtrain.recipes.formats.detect import FORMS, METHOD_FORMATS
from memtrain.recipes.formats.fields import BadRow
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.data import Data, Format, Source
from memtrain.trainers.data.sources.readers import Line
from memtrain.trainers.data.sources.sources import Stream, rows_like, sampled
from memtrain.trainers.data.sources.splits import choose_rows
from memtrain.trainers.data.store.cache import cache_dir, kept, key_of
from memtrain.trainers.data.store.look_into import (
    Found,
    is_cut_in_text,
    kind_of,
    leaves_out_template,
    look_into,
    rendering_of,
    trained_too,
)
from memtrain.trainers.data.store.shown_rows import example_of
from memtrain.trainers.data.store.token_store import META_FILE, VERSION, StoreWriter, TokenStore
from memtrain.trainers.data.tokenize.chat import (
    template_of,
    trained_words,
    turn_end_of,
)
from memtrain.trainers.data.tokenize.sample_prompts import sample_prompts
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_digest, tokenizer_of
from memtrain.trainers.data.tokenize.unrendered import notes_of, share_words
from memtrain.trainers.data.tokenize.workers import Job, Reading, Tokenized, tokenized

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Progress = Callable[[int, int], None]
"""Called with (rows read so far, tokens so far)."""
SKIPPED_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Work:
    """All that is known before the rows are read."""

    found: tuple[Found, ...]
    job: Job
    tokenizer_digest: str

    @property
    def streams(self) -> list[Stream]:
        """Streams of all sources, by their number."""
        return [stream for one in self.found for stream in one.streams]

    @property
    def sources(self) -> tuple[int, ...]:
        """Source in the recipe, by number, of each stream."""
        return tuple(number for number, one in enumerate(self.found) for _ in one.streams)

    @property
    def notes(self) -> tuple[str, ...]:
        """Files of all sources that lie among the data and are not read."""
        return tuple(note for one in self.found for note in one.notes)

    def rows(self, seed: int, digests: Sequence[str] = ()) -> Iterator[tuple[int, Line]]:
        """(number of the stream, row) of all sources, in order, within their limits.

        `digests` of the streams are compared with what is read, where they are given.
        """
        first_stream = itertools.accumulate((len(one.streams) for one in self.found), initial=0)
        for number, (one, first) in enumerate(zip(self.found, first_stream, strict=False)):
            own = digests[first : first + len(one.streams)]
            for stream, line in sampled(one.streams, one.source.limit, seed + number, own):
                yield first + stream, line

    def made_of(self, data: Data, seed: int) -> dict[str, Any]:
        """Properties that decide the contents of the store; reads all files for their digests."""
        limits = [one.source.limit for one in self.found]
        return {
            "layout": VERSION,
            "memtrain": __version__,
            "tokenizers": importlib.metadata.version("tokenizers"),
            "transformers": importlib.metadata.version("transformers"),
            "tokenizer": self.tokenizer_digest,
            "kind": self.job.kind,
            "rendering": asdict(self.job.rendering),
            "readings": [asdict(reading) for reading in self.job.readings],
            "content": [stream.digest() for stream in self.streams],
            "names": [stream.name for stream in self.streams],
            "limits": limits,
            "seed": seed if any(limits) else None,
            "skips": data.on_bad_row == "skip",
        }


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Tokenized rows on disk, and the notes on them."""

    store: TokenStore
    notes: tuple[str, ...]
    """Parts that were not read, or are not trained on."""


def prepare(recipe: Recipe, *, progress: Progress | None = None) -> PreparedData:
    """The tokenized data of a recipe: made now, or found in the cache.

    Raises: DataError when a source, a row, or the tokenizer cannot be used as declared.
    """
    data, seed = recipe.data, recipe.train.seed
    tokenizer = tokenizer_of(recipe.model)
    made = kept_rows(data, data.train, recipe.method, tokenizer, seed, progress)
    train = made.store
    chosen = choose_rows(data, train, seed)
    if not len(chosen.train):
        raise DataError(
            "no training rows are left", "data.train", "lower data.eval_fraction, or give more rows"
        )
    if data.eval_fraction and not len(chosen.eval):
        is_one = train.num_rows == 1
        why = (
            "the data has only one row"
            if is_one
            else ("rows of the same prompt stay together, and there is only one prompt")
        )
        smaller = ", make the rows of a text file smaller (data.text_unit)" if is_one else ""
        raise DataError(
            f"no row can be held out: {why}",
            "data.eval_fraction",
            f"give separate held-out rows with data.eval{smaller}, or set data.eval_fraction: 0",
        )
    held_out = len(chosen.eval)
    other = kept_rows(data, data.eval, recipe.method, tokenizer, seed, progress) if data.eval else None
    if other is not None:
        other = replace(other, notes=(*other.notes, *common(made.store, other.store)))
    turn_end, samples = turn_end_in(made.store, tokenizer), recipe.eval.samples
    strings = string_sources(made.store, tokenizer, data.train)
    return PreparedData(
        train=split_of(made, chosen.train, data.train).model_copy(
            update={
                "example": example_of(train, int(chosen.train[0]), tokenizer),
                "boundary": boundary_words(train, tokenizer),
                "is_merged": train.meta.num_merged > 0,
            }
        ),
        eval=other and split_of(other, None, data.eval),
        held_out_rows=held_out,
        turn_end=turn_end,
        has_turns=any(
            FORMS[reading["form"]].parts == ("messages",) for reading in train.meta.made_of["readings"]
        ),
        leaves_out_template=bool(strings),
        strings_of=strings if len(data.train) > 1 else (),
        samples=sample_prompts(samples.prompts, data, tokenizer, is_chat=turn_end is not None)
        if samples is not None
        else (),
    )


def common(train: TokenStore, held_out: TokenStore) -> Iterator[str]:
    """A sentence for held-out rows that are trained on: files of both with the same content."""
    trained = {rows_like(digest) for digest in train.meta.made_of["content"]}
    named = zip(held_out.meta.streams, held_out.meta.made_of["content"], strict=True)
    if both := [name for name, digest in named if rows_like(digest) in trained]:
        yield trained_too(both)


def turn_end_in(store: TokenStore, tokenizer: PreTrainedTokenizerFast) -> TurnEnd | None:
    """End of the assistant's turns; None where no source of the store holds conversations."""
    chats = [reading for reading in store.meta.made_of["readings"] if reading["is_chat"]]
    return turn_end_of(tokenizer, chats[0]["template_kwargs"]) if chats else None


def string_sources(
    store: TokenStore, tokenizer: PreTrainedTokenizerFast, sources: Sequence[Source]
) -> tuple[str, ...]:
    """Sources whose prompts and answers are strings, of which the recipe does not say that they are text,
    where the tokenizer has a chat template."""
    if template_of(tokenizer) is None:
        return ()
    readings = zip(store.meta.sources, store.meta.made_of["readings"], strict=True)
    found = (number for number, reading in readings if leaves_out_template(Reading(**reading)))
    return tuple(dict.fromkeys(sources[number].source for number in found))


def boundary_words(store: TokenStore, tokenizer: PreTrainedTokenizerFast) -> str:
    """What the end of a string prompt does to the tokens; empty where no prompt is a string."""
    meta = store.meta
    if not any(is_cut_in_text(Reading(**reading)) for reading in meta.made_of["readings"]):
        return ""
    if meta.first_merged is None:
        return (
            "no token reaches over the end of a prompt: prompts have the same tokens with answers and without"
        )
    stream, line, token = meta.first_merged
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    rows = share_words(meta.num_merged, meta.num_rows)
    return (
        f"where prompt and answer meet, one token holds characters of both, and is trained on (in {rows}; "
        f"the first {meta.streams[stream]}:{line}: {text!r}): nothing separates them; a newline at the end "
        "of prompts does, or data.strings_are: turns"
    )


def split_of(made: KeptRows, rows: Any, sources: Sequence[Source]) -> PreparedSplit:
    """Facts of a store for the plan: of the given rows, or of all."""
    store = made.store
    lengths, loss_tokens = store.lengths, store.loss_tokens_per_row
    if rows is not None:
        lengths, loss_tokens = lengths[rows], loss_tokens[rows]
    return PreparedSplit(
        folder=str(store.folder),
        num_rows=len(lengths),
        num_tokens=int(lengths.sum()),
        num_loss_tokens=int(loss_tokens.sum()),
        num_skipped=store.meta.num_skipped,
        longest_tokens=int(lengths.max(initial=0)),
        notes=made.notes,
        trained=trained_words(store.meta.made_of),
        sources=source_shares(store, np.arange(store.num_rows) if rows is None else rows, sources),
    )


def source_shares(
    store: TokenStore, rows: NDArray[np.int64], sources: Sequence[Source]
) -> tuple[SourceShare, ...]:
    """Rows, tokens and loss tokens of each source among the rows of an epoch; nothing of a single source."""
    if len(sources) < 2:
        return ()
    source_of = np.array(store.meta.sources, np.int64)[store.origins[rows, 0]]

    def sums(values: NDArray[Any] | None = None) -> list[int]:
        return np.bincount(source_of, values, len(sources)).astype(np.int64).tolist()

    counts = zip(sums(), sums(store.lengths[rows]), sums(store.loss_tokens_per_row[rows]), strict=True)
    return tuple(
        SourceShare(source=one.source, num_rows=num, num_tokens=tokens, num_loss_tokens=loss_tokens)
        for one, (num, tokens, loss_tokens) in zip(sources, counts, strict=True)
    )


def kept_rows(
    data: Data,
    sources: Sequence[Source],
    method: str,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    progress: Progress | None = None,
) -> KeptRows:
    """The store of the rows of `sources`, made now or found in the cache.

    Raises: DataError when a source or a row cannot be used as declared.
    """
    work = work_of(data, sources, METHOD_FORMATS[method], tokenizer)
    made_of = work.made_of(data, seed)
    folder = store_folder(data, made_of)
    kept(folder, META_FILE, lambda part: build(part, work, data, seed, made_of, progress))
    store = TokenStore.open(folder)
    return KeptRows(store, (*work.notes, *notes_of(store, method)))


def work_of(
    data: Data, sources: Sequence[Source], allowed: Sequence[Format], tokenizer: PreTrainedTokenizerFast
) -> Work:
    """Sources found and looked into, and how their rows become tokens; `allowed`: formats of the method.

    Raises: DataError when a source or its first row cannot be used as declared.
    """
    key = "data.eval" if sources is data.eval else "data.train"
    found = tuple(
        look_into(source, data, allowed, f"{key}[{number}]") for number, source in enumerate(sources)
    )
    kind = kind_of(found, allowed)
    rendering = rendering_of(data, tokenizer, kind, found)
    readings = tuple(one.reading for one in found for _ in one.streams)
    job = Job(tokenizer.backend_tokenizer.to_str(), rendering, kind, readings)
    return Work(found, job, tokenizer_digest(tokenizer))


def store_folder(data: Data, made_of: dict[str, Any]) -> Path:
    """Folder of the store with these properties."""
    return cache_dir(data.cache_dir) / "tokens" / key_of(made_of)


def build(
    folder: Path, work: Work, data: Data, seed: int, made_of: dict[str, Any], progress: Progress | None
) -> None:
    """Write the store into `folder`.

    Raises: DataError at the first bad row, unless they are skipped; and when no row is left.
    """
    kind, streams = work.job.kind, work.streams
    form = FORMS[kind]
    writer = StoreWriter(
        folder, num_parts=len(form.parts), has_label=form.num_answers > 0, has_columns=form.is_prompt
    )
    skipped: list[str] = []
    unrendered: Counter[str] = Counter()
    num_read = num_skipped = num_empty = 0
    first_empty: tuple[int, int] | None = None
    try:
        for batch in tokenized(work.rows(seed, made_of["content"]), work.job, data.processes):
            shown = bad_rows(batch, streams, data.on_bad_row)
            skipped += shown[: SKIPPED_SHOWN - len(skipped)]
            num_skipped += len(shown)
            num_read += batch.num_read
            unrendered += batch.unrendered
            num_empty += len(batch.empty)
            first_empty = first_empty or next(iter(batch.empty), None)
            writer.add(batch.rows)
            if progress is not None:
                progress(num_read, writer.num_tokens)
    finally:
        writer.close()
    if writer.num_rows == 0:
        raise DataError(
            f"all {num_read} rows are bad, the first: {skipped[0]}",
            streams[0].name,
            "fix the rows, or map their columns with data.columns",
        )
    writer.finish(
        format=kind,
        parts=form.parts,
        streams=tuple(stream.name for stream in streams),
        sources=work.sources,
        num_read=num_read,
        num_skipped=num_skipped,
        skipped=tuple(skipped),
        unrendered=dict(sorted(unrendered.items())),
        num_empty=num_empty,
        first_empty=first_empty,
        made_of=made_of,
    )


def bad_rows(batch: Tokenized, streams: Sequence[Stream], on_bad_row: str) -> list[str]:
    """The bad rows of a batch, each as `file:line: what`.

    Raises: DataError at the first of them, unless they are skipped.
    """
    if batch.bad and on_bad_row == "error":
        stream, line, what, fix = batch.bad[0]
        raise DataError([BadRow(what, fix).fault(f"{streams[stream].name}:{line}")])
    return [f"{streams[stream].name}:{line}: {what}" for stream, line, what, _ in batch.bad]
