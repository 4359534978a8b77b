"""Tokenizer of a command that names none: a recipe's, the last one used, one of the hub's cache, built in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memtrain.errors import MemtrainError
from memtrain.trainers.data.store.cache import cache_dir

BUILTIN = "builtin:tiny"
LAST_FILE = "last-tokenizer"
MOST_RECIPES = 50
"""Files of a folder that are looked into."""
FEWER_TOKENS = "1.4 to 2.7"
"""Tokens of the built-in tokenizer for one of Qwen2's and of Llama 3's: 1.42 on GSM8K answers, 1.75 and 1.83
on its questions, 1.89 on Shakespeare, 2.28 and 2.25 on T0 prompts, 2.65 on Python. Measured on 2,000 rows or
files of each."""


@dataclass(frozen=True, slots=True)
class Usual:
    """A tokenizer, and the words that say where its name comes from."""

    name: str
    words: str
    way_out: str
    """End of the sentence of a command that counts: the options that name another."""

    @property
    def summary(self) -> str:
        """The sentence of a command that counts."""
        return f"Counted with {self.words}{self.way_out}"


def usual_tokenizer(dataset: str) -> Usual:
    """The tokenizer that is most likely meant for a dataset; the built-in one where none can be loaded."""
    for find in (lambda: of_recipes(dataset), of_last, of_hub_cache):
        name, where = find()
        if name and can_load(name):
            words = f"the tokenizer of {name} ({where})"
            return Usual(name, words, "; --model or --tokenizer counts with another.")
    return Usual(
        BUILTIN,
        "the built-in tokenizer, because no model is known here; those of Qwen and Llama make "
        f"{FEWER_TOKENS} times fewer tokens of English text and code",
        ". --model or --tokenizer makes it exact.",
    )


def can_load(name: str) -> bool:
    """Whether a tokenizer of that name can be loaded now."""
    from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

    try:
        load_tokenizer(name)
    except MemtrainError:
        return False
    return True


def of_recipes(dataset: str) -> tuple[str, str]:
    """Name and place from the recipes beside the dataset: recipes of this dataset, else all, if they
    agree."""
    found: dict[str, tuple[str, bool]] = {}
    for path in recipes_beside(dataset):
        name, sources = read(path)
        if name:
            found[str(path)] = (name, any(is_same(source, dataset) for source in sources))
    for chosen in ([one for one in found.items() if one[1][1]], list(found.items())):
        names = {name for _, (name, _) in chosen}
        if len(names) == 1:
            return names.pop(), f"from {chosen[0][0]}"
    return "", ""


def recipes_beside(dataset: str) -> Iterator[Path]:
    """YAML files of the current folder and of the dataset's."""
    place = Path(dataset).expanduser()
    beside = [place if place.is_dir() else place.parent] if place.exists() else []
    for folder in dict.fromkeys(one.resolve() for one in [Path.cwd(), *beside]):
        files = sorted(one for one in folder.iterdir() if one.suffix in (".yaml", ".yml") and one.is_file())
        yield from files[:MOST_RECIPES]


def read(path: Path) -> tuple[str, list[str]]:
    """Tokenizer and sources of a recipe; nothing of a file that is none, or has faults."""
    from memtrain.recipes.reading.load import load_recipe

    try:
        recipe = load_recipe(str(path)).recipe
    except MemtrainError:
        return "", []
    return recipe.model.tokenizer or recipe.model.path or "", [one.source for one in recipe.data.train]


def is_same(source: str, dataset: str) -> bool:
    """Whether a source of a recipe is the dataset: by its words, or by the file."""
    return source == dataset or Path(source).expanduser().resolve() == Path(dataset).expanduser().resolve()


def of_last() -> tuple[str, str]:
    """Name of the tokenizer that was used last, where it is still there."""
    try:
        name = (cache_dir(None) / LAST_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return "", ""
    is_path = name.startswith((".", "/", "~"))
    if not name.isprintable() or (is_path and not Path(name).expanduser().is_dir()):
        return "", ""
    return name, "the one used last"


def keep_last(name: str) -> None:
    """Keep the name of a tokenizer that was used; a folder by its whole path. A full disk loses it."""
    if not name or name.startswith("builtin:") or not name.isprintable():
        return
    place = Path(name).expanduser()
    folder = cache_dir(None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f".{LAST_FILE}.{os.getpid()}"
        fresh.write_text(str(place.resolve()) if place.is_dir() else name, encoding="utf-8")
        fresh.replace(folder / LAST_FILE)
    except OSError:
        return


def of_hub_cache() -> tuple[str, str]:
    """Name of the model whose tokenizer lies in the hub's cache since the latest time."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    found = [
        (file.lstat().st_mtime, file.parents[2].name)
        for file in hub.glob("models--*/snapshots/*/tokenizer.json")
        if file.exists()
    ]
    if not found:
        return "", ""
    return max(found)[1].removeprefix("models--").replace("--", "/"), "from the hub's cache"
