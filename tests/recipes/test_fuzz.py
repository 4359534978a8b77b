"""Recipes mutated at random: a valid recipe or a RecipeError comes out, soon, and nothing else.

`MEMTRAIN_FUZZ=2000` sets how many (300 otherwise).
"""

import os
import random
import time
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.reading.field_types import every_key
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.reading.renamed_keys import RENAMED_KEYS
from memtrain.recipes.reading.shipped import configs_dir
from memtrain.recipes.recipe import Recipe

COUNT = int(os.environ.get("MEMTRAIN_FUZZ", "300"))
BLOCK = 50
SHIPPED = [path.read_text() for path in sorted(configs_dir().rglob("*.yaml"))]
TEXTS = SHIPPED + [path.read_text() for path in sorted((Path(__file__).parent / "wrong").glob("*.yaml"))]
KEYS = sorted({key.split(".")[-1] for key in every_key(Recipe)} | set(RENAMED_KEYS))
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
    key = ".".join(random_.choice([*KEYS, "0", "", "é"]) for _ in range(random_.randint(1, 3)))
    return (
        random_.choice([key, random_.choice(every_key(Recipe))])
        + random_.choice(["=", "=", "=", ""])
        + random_.choice(VALUES)
    )


def outcome(overrides: list[str], seed: int) -> RecipeError | None:
    try:
        assert isinstance(load_recipe("my.yaml", overrides).recipe, Recipe)
    except RecipeError as error:
        return error
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    return None


@pytest.mark.parametrize("block", range((COUNT + BLOCK - 1) // BLOCK))
def test_mutated_recipes_are_recipes_or_recipe_errors(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    path = Path("my.yaml")
    for seed in range(block * BLOCK, min((block + 1) * BLOCK, COUNT)):
        random_ = random.Random(seed)
        path.write_bytes(mutated(random_))
        overrides = [override(random_) for _ in range(random_.choice([0, 0, 1, 2]))]
        start = time.process_time()
        error = outcome(overrides, seed)
        assert time.process_time() - start < 2, f"seed {seed} is slow"
        if error is not None:
            assert error.faults
            assert all(fault.what.strip() and fault.where for fault in error.faults), (seed, error.text())
            assert "Input should" not in error.text(), (seed, error.text())
            assert len(error.text()) < 20_000, seed
