"""The tokenizers of student and teacher: the same tokens by the same ids, or one error. No torch here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from memtrain.errors import LaunchError, MemtrainError
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.model import Model
from memtrain.trainers.data.store.top_k import TopKFile, check_facts
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FIX = "use a teacher and a student of one family, or train on the teacher's text (memtrain sft)"


def teacher_model(recipe: Recipe) -> Model:
    """The teacher of a recipe as a model section."""
    section = recipe.taught
    assert section is not None, "Only this method has a teacher."
    return Model(path=section.teacher, revision=section.teacher_revision, dtype=section.teacher_dtype)


def refuse_other_tokenizer(recipe: Recipe) -> None:
    """Compare the vocabularies of student and teacher token by token, or with the file of likeliest tokens.

    Raises: LaunchError where a token of either has another id, or none, in the other, or the teacher's
    tokenizer cannot be loaded; DataError for a file that is not there, or not of this recipe.
    """
    section = recipe.taught
    if section is None:
        return
    place = f"{recipe.method}.teacher"
    if section.top_k_file is not None:
        check_facts(
            TopKFile(Path(section.top_k_file).expanduser()).facts,
            top_k=section.top_k or 0,
            temperature=section.temperature,
            vocabulary=vocabulary_digest(tokenizer_of(recipe.model)),
            place=f"{recipe.method}.top_k_file",
        )
        return
    if section.loads_teacher:
        refuse_other_teacher(recipe, place)


def refuse_other_teacher(recipe: Recipe, place: str) -> None:
    """Raise LaunchError where the tokenizer of the recipe's teacher is not the student's."""
    section = recipe.taught
    assert section is not None, "Only this method has a teacher."
    try:
        theirs = tokenizer_of(teacher_model(recipe))
    except MemtrainError as error:
        what = f"the teacher's tokenizer: {error.faults[0].what}"
        raise LaunchError(what, place, "give a teacher that comes with tokenizer.json") from None
    compare_vocabularies(tokenizer_of(recipe.model), theirs, str(section.teacher), place)


def vocabulary_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """A digest of the tokens with their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:32]


def compare_vocabularies(
    own: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast, name: str, place: str
) -> None:
    """Raise LaunchError for the first token, by its id, on which two tokenizers differ."""
    mine, other = own.get_vocab(), theirs.get_vocab()
    if mine == other:
        return
    differ = {token for token, number in mine.items() if other.get(token) != number}
    differ |= {token for token, number in other.items() if mine.get(token) != number}
    first = min(differ, key=lambda token: min(mine.get(token, 1 << 40), other.get(token, 1 << 40)))
    both = (("student", mine), ("teacher", other))
    places = [f"{whose} {found.get(first, 'nowhere')}" for whose, found in both]
    raise LaunchError(
        f"the tokenizer of the teacher {name} is another than the student's: {len(differ):,} of "
        f"{len(mine):,} and {len(other):,} tokens differ, the first of them {first!r} ({', '.join(places)})",
        place,
        FIX,
    )
