"""The first rows of a recipe as tokens: rows that cannot be rendered, fields that are lost; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from memtrain.errors import Fault
from memtrain.memory.plan.plan import string_words
from memtrain.recipes.formats.detect import FORMS
from memtrain.recipes.formats.fields import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from memtrain.trainers.data.packing.first_rows import FirstRows
    from memtrain.trainers.data.store.look_into import Found


def rendered_words(
    found: Sequence[Found], tokenizer: PreTrainedTokenizerFast, first: FirstRows
) -> tuple[str, list[Fault]]:
    """(what the first rows show as tokens, in words; faults of those that cannot be rendered)."""
    from memtrain.trainers.data.store.look_into import leaves_out_template
    from memtrain.trainers.data.tokenize.chat import template_of, trained_words
    from memtrain.trainers.data.tokenize.unrendered import empty_words, unrendered_words

    job, places, made = first.job, first.places, first.made
    words: list[str] = []
    strings = [one.source.source for one in found if leaves_out_template(one.reading)]
    if strings and template_of(tokenizer) is not None:
        words.append(string_words(strings if len(found) > 1 else ()))
    if any(FORMS[reading.form].parts == ("messages",) for reading in job.readings):
        made_of = {
            "rendering": asdict(job.rendering),
            "kind": job.kind,
            "readings": [asdict(reading) for reading in job.readings],
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
