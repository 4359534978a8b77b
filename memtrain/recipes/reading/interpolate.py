"""`${...}` in values: other keys of the recipe and environment variables, in OmegaConf's spelling.

`${optim.lr}` is the value of that key (a whole section too), `${.lr}` of a key beside this one, `${..x}` one
level up; `${oc.env:NAME}` and `${oc.env:NAME,default}` are environment variables, read as if their text stood
in the file (OmegaConf would leave them text); `\\${` is a plain `${`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from memtrain.recipes.reading.overrides import path_of
from memtrain.recipes.reading.yaml_reader import read_scalar
from memtrain.recipes.reading.yaml_tree import (
    MAX_NODES,
    Entry,
    Faults,
    Items,
    Leaf,
    Mapping,
    Node,
    Path,
    Scalar,
    count_nodes,
    dotted,
    find,
)

MAX_TEXT = 10_000
"""Letters that one interpolated value may come to (values that double each other grow without end)."""

MAX_CHAIN = 50
"""Values that may refer to each other in a row."""


def interpolated(tree: Mapping, faults: Faults) -> Mapping:
    """The tree with every `${...}` replaced; what cannot be replaced is noted in `faults`."""
    if not any("${" in text for text in _texts(tree)):
        return tree
    result = _Interpolation(tree, faults).node(tree, ())
    if count_nodes(result) > MAX_NODES:
        faults.add(f"more than {MAX_NODES:,} keys and values after ${{...}}", tree.place, "write them out")
        return tree
    return result if isinstance(result, Mapping) else tree


def _texts(node: Node) -> list[str]:
    if isinstance(node, Mapping):
        return [text for entry in node.entries.values() for text in _texts(entry.node)]
    if isinstance(node, Items):
        return [text for item in node.items for text in _texts(item)]
    return [node.value] if isinstance(node.value, str) else []


class _Broken(Exception):
    """A value that cannot be replaced: what, and the way out."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of text, or the inside of one `${...}`."""

    text: str
    is_reference: bool


def split_text(text: str) -> list[_Part]:
    """The stretches of a value, in order.

    Raises: _Broken when a `${` is not closed.
    """
    parts: list[_Part] = []
    literal, at = "", 0
    while at < len(text):
        if text.startswith("\\${", at):
            literal, at = literal + "${", at + 3
        elif text.startswith("${", at):
            end = _closing(text, at)
            parts += [_Part(literal, False)] if literal else []
            parts.append(_Part(text[at + 2 : end], True))
            literal, at = "", end + 1
        else:
            literal, at = literal + text[at], at + 1
    return [*parts, _Part(literal, False)] if literal or not parts else parts


def _closing(text: str, start: int) -> int:
    depth, at = 0, start
    while at < len(text):
        if text.startswith("${", at):
            depth, at = depth + 1, at + 2
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return at
            at += 1
        else:
            at += 1
    raise _Broken(f"${{ is not closed in '{text[:60]}'", "close it with }, or write \\${ for a plain ${")


class _Interpolation:
    """One pass over a tree; holds what is known already and what is being worked out (cycles)."""

    def __init__(self, tree: Mapping, faults: Faults) -> None:
        self.tree, self.faults = tree, faults
        self.known: dict[Path, Node] = {}
        self.open: list[Path] = []

    def node(self, node: Node, path: Path) -> Node:
        if isinstance(node, Mapping):
            return Mapping(
                {k: Entry(e.place, self.node(e.node, (*path, k))) for k, e in node.entries.items()},
                node.place,
            )
        if isinstance(node, Items):
            return Items(
                tuple(self.node(item, (*path, at)) for at, item in enumerate(node.items)), node.place
            )
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        try:
            return self.leaf(node, path)
        except _Broken as broken:
            what, fix = broken.args
            self.faults.add(f"{dotted(path)}: {what}", node.place, fix)
            return node

    def leaf(self, leaf: Leaf, path: Path) -> Node:
        """The value of a leaf that holds `${...}`.

        Raises: _Broken.
        """
        if path in self.known:
            return self.known[path]
        if path in self.open:
            chain = " -> ".join(dotted(one) for one in [*self.open[self.open.index(path) :], path])
            raise _Broken(f"refers to itself: {chain}", "write one of these values out")
        if len(self.open) >= MAX_CHAIN:
            raise _Broken(
                f"more than {MAX_CHAIN} values refer to each other in a row", "write some of them out"
            )
        self.open.append(path)
        try:
            self.known[path] = self.text(str(leaf.value), leaf, path)
        finally:
            self.open.pop()
        return self.known[path]

    def text(self, text: str, leaf: Leaf, path: Path) -> Node:
        parts = split_text(text)
        if len(parts) == 1 and parts[0].is_reference:
            return self.reference(parts[0].text, leaf, path, is_whole=True)
        words: list[str] = []
        for part in parts:
            node = (
                self.reference(part.text, leaf, path, is_whole=False)
                if part.is_reference
                else Leaf(part.text, leaf.place)
            )
            if not isinstance(node, Leaf):
                raise _Broken(
                    f"${{{part.text}}} is a section or a list, it cannot stand inside text",
                    "name a key in it",
                )
            words.append(_as_text(node.value))
            if sum(map(len, words)) > MAX_TEXT:
                raise _Broken(f"comes to more than {MAX_TEXT:,} letters", "write a shorter value")
        return replace(leaf, value="".join(words))

    def reference(self, inside: str, leaf: Leaf, path: Path, *, is_whole: bool) -> Node:
        if "${" in inside:
            node = self.text(inside, leaf, path)
            inside = _as_text(node.value) if isinstance(node, Leaf) else ""
        inside = inside.strip()
        if re.match(r"[\w.]+:", inside):
            return replace(leaf, value=_resolved(inside, is_whole=is_whole))
        target = _target(inside, path)
        node, is_done = self.look_up(target, inside)
        if isinstance(node, Leaf):
            value = node if is_done else self.node_or_broken(node, target)
            return replace(value, place=leaf.place) if isinstance(value, Leaf) else value
        if path[: len(target)] == target:
            raise _Broken(f"${{{inside}}} is the section it stands in", "name one key")
        return node if is_done else self.section(node, target)

    def node_or_broken(self, leaf: Leaf, path: Path) -> Node:
        return self.leaf(leaf, path) if isinstance(leaf.value, str) and "${" in leaf.value else leaf

    def look_up(self, target: Path, inside: str) -> tuple[Node, bool]:
        """The node at a path, and whether it lies in a value that has been replaced already.

        Raises: _Broken when it is not written.
        """
        node: Node = self.tree
        is_done = False
        for at, part in enumerate(target):
            if isinstance(node, Leaf) and not is_done and at:
                node, is_done = self.node_or_broken(node, target[:at]), True
            step = find(node, (part,))
            if step is None:
                raise _Broken(
                    f"${{{inside}}}: the recipe does not write {dotted(target)}",
                    "write it, or give the value here",
                )
            node = step[1]
        return node, is_done

    def section(self, node: Node, target: Path) -> Node:
        if target in self.known:
            return self.known[target]
        if target in self.open:
            raise _Broken(f"{dotted(target)} refers to itself", "write one of these values out")
        self.open.append(target)
        try:
            self.known[target] = self.node(node, target)
        finally:
            self.open.pop()
        return self.known[target]


def _as_text(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def _target(inside: str, path: Path) -> Path:
    dots = len(inside) - len(inside.lstrip("."))
    name = inside[dots:]
    if not re.fullmatch(r"[\w-]+(\.[\w-]+|\[[0-9]+\])*", name) or dots > len(path):
        raise _Broken(
            f"${{{inside[:60]}}} is no key and no variable", "write ${section.key} or ${oc.env:NAME,default}"
        )
    return (*path[: len(path) - dots], *path_of(name)) if dots else path_of(name)


def _resolved(inside: str, *, is_whole: bool) -> Scalar:
    """The value of `oc.env:NAME` or `oc.env:NAME,default`; its bare text where it stands inside text."""
    resolver, _, arguments = inside.partition(":")
    if resolver != "oc.env":
        raise _Broken(f"${{{resolver}:...}} is not known", "the only one is ${oc.env:NAME,default}")
    name, comma, default = arguments.partition(",")
    name, default = name.strip(), default.strip()
    text = os.environ.get(name) if "\0" not in name else None
    if text is None:
        if not comma:
            raise _Broken(
                f"the environment variable {name} is not set",
                f"set it, or write ${{oc.env:{name},default}}",
            )
        if len(default) > 1 and default[0] == default[-1] and default[0] in "'\"":
            return default[1:-1]
        text = default
    if not is_whole:
        return text
    try:
        return read_scalar(text)
    except ValueError as error:
        raise _Broken(f"{text} is {error}", "write a number that can be held") from error
