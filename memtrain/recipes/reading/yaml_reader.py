"""YAML text -> a tree that knows the line of every key and value; safe, bounded, YAML 1.2 scalars."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import yaml

from memtrain.recipes.reading.yaml_tree import (
    MAX_NODES,
    Entry,
    Faults,
    Items,
    Leaf,
    Mapping,
    Node,
    Place,
    Scalar,
)

MAX_DEPTH = 24
"""Levels of nesting a recipe may have. Taste: the deepest shipped one has 4."""

_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Scalar] = {
    "": None,
    "~": None,
    **dict.fromkeys(("null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def read_scalar(text: str) -> Scalar:
    """The value of an unquoted word: YAML 1.2 core schema, so `1e-5` is a number and `on`, `yes` are text.

    Raises: ValueError when the number cannot be held (more than 64 bits, or not finite).
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        if len(text) > 40:
            raise ValueError("a number of more than 64 bits")
        number = int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        if abs(number) >= 2**63:
            raise ValueError("a number of more than 64 bits")
        return number
    if re.fullmatch(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", text):
        raise ValueError("not a finite number")
    if _FLOAT.fullmatch(text):
        value = float(text)
        if not math.isfinite(value):
            raise ValueError("not a finite number")
        return value
    return text


def read_yaml(text: str, source: str, faults: Faults, fixed: Place | None = None) -> Node | None:
    """The tree of one YAML document; None when it cannot be read, or holds nothing.

    Every place is `fixed` when given (an override), else the line in `source`. Tags, merge keys, doubled
    keys and whatever else is not taken are noted in `faults`; a syntax error ends the reading.
    """
    reader = _Reader(source, faults, fixed)
    try:
        events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        return reader.document(events)  # pyright: ignore[reportUnknownArgumentType]
    except yaml.MarkedYAMLError as error:
        place = fixed or Place(source, 1, 1)
        if fixed is None and error.problem_mark is not None:
            place = reader.place(error.problem_mark)
        problem = error.problem or error.context or "not YAML"
        what, fix = _in_words(problem)
        faults.add(what, place, fix)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        faults.add(
            f"the character U+{code:04X} is not allowed in YAML",
            fixed or Place(source, line, column),
            "remove it",
        )
    except _TooMuch as error:
        faults.add(str(error), error.place, "a recipe never needs so much; write the values out")
    except _Unreadable as error:
        faults.add(str(error), error.place, "put text that starts with * in quotes, or write the value out")
    return None


_PROBLEMS: tuple[tuple[str, str, str], ...] = (
    (r"'\\t'", "a tab is here", "indent with spaces; YAML does not allow tabs"),
    (r"character '(.)' that cannot start", "text cannot start with {0}", "put the text in quotes"),
    (
        "mapping values are not allowed",
        "a colon is where no key can be",
        "put text that holds ': ' in quotes, or check the indentation",
    ),
    (
        "could not find expected ':'",
        "the line above has no colon, or is not indented as its neighbors",
        "write key: value",
    ),
    (r"expected ',' or '([\]}])'", "a bracket is open here, or a comma is missing", "close it with {0}"),
    (
        "expected <block end>",
        "this line is not indented as its neighbors",
        "give keys of one section one indentation",
    ),
    (
        "expected '<document start>'",
        "this line does not continue the lines above",
        "give keys of one section one indentation, and each key its colon",
    ),
    ("unexpected end of stream", "a quote is open at the end of the file", "close it"),
    ("expected a single document", "a second document starts here", "keep one: remove the line ---"),
    ("expected alphabetic or numeric", "one of & * ! % is without a name", "put the text in quotes"),
)
"""Problems in PyYAML's words, their meaning, and the way out."""


def _in_words(problem: str) -> tuple[str, str]:
    for pattern, what, fix in _PROBLEMS:
        if match := re.search(pattern, problem):
            return f"cannot be read as YAML: {what.format(*match.groups())}", fix.format(*match.groups())
    return (
        f"cannot be read as YAML: {problem}",
        "check the indentation, colons, brackets and quotes near this line",
    )


class _Unreadable(Exception):
    def __init__(self, what: str, place: Place) -> None:
        super().__init__(what)
        self.place = place


class _TooMuch(_Unreadable):
    pass


class _Reader:
    """Builds the tree from yaml's events, so that nothing is ever constructed from a tag."""

    def __init__(self, source: str, faults: Faults, fixed: Place | None) -> None:
        self.source, self.faults, self.fixed = source, faults, fixed
        self.anchors: dict[str, tuple[Node, int] | None] = {}
        self.nodes = 0

    def place(self, mark: yaml.Mark) -> Place:
        return self.fixed or Place(self.source, mark.line + 1, mark.column + 1)

    def document(self, events: Iterator[yaml.Event]) -> Node | None:
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise yaml.MarkedYAMLError(
                    problem="expected a single document", problem_mark=event.start_mark
                )
            if isinstance(event, yaml.NodeEvent):
                root = self.node(event, events, 1)
        return root

    def node(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Node:
        place, before = self.place(event.start_mark), self.nodes
        self.nodes += 1
        if depth > MAX_DEPTH:
            raise _TooMuch(f"more than {MAX_DEPTH} levels of nesting", place)
        if isinstance(event, yaml.AliasEvent):
            node = self.alias(event.anchor, place)
        else:
            anchor: str | None = getattr(event, "anchor", None)
            if anchor is not None:
                self.anchors[anchor] = None
            node = self.fresh(event, events, depth, place)
            if anchor is not None:
                self.anchors[anchor] = (node, self.nodes - before)
        if self.nodes > MAX_NODES:
            raise _TooMuch(f"more than {MAX_NODES:,} keys and values", place)
        return node

    def alias(self, anchor: str, place: Place) -> Node:
        if anchor not in self.anchors:
            raise _Unreadable(f"*{anchor} has no &{anchor} above it", place)
        known = self.anchors[anchor]
        if known is None:
            raise _Unreadable(f"*{anchor} refers to a value that contains it", place)
        self.nodes += known[1]
        return known[0]

    def fresh(self, event: yaml.Event, events: Iterator[yaml.Event], depth: int, place: Place) -> Node:
        tag: str | None = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            self.faults.add(
                f"the tag {shown} is not supported", place, "write the plain value without the tag"
            )
        if isinstance(event, yaml.ScalarEvent):
            return self.leaf(event, place)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(event := next(events), yaml.SequenceEndEvent):
                items.append(self.node(event, events, depth + 1))
            return Items(tuple(items), place)
        return self.mapping(events, depth, place)

    def leaf(self, event: yaml.ScalarEvent, place: Place) -> Leaf:
        if event.style is not None or event.tag is not None:
            return Leaf(event.value, place)
        try:
            return Leaf(read_scalar(event.value), place, is_empty=event.value == "")
        except ValueError as error:
            self.faults.add(f"{_shortened(event.value)} is {error}", place, "write a smaller number")
            return Leaf(0, place)

    def mapping(self, events: Iterator[yaml.Event], depth: int, place: Place) -> Mapping:
        entries: dict[str, Entry] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key_place = self.place(event.start_mark)
            if not isinstance(event, yaml.ScalarEvent):
                self.node(event, events, depth + 1)
                self.node(next(events), events, depth + 1)
                self.faults.add("a key is one word, not a list, a mapping or an alias", key_place)
                continue
            key: str = event.value
            node = self.node(next(events), events, depth + 1)
            if key == "<<" and event.style is None:
                self.faults.add("merge keys (<<) are not supported", key_place, "use `extends: other.yaml`")
            elif key == "":
                self.faults.add("a key is missing before the colon", key_place, "write the key")
            elif key in entries:
                first = entries[key].place
                self.faults.add(f"{key}: written twice, first at {first}", key_place, "keep one of the two")
            else:
                entries[key] = Entry(key_place, node)
        return Mapping(entries, place)


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
