"""The short form of named evaluation sets, `data.eval: {math: math.jsonl}`, as a list of sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memtrain.recipes.reading.yaml_tree import Entry, Items, Leaf, Mapping, Node
from memtrain.recipes.sections.data import HeldOutSource

NAME = "set"


def with_named_sets(tree: Mapping) -> Mapping:
    """The tree with `data.eval` as a list where it maps names to sources; every value keeps its place."""
    data = tree.node("data")
    held = data.node("eval") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(held, Mapping) or not _maps_names(held):
        return tree
    items = tuple(
        source for name, entry in held.entries.items() for source in _named(entry.node, name, entry)
    )
    named = Entry(data.entries["eval"].place, Items(items, held.place))
    data = replace(data, entries={**data.entries, "eval": named})
    return replace(tree, entries={**tree.entries, "data": Entry(tree.entries["data"].place, data)})


def _maps_names(held: Mapping) -> bool:
    """A mapping with any key of a source is one source, a wrong one perhaps."""
    return bool(held.entries) and not held.entries.keys() & HeldOutSource.model_fields.keys()


def _named(node: Node, name: str, entry: Entry) -> Iterator[Node]:
    name_entry = Entry(entry.place, Leaf(name, entry.place))
    for one in node.items if isinstance(node, Items) else (node,):
        if isinstance(one, Leaf):
            yield Mapping({"source": Entry(one.place, one), NAME: name_entry}, one.place)
        elif isinstance(one, Mapping):
            yield replace(one, entries={NAME: name_entry, **one.entries})
        else:
            yield one
