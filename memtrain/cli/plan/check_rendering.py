"""The first rows of a recipe as tokens: rows that cannot be rendered, fields that are lost; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from memtrain.errors import Fault
from memtrain.memory.plan.plan import string_words
from memtrain.recipes.formats.detect import FORMS, METHOD_FORMATS
from memtrain.recipes.formats.fields import BadRow, Row
from memtrain.recipes.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from memtrain.trainers.data.store.look_into import Found
    from memtrain.trainers.data.tokenize.workers import Job, Tokenized


def rendered_words(
    recipe: Recipe, found: Sequence[Found], tokenizer: PreTrainedTokenizerFast, num_rows: int
) -> tuple[str, list[Fault]]:
    """(what the first `num_rows` rows of each source show as tokens, in words; faults of those that cannot be
    rendered).

    Raises: DataError where a setting of `data:` has no effect on rows of these formats.
    """
    from memtrain.trainers.data.store.look_into import kind_of, leaves_out_template, rendering_of
    from memtrain.trainers.data.tokenize.chat import template_of, trained_words
    from memtrain.trainers.data.tokenize.unrendered import empty_words, unrendered_words
    from memtrain.trainers.data.tokenize.workers import Job

    kind = kind_of(found, METHOD_FORMATS[recipe.method])
    rendering = rendering_of(recipe.data, tokenizer, kind, found)
    readings = tuple(one.reading for one in found)
    job = Job(tokenizer.backend_tokenizer.to_str(), rendering, kind, readings)
    places, made = _tokenized(found, job, num_rows)
    words: list[str] = []
    strings = [one.source.source for one in found if leaves_out_template(one.reading)]
    if strings and template_of(tokenizer) is not None:
        words.append(string_words(strings if len(found) > 1 else ()))
    if any(FORMS[reading.form].parts == ("messages",) for reading in readings):
        made_of = {
            "rendering": asdict(rendering),
            "kind": kind,
            "readings": [asdict(reading) for reading in readings],
        }
        num_tokens = len(made.rows.ids)
        num_trained = int((made.rows.spans[:, 1] - made.rows.spans[:, 0]).sum())
        share = f", {num_trained / max(1, num_tokens):.1%} of the tokens" if num_tokens else ""
        words.append(f"trained: {trained_words(made_of)}{share}")
    num_good = made.num_read - len(made.bad)
    lost = {name: count for name, count in made.unrendered.items() if not name.startswith("column")}
    words += unrendered_words(lost, num_good)
    if made.empty:
        words.append(empty_words(len(made.empty), num_good, places[made.empty[0][1]]))
    return "; ".join(words), [BadRow(what, fix).fault(places[line]) for _, line, what, fix in made.bad]


def _tokenized(found: Sequence[Found], job: Job, num_rows: int) -> tuple[list[str], Tokenized]:
    """(places of the rows, the first rows of each source as tokens: the line of each is its number)."""
    from memtrain.trainers.data.tokenize.workers import Batch, Tokenizing

    places: list[str] = []
    batch = Batch([], [])
    for number, place, row in _first(found, num_rows):
        batch.streams.append(number)
        batch.lines.append((len(places), row))
        places.append(place)
    return places, Tokenizing(job)(batch)


def _first(found: Sequence[Found], num_rows: int) -> Iterator[tuple[int, str, Row]]:
    """(source, place, row) of the rows that can be read."""
    for number, one in enumerate(found):
        for place, row in islice(one.rows(), num_rows):
            if not isinstance(row, BadRow):
                yield number, place, row
