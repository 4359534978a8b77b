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

from memtrain.errors import Fault, LaunchError
from memtrain.recipes.reading.yaml_tree import Items, Leaf, Node, Path
from memtrain.recipes.reading.yaml_tree import Mapping as Tree
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.base import Section

REFERENCE = re.compile(r"\$\{oc\.env:([^{},]+)\}")
DIGEST_BYTES = 8

ADDRESSES = frozenset({("generate", "vllm", "server"), ("distill", "teacher_server")})
"""Keys whose text is an address that is connected to."""

WRITTEN = frozenset(
    ("run_dir", "cache_dir", "shared_dir", "top_k_file", "top_k_files", "include_path", "offload_disk")
)
"""Keys, in any section, whose text becomes a name on a disk, or a word of a command."""

READ = frozenset(
    ("source", "train", "eval", "path", "tokenizer", "config", "chat_template", "teacher", "python", "models")
    + ("name", "split", "revision", "teacher_revision", "function", "functions", "model", "add_tokens")
)
"""Keys whose text names something that is looked for, on a disk or on the hub."""


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
    # As it was read, without the blanks and quotes around it, too; at each place the longest counts.
    forms = {
        form: name
        for name, text in sorted(variables.items())
        for form in (text, text.strip(), text.strip().strip("'\""))
        if form
    }
    if not forms:
        return []
    any_of = re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))
    found: list[EnvironmentText] = []
    for below, value in _texts(read):
        reference = any_of.sub(lambda match: f"${{oc.env:{forms[match[0]]}}}", value)
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


def refuse_in_places(texts: Sequence[EnvironmentText], place_of: Callable[[Path], str]) -> list[Fault]:
    """The faults of texts of the environment where they would be sent to others, or become a name.

    A stranger's recipe may read any variable into an address, the name of a folder or of a model, a line of a
    batch script: these are sent, or stand on a disk. What is no secret is let through: a path from the root
    at the beginning, a number (of a job), a name that is the whole value. No value is in the words.
    """
    found: list[Fault] = []
    for text in texts:
        names = REFERENCE.findall(text.reference)
        values = [os.environ.get(name, "") for name in names]
        fault = _wrong_in_place(text, values)
        if fault:
            key = ".".join(map(str, text.key))
            what = f"{key}: {text.reference} reads {' and '.join(names)} of the environment {fault[0]}"
            found.append(Fault(what, place_of(text.key), fault[1]))
    return found


def _wrong_in_place(text: EnvironmentText, values: Sequence[str]) -> tuple[str, str] | None:
    """(why the text may not stand at its key, the way out); None where it may."""
    words = [part for part in text.key if isinstance(part, str)]
    key, last = text.key, words[-1] if words else ""
    yourself = (
        f"give it yourself: {'.'.join(map(str, key))}=... on the command line, where the shell reads it"
    )
    if tuple(words) in ADDRESSES:
        is_whole = REFERENCE.fullmatch(text.reference) is not None
        return None if is_whole else ("into an address, to which it would be sent", yourself)
    if words[:2] == ["cluster", "slurm"]:
        return "into a batch script, which is written to a file", yourself
    if last not in WRITTEN and last not in READ:
        return None
    if last in ("function", "functions", "python"):
        return None if _begins_with_folder(text, values) else ("into the name of a program", yourself)
    if _begins_with_folder(text, values) or all(value.isdecimal() and len(value) < 12 for value in values):
        return None
    if last in WRITTEN:
        return (
            "into a name that is written",
            f"begin with a variable that holds a folder (an absolute path), or {yourself}",
        )
    is_name = "/" in text.value or os.path.exists(text.value)
    if is_name and REFERENCE.fullmatch(text.reference):
        return None
    return (
        "into a name that is looked for, on the hub too",
        f"begin with a variable that holds a folder (an absolute path), write the name out, or {yourself}",
    )


def _begins_with_folder(text: EnvironmentText, values: Sequence[str]) -> bool:
    """Whether the first variable is a path from the root, and all others in the text are numbers."""
    is_first = text.reference.startswith("${oc.env:")
    others = all(value.isdecimal() and len(value) < 12 for value in values[1:])
    return is_first and bool(values) and values[0].startswith(("/", "~/")) and others


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
