"""Every key of a loaded recipe with its value, and where it was set."""

from __future__ import annotations

from typing import cast

from memtrain.recipes.reading.error_messages import plain_words, size_words
from memtrain.recipes.reading.field_types import field_types, parts, readers
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.sections.base import Section, parse_bytes


def settings(loaded: LoadedRecipe) -> list[tuple[str, str, str]]:
    """Dotted key, value in words, and where it was set ("default": nobody did), in the recipe's order."""
    return _settings(loaded, loaded.recipe, "")


def _settings(loaded: LoadedRecipe, section: Section, above: str) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    for name in type(section).model_fields:
        key = f"{above}{name}"
        value: object = getattr(section, name)
        if isinstance(value, Section):
            rows.extend(_settings(loaded, value, f"{key}."))
        elif sections := _sections(value):
            rows.append((key, _list_words(sections), loaded.where(key)))
        else:
            rows.append((key, _value_words(type(section), name, value), loaded.where(key)))
    return rows


def _sections(value: object) -> tuple[Section, ...]:
    """The sections of a list of sections; nothing for any other value."""
    items = cast(tuple[object, ...], value) if isinstance(value, tuple) else ()
    return tuple(item for item in items if isinstance(item, Section))


def _value_words(section: type[Section], name: str, value: object) -> str:
    is_size = any(parse_bytes in readers(metadata) for _, metadata in parts(field_types(section)[name]))
    return size_words(value) if is_size and isinstance(value, int) else plain_words(value)


def _list_words(items: tuple[Section, ...]) -> str:
    """Sections of a list on one line, each by its keys beyond the defaults."""
    places: list[str] = []
    for item in items:
        written = item.model_dump(exclude_defaults=True)
        first, *more = written.items()
        rest = ", ".join(f"{key}: {plain_words(value)}" for key, value in more)
        places.append(f"{first[1]} ({rest})" if rest else str(first[1]))
    return "; ".join(places)
