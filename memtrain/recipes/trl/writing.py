"""A translation as a recipe in YAML: sections in their order, defaults marked as TRL's."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, cast

import yaml

from memtrain.errors import printable
from memtrain.recipes.reading.field_types import field_types, section_of
from memtrain.recipes.reading.interpolate import literal
from memtrain.recipes.reading.shipped import configs_dir
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.reference.json_schema import SCHEMA_FILE
from memtrain.recipes.sections.base import Section
from memtrain.recipes.trl.translation import Translation


def default_of(key: str) -> object:
    """memtrain's default of a dotted key; None where it has none."""
    section: Any = Recipe
    *path, last = key.split(".")
    for part in path:
        section = section_of(field_types(section)[part])
    return section.model_fields[last].default


def recipe_text(made: Translation, name: str, origin: str = "", command: str = "import") -> str:
    """The YAML of a recipe; a value that is memtrain's own default is left out. `origin`: `TRL's sft`.
    `command`: the command that writes it."""
    top: dict[str, Any] = {}
    keys = made.recipe_keys
    own = {key for key in keys if key == "method" or not _is_ours(keys[key][0], default_of(key))}
    # A section below another is there or not: with nothing but defaults it is there too.
    asked = {key.rpartition(".")[0] for key in keys if key.count(".") > 1 and keys[key][0] is not None}
    asked -= {key.rpartition(".")[0] for key in own}
    for key, (value, comment) in keys.items():
        *path, last = key.split(".")
        if key not in own and ".".join(path) not in asked:
            continue
        node = top
        for part in path:
            node = node.setdefault(part, {})
        node[last] = (value, comment)
    origin = origin or f"TRL's {made.method}"
    shown = printable(name, is_line=True)
    lines = [f"# From {shown}, a configuration of {origin}; written by `memtrain {command}`."]
    for one in made.lost:
        lines += _comment(f"not carried over: {one.key}: {shown_value(one.value)} ({one.why})")
    lines += [f"# yaml-language-server: $schema={(configs_dir() / SCHEMA_FILE).as_posix()}", ""]
    order = [*Recipe.model_fields]
    for section in sorted(top, key=order.index):
        lines += _lines({section: top[section]}, 0, Recipe)
        if isinstance(top[section], dict):
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _is_ours(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


def _lines(node: Mapping[str, Any], depth: int, section: type[Section]) -> list[str]:
    lines: list[str] = []
    for key in sorted(node, key=[*section.model_fields].index):
        value, before = node[key], "  " * depth + f"{key}:"
        if isinstance(value, dict):
            inner = section_of(field_types(section)[key])
            assert inner is not None, "Only sections are written over several lines."
            lines += [before, *_lines(cast(Mapping[str, Any], value), depth + 1, inner)]
        else:
            bare, comment = cast(tuple[object, str], value)
            # Text of another's file stays text: neither a reference nor a line of its own.
            note = f"  # {printable(comment, is_line=True)}" if comment else ""
            lines.append(f"{before} {inline(literal(bare))}{note}")
    return lines


class _Dumper(yaml.SafeDumper):
    """Writes texts on one line, also words of a kind of their own, such as values that a script computes."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style)  # pyright: ignore[reportUnknownMemberType]


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(str, _text)


def inline(value: object) -> str:
    """A value on one line of YAML."""
    text = yaml.dump(
        value, None, _Dumper, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True
    )
    return text.strip().removesuffix("...").strip()


MOST_SHOWN = 160
"""Letters of a value that is told. Taste: a line or two."""


def shown_value(value: object) -> str:
    """A value on one line, cut where it is a whole template or a list of datasets."""
    text = " ".join(inline(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN].rstrip()} ..."


def _comment(text: str) -> list[str]:
    line = printable(text, is_line=True)
    return [f"# {line}" for line in textwrap.wrap(line, 100, subsequent_indent="  ", break_long_words=False)]
