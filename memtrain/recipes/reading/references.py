"""`${...}` in values, read by OmegaConf's grammar; imported only where a recipe has such a value.

OmegaConf's parser and visitor take a value apart; which node of the recipe a key is, with its file, line and
column, is looked up here, in our own tree. Its resolvers are not used: `oc.coerce` imports any module that a
value names, and a recipe runs no code.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from omegaconf.errors import GrammarParseError, InterpolationResolutionError
from omegaconf.grammar.gen.OmegaConfGrammarParser import OmegaConfGrammarParser
from omegaconf.grammar_parser import parse
from omegaconf.grammar_visitor import GrammarVisitor

from memtrain.recipes.reading.overrides import path_of
from memtrain.recipes.reading.yaml_reader import read_scalar
from memtrain.recipes.reading.yaml_tree import (
    Entry,
    Faults,
    Items,
    Leaf,
    Mapping,
    Node,
    Path,
    Place,
    Scalar,
    dotted,
    find,
)

MAX_TEXT = 10_000
"""Letters of a value with `${...}`, before and after (values that double each other grow without end)."""

MAX_PARSED = 10_000
"""Letters in `${...}` of other forms than a plain key or variable, in a whole recipe: the parser takes 0.2 ms
for each."""

PLAIN = re.compile(r"\$\{(?:(\.*[A-Za-z_]\w*(?:\.\w+)*)|oc\.env:([A-Za-z_]\w*))\}")
"""A key, or a variable, without defaults and brackets: read here."""

WORDS = ("true", "false", "null", "none", "inf", "nan")
"""Names that OmegaConf reads as values."""

MAX_CHAIN = 50
"""Values that may refer to each other in a row."""

MAX_DEPTH = 20
"""`${...}` inside each other. Taste; the parser recurses."""

FIX = "write ${section.key} or ${oc.env:NAME,default}"


class _Broken(Exception):
    """A value that cannot be replaced: what, and the way out."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Value of one `${...}`."""

    node: Node
    name: str
    """The inside of the `${...}`."""
    is_text: bool = False
    """Whether the value is text of an environment variable, read as YAML where it is a whole value."""

    def whole(self) -> Node:
        """The node, as the whole of a value."""
        if not self.is_text or not isinstance(self.node, Leaf):
            return self.node
        try:
            return replace(self.node, value=read_scalar(str(self.node.value)))
        except ValueError as error:
            raise _Broken(f"{self.node.value} is {error}", "write a smaller number") from error

    def bare(self) -> Scalar:
        """The value, as a part of a key or an argument."""
        if not isinstance(self.node, Leaf):
            raise _Broken(
                f"${{{self.name}}} is a section or a list, and cannot be part of a text", "name a key in it"
            )
        return self.node.value

    def __str__(self) -> str:
        value = self.bare()
        if isinstance(value, bool):
            return "true" if value else "false"
        return "null" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class _Argument:
    """An argument of a resolver."""

    value: object
    spelling: str

    @property
    def is_word(self) -> bool:
        """Written out and without quotes."""
        return not self.spelling.startswith(("'", '"')) and "${" not in self.spelling


class _Visitor(GrammarVisitor):
    """OmegaConf's own reading of a value; `key` gives the value of a key, `resolver` a resolver's value."""

    def __init__(
        self, key: Callable[[str], _Found], resolver: Callable[[str, Sequence[_Argument]], _Found]
    ) -> None:
        def called(name: str, args: Sequence[object], args_str: Sequence[str]) -> _Found:
            return resolver(name, [_Argument(*one) for one in zip(args, args_str, strict=True)])

        super().__init__(None, called, None)
        self._key = key
        self._letters = 0

    def visitInterpolation(self, ctx: Any) -> Any:  # noqa: N802
        """Value of a `${...}`: the node itself as a whole value, else text or a bare value."""
        found = cast(_Found, self.visit(ctx.getChild(0)))  # pyright: ignore[reportUnknownMemberType]
        above = ctx.parentCtx
        if not isinstance(above, OmegaConfGrammarParser.TextContext):
            return found.bare()
        if above.getChildCount() > 1:
            self._letters += len(str(found))
            if self._letters > MAX_TEXT:
                raise _too_long()
        return found

    def visitInterpolationNode(self, ctx: Any) -> Any:  # noqa: N802
        """The node of a key, whose parts may hold `${...}` themselves."""
        return self._key("".join(self._part(one) for one in list(ctx.getChildren())[1:-1]))

    def _part(self, ctx: Any) -> str:
        is_key = isinstance(ctx, OmegaConfGrammarParser.ConfigKeyContext)
        return self.visitConfigKey(ctx) if is_key else ctx.getText()


class Interpolation:
    """A pass over a tree, with the resolved references and the open ones (cycles)."""

    def __init__(self, tree: Mapping, faults: Faults) -> None:
        self.tree, self.faults = tree, faults
        self.variables: dict[str, str] = {}
        """Environment variables that were read, with their text."""
        self.known: dict[Path, Node] = {}
        self.open: list[Path] = []
        self.letters_parsed = 0

    def node(self, node: Node, path: Path) -> Node:
        """A node with every `${...}` in it replaced; a reference that cannot be replaced is noted and
        stays."""
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
            return self._leaf(node, path)
        except _Broken as broken:
            what, fix = broken.args
            self.faults.add(f"{dotted(path)}: {what}", node.place, fix)
            return node

    def _leaf(self, leaf: Leaf, path: Path) -> Node:
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
            self.known[path] = self._evaluated(str(leaf.value), leaf, path)
        finally:
            self.open.pop()
        return self.known[path]

    def _evaluated(self, text: str, leaf: Leaf, path: Path, rule: str = "configValue") -> Node:
        """The node that a text stands for: of another key, or a value at the leaf's place.

        Raises: _Broken.
        """
        if len(text) > MAX_TEXT:
            raise _too_long()
        if rule == "configValue" and (plain := self._plain(text, leaf, path)) is not None:
            return plain
        self.letters_parsed += text.rfind("}") + 1 - max(0, text.find("${"))
        if self.letters_parsed > MAX_PARSED:
            raise _Broken(
                f"more than {MAX_PARSED:,} letters of the recipe are in ${{...}} with defaults or brackets",
                "write some of these values out, or as plain ${section.key}",
            )
        if _depth(text) > MAX_DEPTH:
            raise _Broken(f"more than {MAX_DEPTH} ${{...}} inside each other", "write some of them out")
        visitor = _Visitor(
            lambda name: self._of_key(name, leaf, path),
            lambda name, arguments: self._resolved(name, arguments, leaf, path),
        )
        try:
            with warnings.catch_warnings():
                # An argument that is left out (`${oc.env:NAME,}`) is empty text, as ever.
                warnings.simplefilter("ignore", UserWarning)
                tree: Any = parse(text, rule, _MODES[rule])
                made = cast(object, visitor.visit(tree))  # pyright: ignore[reportUnknownMemberType]
        except GrammarParseError as error:
            raise _unreadable(text) from error
        except InterpolationResolutionError as error:
            raise _Broken(str(error).splitlines()[0], FIX) from error
        return made.whole() if isinstance(made, _Found) else _as_node(made, leaf.place)

    def _plain(self, text: str, leaf: Leaf, path: Path) -> Node | None:
        """The node of a text whose references are all plain ones; None for any other text.

        Raises: _Broken.
        """
        if "\\" in text or text.count("${") != len(list(PLAIN.finditer(text))):
            return None
        made: list[str] = []
        end = letters = 0
        for found in PLAIN.finditer(text):
            key, variable = found.groups()
            if (key or variable).lower() in WORDS:
                return None
            if variable is not None:
                one = self._resolved("oc.env", [_Argument(variable, variable)], leaf, path)
            else:
                one = self._of_key(key, leaf, path)
            if found[0] == text:
                return one.whole()
            made += [text[end : found.start()], str(one)]
            letters += len(made[-1])
            if letters > MAX_TEXT:
                raise _too_long()
            end = found.end()
        return _as_node("".join([*made, text[end:]]), leaf.place)

    def _of_key(self, name: str, leaf: Leaf, path: Path) -> _Found:
        """The value of a key, at the leaf's place where it is a single value."""
        target = _target(name, path)
        found = self._look_up(target)
        if found is None:
            raise _Broken(
                f"${{{name}}}: the recipe does not set {dotted(target)}",
                "set it, or write the value here",
            )
        node, is_done = found
        if isinstance(node, Leaf):
            value = node if is_done else self._node_or_broken(node, target)
            return _Found(replace(value, place=leaf.place) if isinstance(value, Leaf) else value, name)
        if path[: len(target)] == target:
            raise _Broken(f"${{{name}}} is the section that contains it", "name one key")
        return _Found(node if is_done else self._section(node, target), name)

    def _node_or_broken(self, leaf: Leaf, path: Path) -> Node:
        return self._leaf(leaf, path) if isinstance(leaf.value, str) and "${" in leaf.value else leaf

    def _look_up(self, target: Path) -> tuple[Node, bool] | None:
        """The node at a path, and whether it lies in a value that was replaced; None: the path is not
        written."""
        node: Node = self.tree
        is_done = False
        for at, part in enumerate(target):
            if isinstance(node, Leaf) and not is_done and at:
                node, is_done = self._node_or_broken(node, target[:at]), True
            step = find(node, (part,))
            if step is None:
                return None
            node = step[1]
        return node, is_done

    def _section(self, node: Node, target: Path) -> Node:
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

    def _resolved(self, name: str, arguments: Sequence[_Argument], leaf: Leaf, path: Path) -> _Found:
        """Value of `${name:arguments}`, under OmegaConf's names."""
        spelt = f"{name}:{','.join(one.spelling for one in arguments)}"
        if name not in _RESOLVERS:
            known = ", ".join(_RESOLVERS.values())
            raise _Broken(f"${{{name}:...}} is not known", f"write one of {known}")
        if len(arguments) not in _COUNTS[name]:
            raise _Broken(
                f"${{{spelt[:60]}}} has {len(arguments) or 'no'} arguments", f"write {_RESOLVERS[name]}"
            )
        subject, default = arguments[0], arguments[1] if len(arguments) == 2 else None
        if name == "oc.env":
            found = _variable(str(subject.value), default, leaf.place, spelt)
            if str(subject.value) in os.environ:
                self.variables[str(subject.value)] = os.environ[str(subject.value)]
            return found
        if name == "oc.decode":
            if not isinstance(subject.value, str):
                return _Found(_as_node(subject.value, leaf.place), spelt)
            return _Found(self._evaluated(subject.value, leaf, path, "singleElement"), spelt)
        key = str(subject.value)
        if self._look_up(_target(key, path)) is not None:
            return self._of_key(key, leaf, path)
        return _Found(_as_node(arguments[1].value, leaf.place), spelt)


_MODES = {"configValue": "DEFAULT_MODE", "singleElement": "VALUE_MODE"}
"""The mode in which OmegaConf's lexer begins, by the rule of its grammar."""

_RESOLVERS = {
    "oc.env": "${oc.env:NAME,default}",
    "oc.select": "${oc.select:section.key,default}",
    "oc.decode": "${oc.decode:text}",
}
"""The resolvers that a recipe may use, and how they are written."""

_COUNTS = {"oc.env": (1, 2), "oc.select": (2,), "oc.decode": (1,)}
"""Counts of arguments that the resolvers take."""


def _variable(name: str, default: _Argument | None, place: Place, spelt: str) -> _Found:
    """The text of an environment variable, or the default."""
    text = os.environ.get(name) if name and "\0" not in name and "=" not in name else None
    if text is not None:
        return _Found(Leaf(text, place), spelt, is_text=True)
    if default is None:
        raise _Broken(
            f"the environment variable {name} is not set", f"set it, or write ${{oc.env:{name},default}}"
        )
    if default.is_word:
        word = default.value if isinstance(default.value, str) else default.spelling
        return _Found(Leaf(str(word), place), spelt, is_text=True)
    return _Found(_as_node(default.value, place), spelt)


def _as_node(value: object, place: Place) -> Node:
    """A bare value of OmegaConf's grammar as a node."""
    if isinstance(value, dict):
        entries = cast(dict[object, object], value)
        return Mapping({str(key): Entry(place, _as_node(one, place)) for key, one in entries.items()}, place)
    if isinstance(value, list):
        return Items(tuple(_as_node(one, place) for one in cast(list[object], value)), place)
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise _too_long()
        return Leaf(str(value), place)
    return Leaf(cast(Scalar, value), place)


def _target(name: str, path: Path) -> Path:
    """The path that a key means, at `path` where it begins with dots."""
    inside = name.strip()
    dots = len(inside) - len(inside.lstrip("."))
    key = inside[dots:]
    if not re.fullmatch(r"([\w-]+|\[[\w-]+\])(\.[\w-]+|\[[\w-]+\])*", key) or dots > len(path):
        raise _Broken(f"${{{inside[:60]}}} is neither a key nor a variable", FIX)
    own = path_of(key.removeprefix("["))
    return (*path[: len(path) - dots], *own) if dots else own


def _depth(text: str) -> int:
    """Largest number of `${` that are open at once."""
    depth = most = 0
    for one in re.findall(r"\$\{|\}", text):
        depth = depth + 1 if one == "${" else max(0, depth - 1)
        most = max(most, depth)
    return most


def _too_long() -> _Broken:
    return _Broken(f"becomes longer than {MAX_TEXT:,} letters", "write a shorter value")


def _unreadable(text: str) -> _Broken:
    """The fault of a text that is not in the grammar."""
    if text.count("${") > text.count("}"):
        return _Broken(f"${{ is not closed in '{text[:60]}'", "close it with }, or write \\${ for a plain ${")
    return _Broken(f"{text[:60]} is neither a key nor a variable", FIX)
