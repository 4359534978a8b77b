"""Messages for one wrong value: the fault and the best advice, in plain words."""

from __future__ import annotations

import difflib
import re

from memtrain.recipes.peers.hints import renamed_value, words_of_values
from memtrain.recipes.reading.field_docs import sentences_of
from memtrain.recipes.reading.field_types import (
    Annotation,
    choices,
    describe,
    field_types,
    follow,
    item_of,
    parts,
    readers,
    section_of,
)
from memtrain.recipes.reading.yaml_tree import Items, Mapping, Node, Path, dotted, plain
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import nearest_methods
from memtrain.recipes.sections.base import UNITS, Section, parse_bytes
from memtrain.recipes.sections.methods.pair_losses import PAIR_LOSSES

THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
MOST_NAMED_TWICE = 8
"""Legal words that stand in the advice too; of more, the error has the list. Taste."""
_YES = ("yes", "on", "y", "true")
_NO = ("no", "off", "n", "false")


def refusal(node: Node, annotation: Annotation) -> str:
    """The value in hand and the accepted ones: `'cosin' is not one of constant, linear, cosine, wsd`."""
    value, shown, legal = plain(node), _shown(node), describe(annotation)
    words = choices(annotation)
    if isinstance(value, str) and words and legal == describe_words(words):
        return (
            f"{shown} is not {words[0]}" if len(words) == 1 else f"{shown} is not one of {', '.join(words)}"
        )
    if _is_out_of_range(value, annotation):
        return f"{shown} is out of range; it must be {legal}"
    return f"{shown}{_kind(value)}; it must be {legal}"


def describe_words(words: list[str]) -> str:
    """`a, b or c`."""
    return ", ".join(words[:-1]) + f" or {words[-1]}" if len(words) > 1 else "".join(words)


def way_out(path: Path, annotation: Annotation, node: Node) -> str:
    """The word that was meant, else the value in its right form, else the default."""
    value, key, words = plain(node), path[-1] if path else "", choices(annotation)
    # A member of a list is written without its number, which is no key.
    named = f"{key}: " if isinstance(key, str) else ""
    new = renamed_value(dotted(path), value)
    if new is not None:
        return f"write {named}{new}"
    if isinstance(value, bool) and "on" in words:
        return f"write {named}{'on' if value else 'off'}"
    if path == ("method",) and isinstance(value, str) and value.lower() in PAIR_LOSSES:
        return f"{value.lower()} is a loss of dpo: write method: dpo, and dpo.loss: {value.lower()}"
    if path == ("method",) and isinstance(value, str) and (near := nearest_methods(value)):
        return "did you mean " + " or ".join(f"'{name}'" for name in near) + "?"
    near = difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.6) if isinstance(value, str) else []
    if near:
        return f"did you mean '{near[0]}'?"
    section = section_of(annotation)
    if section is not None:
        if isinstance(node, Items) and (listed := _required_list(section)):
            return f"write the list below a line `{listed}:` of `{key}:`"
        kind = _kind_in(section, value)
        return f"write {dotted(path)}.kind: {kind}" if kind else _section_for(section, value, str(key))
    reformed = _reformed(value, [base for base, _ in parts(annotation)])
    if reformed is not None:
        return f"write {named}{reformed}"
    section = _section_at(path[:-1])
    default = default_words(section, str(key)) if section is not None and isinstance(key, str) else ""
    if default:
        return f"change it, or remove it{default}"
    if len(words) > MOST_NAMED_TWICE:
        return "write one of these names, or remove it"
    return f"write {describe(annotation)}" if words else sentence(path)


def _section_for(section: type[Section], value: object, key: str) -> str:
    """The advice where one value stands in the place of a section: `write early_stopping: {patience: 3}`."""
    fields = field_types(section)
    if value is True and not any(section.model_fields[name].is_required() for name in fields):
        return f"write {key}: {{}} for its defaults"
    first = next((name for name, each in fields.items() if not choices(each)), "")
    if type(value) in (int, str) and first and type(value) in [base for base, _ in parts(fields[first])]:
        return f"write {key}: {{{first}: {value}}}"
    if isinstance(value, str) and (listed := _required_list(section)):
        return f"write {key}: {{{listed}: {value}}}"
    return f"write its keys on the lines below `{key}:`"


def _required_list(section: type[Section]) -> str | None:
    """The first key of a section that must be given and takes a list: `functions` of rewards."""
    fields = field_types(section)
    return next(
        (key for key, each in fields.items() if section.model_fields[key].is_required() and item_of(each)),
        None,
    )


def _kind_in(section: type[Section], value: object) -> str | None:
    """The `kind` of a section that a text in its place names, in our word for it."""
    known = choices(field_types(section)["kind"]) if "kind" in section.model_fields else []
    if not isinstance(value, str):
        return None
    words = [
        new
        for key, olds in words_of_values().items()
        if key.endswith(".kind")
        for old, new in olds.items()
        if old == value
    ]
    return next((word for word in (value.lower(), *words) if word in known), None)


def _reformed(value: object, bases: list[Annotation]) -> str | None:
    """The same value as its field takes it: without quotes, in quotes, without a fraction."""
    if isinstance(value, str):
        if bool in bases and value.lower() in _YES + _NO:
            return "true" if value.lower() in _YES else "false"
        written = value.strip()
        digits = written.replace("_", "").replace(",", "")
        # `2,4` is a list of two numbers, and no 24.
        is_one = "," not in written or THOUSANDS.fullmatch(written) is not None
        if is_one and digits.isdecimal() and (int in bases or float in bases):
            return digits
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer() and int in bases:
        return str(int(value))
    if isinstance(value, int | float) and str in bases:
        return f"'{value}' (in quotes)"
    return None


def default_words(section: type[Section], name: str) -> str:
    """`to take the default, 10` for the end of an advice; empty when the field has none."""
    field = section.model_fields.get(name)
    if field is None or field.is_required():
        return ""
    default: object = field.get_default(call_default_factory=True)
    if default is None or default == ():
        return " to leave it unset"
    if isinstance(default, Section):
        return " to take the defaults"
    is_size = any(parse_bytes in readers(metadata) for _, metadata in parts(field_types(section)[name]))
    default_text = size_words(default) if is_size and isinstance(default, int) else plain_words(default)
    return f" to take the default, {default_text}"


def size_words(size_bytes: int) -> str:
    """Bytes with the largest unit that holds them exactly: `64MiB`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes % UNITS[unit.upper()] == 0:
            return f"{size_bytes // UNITS[unit.upper()]}{unit}"
    return f"{size_bytes}B"


def plain_words(value: object) -> str:
    """A value as YAML writes it, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, tuple):
        items: tuple[object, ...] = value  # pyright: ignore[reportUnknownVariableType]
        return "[" + ", ".join(plain_words(item) for item in items) + "]"
    return str(value)


def sentence(path: Path) -> str:
    """The first sentence under a field; empty when the field has none."""
    section = _section_at(path[:-1])
    if section is None or not path or str(path[-1]) not in section.model_fields:
        return ""
    text = sentences_of(section, str(path[-1]))
    return text.split(". ")[0].rstrip(".") + "." if text else ""


def _section_at(path: Path) -> type[Section] | None:
    annotation = follow(Recipe, path)[1]
    return section_of(annotation) or section_of(item_of(annotation))


def _is_out_of_range(value: object, annotation: Annotation) -> bool:
    bases = [base for base, _ in parts(annotation)]
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return int in bases or float in bases
    return isinstance(value, float) and float in bases


def _shown(node: Node) -> str:
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Items):
        return "a list" if node.items else "an empty list"
    if isinstance(node.value, str):
        return f"'{node.value}'" if len(node.value) <= 60 else f"'{node.value[:57]}...'"
    return plain_words(node.value)


def _kind(value: object) -> str:
    if isinstance(value, str):
        return " is text"
    if isinstance(value, dict | list):
        return " was given"
    return ""
