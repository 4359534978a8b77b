"""Accepted values of each field of a recipe, read from its type: in words, and step by step along a path."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import annotated_types
from pydantic import BeforeValidator, JsonValue
from pydantic.fields import FieldInfo

from memtrain.recipes.reading.yaml_tree import Path
from memtrain.recipes.sections.base import Section, one_or_many, parse_bytes
from memtrain.recipes.sections.data import held_out_sources, source_of
from memtrain.recipes.sections.rewards import functions_of

Annotation = Any
"""A type as a section writes it: `Annotated[int, Field(gt=0)] | None`."""


@cache
def field_types(section: type[Section]) -> dict[str, Annotation]:
    """The field names of a section, each with its type as written (bounds and readers included)."""
    hints = get_type_hints(section, include_extras=True)
    return {name: hints[name] for name in section.model_fields}


def parts(annotation: Annotation) -> list[tuple[Annotation, list[object]]]:
    """The alternatives of a type, each with its own metadata: `int | None` has two."""
    base, metadata = _bare(annotation)
    if get_origin(base) in (Union, types.UnionType):
        return [part for inner in get_args(base) for part in parts(inner)]
    return [(base, metadata)]


def _bare(annotation: Annotation) -> tuple[Annotation, list[object]]:
    metadata: list[object] = []
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        for one in more:
            metadata.extend(one.metadata if isinstance(one, FieldInfo) else [one])
    return annotation, metadata


def section_of(annotation: Annotation) -> type[Section] | None:
    """The section among the alternatives of a type; None when there is none."""
    for base, _ in parts(annotation):
        if isinstance(base, type) and issubclass(base, Section):
            return base
    return None


def item_of(annotation: Annotation) -> Annotation | None:
    """The type of the items of a list; None when the type is no list."""
    for base, _ in parts(annotation):
        if get_origin(base) is tuple:
            return get_args(base)[0]
    return None


def choices(annotation: Annotation) -> list[str]:
    """The legal words of a type, of a list's items too; empty when any text is legal, or none."""
    words: list[str] = []
    for base, _ in parts(annotation):
        if get_origin(base) is Literal:
            words.extend(str(word) for word in get_args(base))
        elif get_origin(base) is tuple:
            words.extend(choices(get_args(base)[0]))
    return words


def takes_null(annotation: Annotation) -> bool:
    """Whether null is a legal value."""
    return any(base is type(None) for base, _ in parts(annotation))


def readers(metadata: list[object]) -> list[Callable[..., object]]:
    """The functions that read a value before it is checked, such as `parse_bytes`."""
    return [cast(Callable[..., object], one.func) for one in metadata if isinstance(one, BeforeValidator)]


def describe(annotation: Annotation) -> str:
    """Values that a type accepts, in words: `a whole number above 0, or auto`."""
    kinds: list[str] = []
    words: list[str] = []
    for base, metadata in parts(annotation):
        if get_origin(base) is Literal:
            words.extend(str(word) for word in get_args(base))
        elif base is type(None):
            words.append("null")
        else:
            kinds.append(_describe_one(base, metadata))
    if words and not kinds and words != ["null"]:
        return ", ".join(words[:-1]) + f" or {words[-1]}" if len(words) > 1 else words[0]
    return ", or ".join([", ".join(kinds), *words])


def _describe_one(base: Annotation, metadata: list[object]) -> str:
    if parse_bytes in readers(metadata):
        return "a size such as 24GiB"
    if base is JsonValue or base is Any:
        return "anything"
    section = section_of(base)
    if section is not None:
        return f"a section (keys: {', '.join(section.model_fields)})"
    if base is bool:
        return "true or false"
    if base is int:
        return "a whole number" + _bounds(metadata)
    if base is float:
        return "a number" + _bounds(metadata)
    if base is str:
        return "text"
    if get_origin(base) is tuple:
        return _describe_list(base, metadata)
    if get_origin(base) is dict:
        return "a mapping"
    return f"{base}"


def _describe_list(base: Annotation, metadata: list[object]) -> str:
    inner = get_args(base)
    if len(inner) != 2 or inner[1] is not Ellipsis:
        return f"a list of {len(inner)} numbers"
    if source_of in readers(metadata):
        return "a source (a file, a hub id, or keys: source, weight, ...), or a list of them"
    if held_out_sources in readers(metadata):
        return "a source (a file, a hub id, or keys: source, ...), a list, or a mapping of names to them"
    if functions_of in readers(metadata):
        return "a reward (a name, or keys: function, weight, ...), or a list of them"
    one = describe(inner[0])
    return f"{one}, or a list of them" if one_or_many in readers(metadata) else f"a list of {one}"


def _bounds(metadata: list[object]) -> str:
    bounds: list[str] = []
    for one in metadata:
        if isinstance(one, annotated_types.Gt):
            bounds.append(f"above {one.gt}")
        elif isinstance(one, annotated_types.Ge):
            bounds.append(f"from {one.ge}")
        elif isinstance(one, annotated_types.Lt):
            bounds.append(f"to below {one.lt}" if bounds else f"below {one.lt}")
        elif isinstance(one, annotated_types.Le):
            bounds.append(f"to {one.le}")
    return " " + " ".join(bounds) if bounds else ""


def follow(root: type[Section], loc: tuple[str | int, ...]) -> tuple[Path, Annotation]:
    """The path of a field and its type, from a location as pydantic gives it.

    Pydantic mixes the names of union branches (`literal['auto']`, `int`) into its locations; they are left
    out, and so is whatever lies below a field that is no section.
    """
    path: list[str | int] = []
    annotation: Annotation = root
    for part in loc:
        section = section_of(annotation)
        item = item_of(annotation)
        if isinstance(part, int) and item is not None:
            path.append(part)
            annotation = item
        elif section is not None and isinstance(part, str) and part in section.model_fields:
            path.append(part)
            annotation = field_types(section)[part]
    return tuple(path), annotation


@cache
def every_key(root: type[Section], above: str = "") -> tuple[str, ...]:
    """The dotted name of every key, sections included: `model`, `model.path`, `data.train.weight`."""
    keys: list[str] = []
    for name, annotation in field_types(root).items():
        keys.append(above + name)
        section = section_of(annotation) or section_of(item_of(annotation) or annotation)
        if section is not None:
            keys.extend(every_key(section, f"{above}{name}."))
    return tuple(keys)
