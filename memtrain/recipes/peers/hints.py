"""What a key or a value of another trainer is called here, for whoever writes it into a recipe."""

from __future__ import annotations

from functools import cache

from memtrain.recipes.peers.table import Row, table, tables, yaml_word

_DOTTED = ("unsloth", "verl")
"""Tables whose keys stand below others: people write the last part."""


@cache
def hints() -> dict[str, str]:
    """Advice by word: our key between backticks, or why it is to be removed (`remove it: ...`)."""
    found: dict[str, str] = {}
    for one in tables():
        for key, row in one.rows.items():
            is_leaf = one.name in _DOTTED
            word = key.rpartition(".")[2] if is_leaf else key
            # A word that is our own too is found in its section.
            is_ours = row.to.rpartition(".")[2] == key or row.trl == key
            advice = "" if is_ours and word not in found else _advice(row)
            if advice and "*" not in key:
                found.setdefault(word, advice)
    return found


def _advice(row: Row) -> str:
    if row.words:
        return row.words
    if row.to:
        return "" if "{" in row.to else f"`{row.to}`"
    if row.trl:
        return _advice(table("trl").rows[row.trl])
    why = row.done or row.lost
    return f"remove it: {why}" if why else ""


@cache
def words_of_values() -> dict[str, dict[str, str]]:
    """Our words for other trainers' values, by the key of the recipe that holds them."""
    found = {key: dict(words) for key, words in table("others").values.items()}
    for row in table("trl").rows.values():
        for old, new in row.values.items():
            if isinstance(new, str) and row.to and "{" not in row.to and new != "null":
                found.setdefault(row.to, {}).setdefault(old, new)
    return found


def renamed_value(key: str, value: object) -> str | None:
    """Our word for another tool's value of a key; None when there is none."""
    return words_of_values().get(key, {}).get(yaml_word(value))
