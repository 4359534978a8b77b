"""Text that a recipe reads from environment variables: known to the run, and written nowhere but by its name.

What came from a variable may be a secret. The recipe, the plan, the checkpoints' manifests, the report, the
model card and the trackers get `${oc.env:NAME}` in its place, which is read again where the run goes on.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from pydantic import Field, JsonValue, ValidationError

from memtrain.errors import LaunchError
from memtrain.recipes.reading.yaml_tree import Items, Leaf, Node, Path
from memtrain.recipes.reading.yaml_tree import Mapping as Tree
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.base import Section

REFERENCE = re.compile(r"\$\{oc\.env:([^{},]+)\}")
DIGEST_BYTES = 8


class EnvironmentText(Section):
    """A text of a recipe that came from the environment."""

    key: tuple[str | int, ...]
    """Place of the text in the recipe: keys, and numbers of items."""
    reference: str
    """Text written in its place: `${oc.env:NAME}`, with the text around it."""
    value: str = Field(default="", exclude=True, repr=False)
    """Value in this process; never written."""


def environment_texts(
    raw: Node, read: Node, variables: Mapping[str, str], path: Path = ()
) -> list[EnvironmentText]:
    """The texts of `read`, the tree `raw` with every `${...}` replaced, that hold one of the `variables`.

    Numbers and words such as true are no secrets and stay what they are.
    """
    if isinstance(raw, Tree) and isinstance(read, Tree):
        both = ((key, raw.entries[key].node, one.node) for key, one in read.entries.items())
        return [text for key, a, b in both for text in environment_texts(a, b, variables, (*path, key))]
    if isinstance(raw, Items) and isinstance(read, Items):
        pairs = enumerate(zip(raw.items, read.items, strict=True))
        return [text for at, (a, b) in pairs for text in environment_texts(a, b, variables, (*path, at))]
    if not (isinstance(raw, Leaf) and isinstance(raw.value, str) and "${" in raw.value):
        return []
    found: list[EnvironmentText] = []
    for below, value in _texts(read):
        reference = value
        for name in sorted(variables, key=lambda one: -len(variables[one])):
            if variables[name] and "${" not in variables[name]:
                reference = reference.replace(variables[name], f"${{oc.env:{name}}}")
        if reference != value:
            found.append(EnvironmentText(key=(*path, *below), reference=reference, value=value))
    return found


def _texts(node: Node) -> Iterator[tuple[Path, str]]:
    if isinstance(node, Tree):
        for key, entry in node.entries.items():
            yield from (((key, *below), text) for below, text in _texts(entry.node))
    elif isinstance(node, Items):
        for at, item in enumerate(node.items):
            yield from (((at, *below), text) for below, text in _texts(item))
    elif isinstance(node.value, str):
        yield (), node.value


def that_can_be_hidden(recipe: Recipe, texts: Sequence[EnvironmentText]) -> tuple[EnvironmentText, ...]:
    """Texts that a recipe may hold by their reference; a key that takes certain words only (`method`, a time
    limit) holds no secret."""
    given = recipe.model_dump(mode="json")
    kept: list[EnvironmentText] = []
    for text in texts:
        try:
            Recipe.model_validate_json(json.dumps(hidden(given, [*kept, text])))
        except ValidationError:
            continue
        kept.append(text)
    return tuple(kept)


def hidden(
    recipe: Mapping[str, JsonValue], texts: Sequence[EnvironmentText], *, with_digest: bool = False
) -> dict[str, JsonValue]:
    """A recipe as JSON with the reference of each text in its place, and no value.

    `with_digest` tells two values of one variable apart, without saying either.
    """
    return _replaced(recipe, texts, lambda text: text.value, lambda text: _shown_reference(text, with_digest))


def revealed(
    recipe: Mapping[str, JsonValue], texts: Sequence[EnvironmentText], *, with_digest: bool = False
) -> dict[str, JsonValue]:
    """A hidden recipe with the values of `texts` again; where a digest is another, its reference stays."""
    return _replaced(recipe, texts, lambda text: _shown_reference(text, with_digest), lambda text: text.value)


def read_again(texts: Sequence[EnvironmentText], where: str) -> tuple[EnvironmentText, ...]:
    """The texts with their values in the environment of this process.

    Raises: LaunchError when a variable is not set here.
    """
    return tuple(text.model_copy(update={"value": _value(text, where)}) for text in texts)


def _value(text: EnvironmentText, where: str) -> str:
    def one(match: re.Match[str]) -> str:
        found = os.environ.get(match[1])
        if found is None:
            raise LaunchError(
                f"the environment variable {match[1]} is not set here, and "
                f"{'.'.join(map(str, text.key))} of the recipe reads it",
                where,
                "set it in the environment of this command, and on every node of a job",
            )
        return found

    return REFERENCE.sub(one, text.reference)


def _shown_reference(text: EnvironmentText, with_digest: bool) -> str:
    if not with_digest:
        return text.reference
    digest = hashlib.blake2b(text.value.encode("utf-8", "surrogateescape"), digest_size=DIGEST_BYTES)
    return f"{text.reference} ({digest.hexdigest()})"


def _replaced(
    recipe: Mapping[str, JsonValue],
    texts: Sequence[EnvironmentText],
    before: Callable[[EnvironmentText], str],
    after: Callable[[EnvironmentText], str],
) -> dict[str, JsonValue]:
    made = copy.deepcopy(dict(recipe))
    for text in texts:
        _replace(made, text.key, before(text), after(text))
    return made


def _replace(node: JsonValue, key: tuple[str | int, ...], before: str, after: str) -> JsonValue:
    """`node` with `after` for `before` at a key; below it where the recipe was read into another shape (one
    source is a list of one)."""
    if isinstance(node, str):
        return after if node == before else node
    if isinstance(node, dict):
        inside = cast(dict[str, JsonValue], node)
        names = [key[0]] if key and key[0] in inside else list(inside)
        for name in names:
            rest = key[1:] if key and key[0] in inside else key
            inside[str(name)] = _replace(inside[str(name)], rest, before, after)
        return inside
    if isinstance(node, list):
        has_number = bool(key) and isinstance(key[0], int) and key[0] < len(node)
        places = [cast(int, key[0])] if has_number else list(range(len(node)))
        for at in places:
            node[at] = _replace(node[at], key[1:] if has_number else key, before, after)
    return node
