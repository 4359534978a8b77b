"""Texts of a recipe that no file, process or JSON can hold, noted before anything is done with them."""

from __future__ import annotations

from memtrain.recipes.reading.yaml_tree import Faults, Items, Mapping, Node, Path, dotted

NAMES_OF_FILES = ("run_dir", "model", "data", "memory.offload_disk", "rewards.models")
"""Keys, or sections, whose texts name files, folders or models."""

MOST_OF_A_NAME = 255
"""Bytes that a file system takes for one name."""


def check_texts(node: Node, path: Path, faults: Faults) -> None:
    """Note texts that no file, process or JSON can hold, and names that no file system takes."""
    if isinstance(node, Mapping):
        for key, entry in node.entries.items():
            check_texts(entry.node, (*path, key), faults)
    elif isinstance(node, Items):
        for at, item in enumerate(node.items):
            check_texts(item, (*path, at), faults)
    elif isinstance(node.value, str):
        odd = next((one for one in node.value if one == "\0" or "\ud800" <= one <= "\udfff"), None)
        if odd is not None:
            what = (
                "half of a surrogate pair"
                if odd != "\0"
                else "a character that is not allowed in a name or text"
            )
            faults.add(f"{dotted(path)}: holds U+{ord(odd):04X}, {what}", node.place, "remove it")
        elif dotted(path).startswith(NAMES_OF_FILES) and is_too_long(node.value):
            faults.add(
                f"{dotted(path)}: '{node.value[:40]}...' contains a name of more than {MOST_OF_A_NAME} bytes",
                node.place,
                "shorten it: file systems refuse such names",
            )


def is_too_long(text: str) -> bool:
    """Whether a text, taken for a path, has a name that no file system takes."""
    return len(text) > 4095 or any(len(name.encode()) > MOST_OF_A_NAME for name in text.split("/"))
