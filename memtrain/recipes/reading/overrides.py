"""Words of the command line (`optim.lr=1e-4`) and files that extend others: trees laid over trees."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from memtrain.recipes.reading.field_types import follow, parts
from memtrain.recipes.reading.yaml_reader import read_scalar, read_yaml
from memtrain.recipes.reading.yaml_tree import Entry, Faults, Items, Leaf, Mapping, Node, Path, Place, dotted
from memtrain.recipes.recipe import Recipe

_GIVEN_IN: ContextVar[str] = ContextVar("_GIVEN_IN", default="the command line")
_KEY = re.compile(r"[^\s.\[\]=]+(?:\.[^\s.\[\]=]+|\[[0-9]+\])*")


_FULL_FORMS: dict[Path, str] = {
    ("data", "train"): "source",
    ("data", "eval"): "source",
    ("rewards", "functions"): "function",
}
"""Keys whose value may be a text alone, and the key that this text has in the long form."""


@contextmanager
def words_given_in(place: str) -> Generator[None]:
    """Inside, the places of overrides read `from {place}`, in decisions and errors."""
    before = _GIVEN_IN.set(place)
    try:
        yield
    finally:
        _GIVEN_IN.reset(before)


def _full_form(path: Path) -> str | None:
    return _FULL_FORMS.get(tuple(part for part in path if not isinstance(part, int)))


def merged(below: Node, above: Node) -> Node:
    """`above` laid over `below`: mappings key by key, everything else replaced; every place is kept."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    entries = dict(below.entries)
    for key, entry in above.entries.items():
        known = entries.get(key)
        entries[key] = entry if known is None else Entry(entry.place, merged(known.node, entry.node))
    return Mapping(entries, above.place)


def apply_overrides(tree: Mapping, overrides: Sequence[str], faults: Faults) -> Mapping:
    """The tree with `section.key=value` words laid over it, in their order, the last one winning.

    A value is read as YAML, as if it stood in the file, but a number is text where only text is taken: a
    shell leaves no quotes around it (`run_dir=2026`). `data.train.0.weight=2` (or `data.train[0].weight`)
    reaches into a list. Words that cannot be taken are noted in `faults`.
    """
    for word in overrides:
        place = Place(f"from {_GIVEN_IN.get()}: `{word}`")
        key, equals, text = word.partition("=")
        if not equals or not _KEY.fullmatch(key) or key.startswith(("+", "~", "-")):
            faults.add(
                f"'{word}' is not an override", place, "write section.key=value, such as optim.lr=1e-4"
            )
            continue
        known = len(faults.found)
        if _is_text(path_of(key), text):
            value = Leaf(text.strip(), place)
        else:
            value = read_yaml(text, str(place), faults, fixed=place)
        if len(faults.found) > known:
            continue
        value = value or Leaf(None, place, is_empty=True)
        node = _with(tree, path_of(key), 0, value, place, faults)
        if isinstance(node, Mapping):
            tree = node
    return tree


def path_of(key: str) -> Path:
    """`data.train[0].weight` and `data.train.0.weight` as `("data", "train", 0, "weight")`."""
    words = key.replace("[", ".").replace("]", "").split(".")
    return tuple(int(word) if word.isdecimal() else word for word in words)


def _is_text(path: Path, text: str) -> bool:
    """Whether a word that looks like a number is given for a key that takes text and no number."""
    try:
        is_number = type(read_scalar(text.strip())) in (int, float)
    except ValueError:
        is_number = True
    reached, annotation = follow(Recipe, path)
    bases = {base for base, _ in parts(annotation)}
    return is_number and reached == path and str in bases and bases <= {str, type(None)}


def _with(node: Node | None, path: Path, at: int, value: Node, place: Place, faults: Faults) -> Node:
    """`node` with `value` at `path[at:]`; mappings on the way are made where there are none."""
    if at == len(path):
        return value if node is None else merged(node, value)
    part = path[at]
    if node is None or (isinstance(node, Leaf) and node.value is None):
        node = Mapping({}, place)
    if isinstance(node, Mapping):
        key = str(part)
        inner = _with(node.node(key), path, at + 1, value, place, faults)
        known = node.entries.get(key)
        key_place = place if at + 1 == len(path) or known is None else known.place
        return Mapping(node.entries | {key: Entry(key_place, inner)}, node.place)
    above = dotted(path[:at])
    if isinstance(node, Leaf) and isinstance(node.value, str) and (full := _full_form(path[:at])):
        # A source that is written as its path alone gets a second key.
        mapping = Mapping({full: Entry(node.place, node)}, node.place)
        return _with(mapping, path, at, value, place, faults)
    if isinstance(node, Leaf):
        faults.add(f"{above} is a single value and has no '{part}'", place, f"write {above}=... instead")
        return node
    if not isinstance(part, int) or part >= len(node.items):
        faults.add(
            f"{above} is a list of {len(node.items)}, it has no item '{part}'",
            place,
            f"count from 0: {above}.0 is the first",
        )
        return node
    inner = _with(node.items[part], path, at + 1, value, place, faults)
    return Items((*node.items[:part], inner, *node.items[part + 1 :]), node.place)
