"""An unknown key -> the key that was meant: another tool's spelling, another section's, or a misspelling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from memtrain.recipes.peers.hints import hints
from memtrain.recipes.reading.field_types import every_key
from memtrain.recipes.reading.yaml_tree import Path, dotted
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.base import Section
from memtrain.recipes.sections.data import Columns


@dataclass(frozen=True, slots=True)
class Unknown:
    """Message about an unknown key. `meant`: dotted keys that its advice names."""

    what: str
    fix: str
    meant: tuple[str, ...]


def unknown_key(
    key: str, section: type[Section], path: Path, entry: object = None, below: Sequence[str] = ()
) -> Unknown:
    """Message about a key that `section`, at `path`, does not have; `entry`: its value; `below`: its keys."""
    shown, legal = dotted((*path, key)), list(section.model_fields)
    if section is Columns and entry in legal:
        fix = f"the key is memtrain's name, and your column's stands after it: `{entry}: {key}`"
        return Unknown(f"{shown}: unknown key", fix, ())
    if key.isdecimal() and path and below and below[0] in legal:
        name = dotted((*path, below[0]))
        return Unknown(
            f"{shown}: `{dotted(path)}` is no list here", f"leave the number out: `{name}`", (name,)
        )
    if re.fullmatch(r"\d{3}", key) and entry is None:
        fix = "write the number before it without a comma, which ends a value within { }: 2048, not 2,048"
        return Unknown(f"{shown}: a number in place of a key", fix, ())
    here = dotted(tuple(part for part in (*path, key) if not isinstance(part, int)))
    known = hints()
    old = known.get(here) or known.get(key) or known.get(key.lower().replace("-", "_"))
    if old is not None:
        fix = old if old.startswith("remove") else f"write {old}"
        return Unknown(f"{shown}: not a key of memtrain", fix, tuple(re.findall(r"`([\w.]+)", old)))
    elsewhere = [name for name in every_key(Recipe) if name.split(".")[-1] == key]
    if elsewhere:
        highest = min(name.count(".") for name in elsewhere)
        elsewhere = [name for name in elsewhere if name.count(".") == highest][:3]
        return _did_you_mean(shown, elsewhere, elsewhere)
    near = difflib.get_close_matches(key.lower(), legal, n=2, cutoff=0.6)
    by_leaf = {name.split(".")[-1]: name for name in reversed(every_key(Recipe))}
    leaves = difflib.get_close_matches(key.lower(), by_leaf, n=2, cutoff=0.75)
    other = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.8)
    own = max((_likeness(key, one) for one in (*near, *leaves)), default=0.0)
    # There are hundreds of other tools' words: one has to be far more like than a key of memtrain's own.
    if other and _likeness(key, other[0]) > own + (0.1 if near else 0.0):
        advice = known[other[0]]
        # Another tool's word that only looks alike: a guess, and told as one.
        fix = f"did you mean '{other[0]}'? "
        fix += f"R{advice[1:]}" if advice.startswith("remove") else f"Write {advice}"
        return Unknown(f"{shown}: unknown key", fix, tuple(re.findall(r"`([\w.]+)", advice)))
    if near:
        return _did_you_mean(shown, near, [dotted((*path, name)) for name in near])
    if leaves:
        far = [by_leaf[leaf] for leaf in leaves]
        return _did_you_mean(shown, far, far)
    return Unknown(f"{shown}: unknown key", f"the keys here are {', '.join(legal)}", ())


def _likeness(key: str, other: str) -> float:
    """1 for the same letters in the same order, 0 for none."""
    return difflib.SequenceMatcher(a=other, b=key.lower()).ratio()


def _did_you_mean(shown: str, words: list[str], meant: list[str]) -> Unknown:
    suggestion = " or ".join(f"'{word}'" for word in words)
    return Unknown(f"{shown}: unknown key", f"did you mean {suggestion}?", tuple(meant))
