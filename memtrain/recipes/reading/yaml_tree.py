"""The tree of a YAML file: nodes, paths and faults, with the place of every key and value."""

from __future__ import annotations

from dataclasses import dataclass, field

from memtrain.errors import Fault

MAX_NODES = 20_000
"""Keys and values a recipe may have, aliases counted as often as they are used (no billion laughs)."""

MOST_FAULTS = 50
"""Faults of one recipe that are reported; nobody reads more at once."""
MEND_FIRST = "fix the faults above first"

Scalar = None | bool | int | float | str


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a value: a line of a file, or an override (line 0)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value. `is_empty`: nothing was written after the key (its value is None)."""

    value: Scalar
    place: Place
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's place, and its value."""

    place: Place
    node: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys with their entries, in the order of the file. Never changed once it is built."""

    entries: dict[str, Entry]
    place: Place

    def node(self, key: str) -> Node | None:
        """Value of the key; None when the key is not written."""
        entry = self.entries.get(key)
        return None if entry is None else entry.node


Node = Leaf | Items | Mapping
Path = tuple[str | int, ...]


@dataclass(slots=True)
class Faults:
    """Faults found so far, listed in the order of the lines."""

    found: list[tuple[Place, Fault]] = field(default_factory=list[tuple[Place, Fault]])

    def add(self, what: str, place: Place, fix: str = "") -> None:
        """Note one fault, with the letters that nobody sees as their escapes."""
        self.found.append((place, Fault(visible(what), visible(str(place)), visible(fix))))

    def __bool__(self) -> bool:
        return bool(self.found)

    def in_order(self) -> list[Fault]:
        """The faults, file by file from top to bottom, then the overrides'; each once."""
        files: dict[str, int] = {}
        for place, _ in self.found:
            files.setdefault(place.source, len(files))
        ordered = sorted(
            self.found, key=lambda one: (one[0].line == 0, files[one[0].source], one[0].line, one[0].column)
        )
        in_order_once = list(dict.fromkeys(fault for _, fault in ordered))
        if len(in_order_once) <= MOST_FAULTS:
            return in_order_once
        rest = Fault(
            f"{len(in_order_once) - MOST_FAULTS:,} more faults are not shown",
            in_order_once[MOST_FAULTS].where,
            MEND_FIRST,
        )
        return [*in_order_once[:MOST_FAULTS], rest]


def visible(text: str) -> str:
    """The text with every letter that shows nothing, or steers a terminal, as its escape: `opt\\u200bim`."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text
    )


def dotted(path: Path) -> str:
    """`("data", "train", 0)` as `data.train.0`."""
    return ".".join(str(part) for part in path)


def find(node: Node, path: Path) -> tuple[Place, Node] | None:
    """The place (of the key, or of the list item) and the node at a path; None when it is not written."""
    place = node.place
    for part in path:
        if isinstance(node, Mapping) and str(part) in node.entries:
            entry = node.entries[str(part)]
            place, node = entry.place, entry.node
        elif isinstance(node, Items) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            place = node.place
        elif part == 0 and not isinstance(part, str) and not isinstance(node, Items):
            continue  # a list of one item, written without brackets
        else:
            return None
    return place, node


def plain(node: Node) -> object:
    """The bare value: dict, list or scalar."""
    if isinstance(node, Mapping):
        return {key: plain(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return node.value


def count_nodes(node: Node, limit: int = MAX_NODES) -> int:
    """Number of keys and values below, shared ones counted each time; stops counting above `limit`."""
    count, waiting = 0, [node]
    while waiting and count <= limit:
        node = waiting.pop()
        count += 1
        if isinstance(node, Mapping):
            waiting.extend(entry.node for entry in node.entries.values())
        elif isinstance(node, Items):
            waiting.extend(node.items)
    return count
