"""A recipe file and the words of the command line -> Recipe, with the line of every key."""

from __future__ import annotations

import os
from collections.abc import Mapping as ReadOnly
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from memtrain.errors import Fault, RecipeError
from memtrain.recipes.reading.continued_adapter import with_adapter_of_path
from memtrain.recipes.reading.environment import (
    EnvironmentText,
    environment_texts,
    refuse_in_places,
    that_can_be_hidden,
)
from memtrain.recipes.reading.interpolate import interpolated
from memtrain.recipes.reading.named_sets import with_named_sets
from memtrain.recipes.reading.overrides import apply_overrides, merged, path_of
from memtrain.recipes.reading.regular_file import open_regular
from memtrain.recipes.reading.shipped import COMMAND_LINE, configs_dir, find_recipe, shipped_names
from memtrain.recipes.reading.texts import check_texts, is_too_long
from memtrain.recipes.reading.validate import part_without_faults, recipe_of
from memtrain.recipes.reading.yaml_reader import read_yaml
from memtrain.recipes.reading.yaml_tree import (
    Entry,
    Faults,
    Items,
    Leaf,
    Mapping,
    Place,
    find,
    plain,
)
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS, spelled_method

DATA_ENDINGS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".xz", ".bz2")
MAX_BYTES = 256 * 2**10
"""Largest recipe that is read. Taste: the longest shipped one is under 2 KiB."""

MAX_EXTENDS = 8
"""Files that may extend each other in a row."""


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe, and where each of its values was set."""

    recipe: Recipe
    path: Path
    text: str
    """The file as it was read, without the files it extends."""
    overrides: tuple[str, ...]
    tree: Mapping = field(repr=False)
    """Complete tree: the file, the files it extends, and the overrides, with `${...}` replaced."""
    environment: tuple[EnvironmentText, ...] = ()
    """Texts that came from environment variables, which are written nowhere."""

    def __repr__(self) -> str:
        """A line: the fields hold the whole file."""
        recipe = self.recipe
        model, sources = recipe.model.path or "model.config", (one.source for one in recipe.data.train)
        return f"LoadedRecipe({self.path}: {recipe.method} of {model} on {', '.join(sources)})"

    @property
    def resolved(self) -> ReadOnly[str, object]:
        """Written keys as bare values, without defaults (`recipe.model_dump()` has them)."""
        return cast(dict[str, object], plain(self.tree))

    def where(self, key: str) -> str:
        """`file:line:column` of a dotted key, "from the command line: `a.b=c`", or "default"."""
        found = find(self.tree, path_of(key))
        return "default" if found is None else str(found[0])

    def nearest(self, key: str) -> str:
        """Place of a dotted key, or of the nearest section or list above it that is written."""
        path = path_of(key)
        for length in range(len(path), 0, -1):
            if found := find(self.tree, path[:length]):
                return str(found[0])
        return "default"


def load_recipe(
    path_or_name: str, overrides: Sequence[str] = (), *, method: str | None = None
) -> LoadedRecipe:
    """The recipe of a file or of a shipped name, with `section.key=value` words laid over it.

    `method`: the command's method, which the recipe's `method:` must equal.
    Raises: RecipeError with every fault that was found, each with its line.
    """
    path = find_recipe(path_or_name)
    faults = Faults()
    text = _text(path, None)
    tree = _file_tree(text, path, _name(path), faults, (path.resolve(),))
    if tree is None:
        raise RecipeError(faults.in_order())
    return _loaded(tree, path, text, overrides, method, faults)


def load_rest(
    path_or_name: str, overrides: Sequence[str] = ()
) -> tuple[LoadedRecipe, frozenset[tuple[str | int, ...]]] | None:
    """(a faulty recipe without the keys at fault, these keys): for more checks of the rest. None where
    nothing holds."""
    path = find_recipe(path_or_name)
    faults = Faults()
    text = _text(path, None)
    tree = _file_tree(text, path, _name(path), faults, (path.resolve(),))
    if tree is None:
        return None
    tree, _ = _whole_tree(tree, overrides, faults)
    recipe, left_out = part_without_faults(tree, faults)
    if recipe is None:
        return None
    rest = LoadedRecipe(recipe, path, text, tuple(overrides), tree)
    return rest, left_out


def load_text(text: str, name: str) -> LoadedRecipe:
    """The recipe of a text that lies in no file; `name` stands for the file in errors.

    Raises: RecipeError with every fault that was found.
    """
    faults = Faults()
    tree = _file_tree(text, Path(name), name, faults, ())
    if tree is None:
        raise RecipeError(faults.in_order())
    return _loaded(tree, Path(name), text, (), None, faults)


def read_mapping(path: Path) -> Mapping:
    """The keys of any YAML file, read as safely as a recipe.

    Raises: RecipeError when the file cannot be read, is not YAML, or holds no keys.
    """
    faults = Faults()
    root = read_yaml(_text(path, None), _name(path), faults)
    if faults:
        raise RecipeError(faults.in_order())
    if not isinstance(root, Mapping):
        raise RecipeError(f"{path} has no keys", _name(path), "give a YAML file of keys and values")
    return root


def recipe_of_words(overrides: Sequence[str]) -> LoadedRecipe:
    """A recipe without a file, made of `section.key=value` words alone.

    Raises: RecipeError with every fault that was found.
    """
    nothing = Mapping({}, Place("the command line"))
    return _loaded(nothing, Path("the command line"), "", overrides, None, Faults())


def _loaded(
    tree: Mapping, path: Path, text: str, overrides: Sequence[str], method: str | None, faults: Faults
) -> LoadedRecipe:
    tree, hide = _whole_tree(tree, overrides, faults)
    recipe = recipe_of(tree, faults, method)
    if recipe is None or faults:
        raise RecipeError(faults.in_order())
    written = tree
    if wrong := refuse_in_places(hide, lambda key: str((find(written, key) or (path,))[0])):
        raise RecipeError(wrong)
    hidden = that_can_be_hidden(recipe, hide)
    return LoadedRecipe(recipe, path, text, tuple(overrides), tree, hidden)


def _whole_tree(
    tree: Mapping, overrides: Sequence[str], faults: Faults
) -> tuple[Mapping, list[EnvironmentText]]:
    """(the tree with overrides, replaced `${...}`; its texts from the environment)."""
    raw = apply_overrides(tree, overrides, faults)
    replaced, variables = interpolated(raw, faults)
    check_texts(replaced, (), faults)
    texts = environment_texts(raw, replaced, variables) if variables else []
    return with_adapter_of_path(with_named_sets(_with_spelled_method(replaced)), faults), texts


def _with_spelled_method(tree: Mapping) -> Mapping:
    """The tree with the name of its method, however it is spelled (`Online DPO`), as the registry has it."""
    entry = tree.entries.get("method")
    if entry is None or not isinstance(leaf := entry.node, Leaf) or not isinstance(leaf.value, str):
        return tree
    if (spelled := spelled_method(leaf.value)) not in METHODS:
        return tree
    return replace(
        tree, entries={**tree.entries, "method": replace(entry, node=replace(leaf, value=spelled))}
    )


def _name(path: Path) -> str:
    """The file as errors show it: relative where it lies below the current folder."""
    absolute, here = Path(os.path.abspath(path)), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


def _text(path: Path, asked_at: Place | None) -> str:
    """The text of a file, bounded.

    Raises: RecipeError when it is missing, a folder, too large, or not UTF-8.
    """
    where = COMMAND_LINE if asked_at is None else str(asked_at)
    if path.is_dir():
        of_run = f"give the recipe of the run ({path}/recipe.yaml), or its model ({path}/final)"
        is_run = (path / "recipe.yaml").is_file() and (path / "final").is_dir()
        raise RecipeError(f"{path} is a folder", where, of_run if is_run else "give a .yaml file in it")
    if path.suffix in DATA_ENDINGS and path.is_file():
        raise RecipeError(
            f"{path} is a data file, not a recipe",
            where,
            f"plan a run on it (memtrain plan {path} --model MODEL), measure its rows (memtrain "
            f"inspect-lengths {path}), show them (memtrain show-data {path}), or train on it (memtrain sft "
            f"{path} --model MODEL; dpo for pairs)",
        )
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise RecipeError(f"there is no file {path}", where, "check the path") from error
    except OSError as error:
        raise RecipeError(
            f"{path} cannot be read: {error.strerror}", where, "check its permissions"
        ) from error
    if len(raw) > MAX_BYTES:
        raise RecipeError(
            f"{path} is larger than {MAX_BYTES // 2**10} KiB",
            where,
            "give a recipe; this file is too large for one",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise RecipeError(
            f"{path} is not UTF-8 text", f"{_name(path)}:{line}:{column}", "save the file as UTF-8"
        ) from error


def _file_tree(text: str, path: Path, name: str, faults: Faults, above: tuple[Path, ...]) -> Mapping | None:
    """The tree of a file over the trees of the files it extends; None when it cannot be read."""
    root = read_yaml(text, name, faults)
    if root is None or (isinstance(root, Leaf) and root.value is None):
        if not faults:
            faults.add(
                "the recipe is empty", Place(name, 1, 1), "`memtrain init sft` writes one to start from"
            )
        return None
    if not isinstance(root, Mapping):
        kind = "a list" if isinstance(root, Items) else "a single value"
        keys = "write keys: `method: sft`, `model:`, `data:`"
        alone = f"plan or train without a recipe (memtrain sft {path} --model MODEL, or memtrain plan)"
        rows = f"{alone}, or {keys}"
        faults.add(f"the file holds {kind}", root.place, rows if path.suffix == ".json" else keys)
        return None
    if "extends" not in root.entries:
        return root
    entry = root.entries["extends"]
    own = Mapping({key: one for key, one in root.entries.items() if key != "extends"}, root.place)
    below: Mapping | None = None
    for leaf in _extended(entry, faults):
        base = _base_tree(str(leaf.value), leaf.place, path, faults, above)
        if base is None:
            return None
        below = base if below is None else cast(Mapping, merged(below, base))
    return own if below is None else cast(Mapping, merged(below, own))


def _extended(entry: Entry, faults: Faults) -> list[Leaf]:
    nodes = entry.node.items if isinstance(entry.node, Items) else (entry.node,)
    leaves = [node for node in nodes if isinstance(node, Leaf) and isinstance(node.value, str)]
    if len(leaves) < len(nodes):
        faults.add(
            "extends: must be the path of a recipe, or a list of them", entry.place, "extends: other.yaml"
        )
    return leaves


def _base_tree(
    word: str, place: Place, path: Path, faults: Faults, above: tuple[Path, ...]
) -> Mapping | None:
    """The tree of the file that `extends: word` names: beside the extending file, else a shipped recipe."""
    if is_too_long(word) or "\0" in word:
        faults.add(f"extends: '{word[:40]}' is not a file name", place, "give the path of a recipe")
        return None
    base = path.parent / Path(word).expanduser()
    if not base.exists() and word in shipped_names():
        base = configs_dir() / f"{word}.yaml"
    if base.resolve() in above:
        chain = " -> ".join(one.name for one in [*above, base])
        faults.add(
            f"extends: the files extend each other in a circle: {chain}", place, "remove one `extends:`"
        )
        return None
    if len(above) > MAX_EXTENDS:
        faults.add(f"extends: more than {MAX_EXTENDS} files in a row", place, "merge some of them")
        return None
    try:
        text = _text(base, place)
    except RecipeError as error:
        faults.found.extend(
            (place, Fault(f"extends: {one.what}", one.where, one.fix)) for one in error.faults
        )
        return None
    if _is_foreign(text, base, place, faults):
        return None
    return _file_tree(text, base, _name(base), faults, (*above, base.resolve()))


def _is_foreign(text: str, base: Path, place: Place, faults: Faults) -> bool:
    """Whether an extended file is no recipe: its content is then not shown."""
    found = Faults()
    root = read_yaml(text, _name(base), found)
    own = {"extends", *Recipe.model_fields}
    if isinstance(root, Mapping) and own & set(root.entries):
        return False
    lines = [one.line for one, _ in found.found if one.line]
    at = f" (line {lines[0]} is not YAML)" if lines else ""
    faults.add(
        f"extends: {base} is not a recipe{at}",
        place,
        "give a YAML file with keys of a recipe: `method:`, `model:`, `data:`",
    )
    return True
