"""`${...}` in values: other keys of the recipe and environment variables, in OmegaConf's grammar.

`${optim.lr}` is the value of that key (a whole section too), `${.lr}` of a key beside this one, `${..x}` one
level up; `${oc.env:NAME}` and `${oc.env:NAME,default}` are environment variables, read as if their text stood
in the file (OmegaConf would leave them text); `${oc.select:key,default}` is a key that may be absent,
`${oc.decode:text}` the value that a text spells; `\\${` is a plain `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Given
from typing import cast

from memtrain.recipes.reading.yaml_tree import MAX_NODES, Faults, Items, Mapping, Node, count_nodes


def interpolated(tree: Mapping, faults: Faults) -> tuple[Mapping, dict[str, str]]:
    """(the tree with every `${...}` replaced, the environment variables that were read, with their text).

    What cannot be replaced is noted in `faults`.
    """
    if not any("${" in text for text in _texts(tree)):
        return tree, {}
    # OmegaConf takes 0.1 s to import: only for recipes that need it.
    from memtrain.recipes.reading.references import Interpolation

    interpolation = Interpolation(tree, faults)
    result = interpolation.node(tree, ())
    if count_nodes(result) > MAX_NODES:
        faults.add(f"more than {MAX_NODES:,} keys and values after ${{...}}", tree.place, "write them out")
        return tree, {}
    return (result if isinstance(result, Mapping) else tree), interpolation.variables


def literal(value: object) -> object:
    """A value, its lists and mappings included, with every `${` written so that it is read as text."""
    if isinstance(value, Given):
        return {key: literal(one) for key, one in cast(Given[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [literal(one) for one in cast(list[object], value)]
    # Backslashes before it are doubled: two of them are one, and the `${` behind them is live.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _texts(node: Node) -> list[str]:
    if isinstance(node, Mapping):
        return [text for entry in node.entries.values() for text in _texts(entry.node)]
    if isinstance(node, Items):
        return [text for item in node.items for text in _texts(item)]
    return [node.value] if isinstance(node.value, str) else []
