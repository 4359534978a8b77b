"""Recipes, mutated: lines of shipped and of wrong ones cut, doubled, swapped, written over. By a seed each.

Used by tests/recipes/test_fuzz.py (some hundreds) and by benchmarks/broken_inputs.py (as many as asked for).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from memtrain.recipes.peers.hints import hints
from memtrain.recipes.reading.field_types import every_key
from memtrain.recipes.reading.shipped import configs_dir
from memtrain.recipes.recipe import Recipe

WRONG = Path(__file__).resolve().parents[1] / "tests/recipes/wrong"
SHIPPED = [path.read_text() for path in sorted(configs_dir().rglob("*.yaml"))]
TEXTS = SHIPPED + [path.read_text() for path in sorted(WRONG.glob("*.yaml"))]
KEYS = sorted({key.split(".")[-1] for key in every_key(Recipe)} | set(hints()))
VALUES = ["", "null", "true", "on", "yes", "-1", "0", "1e-5", ".inf", "99999999999999999999", "1_0", "'x'"]
VALUES += ['"', "[]", "{}", "[1, [2, {a: b}]]", "{a: {b: c}}", "*a", "&a", "&a x", "!!int x", "!x", "|", ">"]
VALUES += ["${a}", "${.lr}", "${", "${optim}", "${oc.env:HOME}", "${oc.env:NOPE}", "\\${x}", "24GiB", "x: y"]
VALUES += [
    "@",
    "`",
    "%",
    "- a",
    "? a",
    "<<",
    "\x00",
    "\ud7ff",
    "\u0085",
    "é",
    "日本",
    "😀",
    "#",
    "---",
    "...",
]
VALUES += ["\t", "0x", "0o9", "~", "bfd", "auto", "sft", "extends"]
LETTERS = "abz019.:-_{}[]&*!|>'\"%@`#,?$\\/~ \t\n\r\x00\x7f\x85\u2028é😀"


def mutated(random_: random.Random) -> bytes:
    """A recipe file."""
    lines = random_.choice(SHIPPED if random_.random() < 0.7 else TEXTS).split("\n")
    for _ in range(random_.randint(1, 3)):
        at = random_.randrange(len(lines))
        line = lines[at]
        kind = random_.randrange(10)
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, random_.choice(lines))
        elif kind == 2:
            lines[at] = " " * random_.randint(0, 8) + line.lstrip()
        elif kind == 3:
            lines[at] = line.split(":")[0] + ": " + random_.choice(VALUES)
        elif kind == 4:
            indent = len(line) - len(line.lstrip())
            lines[at] = " " * indent + random_.choice(KEYS) + ":" + ":".join(line.split(":")[1:])
        elif kind == 5:
            lines.insert(
                at, " " * random_.choice([0, 2, 4]) + random_.choice(KEYS) + ": " + random_.choice(VALUES)
            )
        elif kind == 6:
            lines = random_.choice(TEXTS).split("\n")[: random_.randint(1, 9)] + lines[at:]
        else:
            cut = random_.randint(0, len(line))
            lines[at] = (
                line[:cut]
                + random_.choice(LETTERS) * random_.randint(1, 3)
                + line[cut + random_.randint(0, 2) :]
            )
        lines = lines or [""]
    raw = "\n".join(lines).encode("utf-8", "surrogatepass")
    if random_.random() < 0.05:
        cut = random_.randrange(len(raw) + 1)
        raw = raw[:cut] + random_.randbytes(3) + raw[cut:]
    return raw


def override(random_: random.Random) -> str:
    """A word of the command line."""
    key = ".".join(random_.choice([*KEYS, "0", "", "é"]) for _ in range(random_.randint(1, 3)))
    return (
        random_.choice([key, random_.choice(every_key(Recipe))])
        + random_.choice(["=", "=", "=", ""])
        + random_.choice(VALUES)
    )


NUMBERS = ["0", "1", "2", "3", "7", "64", "1000", "100000", "1000000000", "9223372036854775807", "0.5", "-1"]
NUMBERS += ["1e-5", "1e308", "1e-308", "0.999"]


@cache
def legal_words() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Every key of a recipe with values that are likely to be taken: its own words, or numbers."""
    schema = Recipe.model_json_schema()
    return tuple(_keys(schema, schema["$defs"], ""))


def _keys(
    part: Mapping[str, Any], defs: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, inside in part.get("properties", {}).items():
        forms = [inside, *inside.get("anyOf", []), *inside.get("allOf", [])]
        words: list[str] = []
        for form in forms:
            words += [str(word) for word in form.get("enum", [])] + [
                str(form[key]) for key in ("const",) if key in form
            ]
            kind = form.get("type")
            words += NUMBERS if kind in ("integer", "number") else []
            words += ["true", "false"] if kind == "boolean" else []
            words += ["null"] if kind == "null" else []
            if "$ref" in form:
                below = defs[form["$ref"].rsplit("/", 1)[-1]]
                yield from _keys(below, defs, f"{prefix}{name}.")
        if words:
            yield f"{prefix}{name}", tuple(words)


def varied(random_: random.Random) -> tuple[str, list[str]]:
    """(a shipped recipe, words that give one to four of its keys other values): mostly recipes that plan."""
    keys = legal_words()
    words = [random_.choice(keys) for _ in range(random_.choice([1, 1, 2, 3, 4]))]
    return random_.choice(SHIPPED), [f"{key}={random_.choice(values)}" for key, values in words]
