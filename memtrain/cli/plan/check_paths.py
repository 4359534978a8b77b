"""Paths of the model and the data in sections that have other faults: whether there is anything at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memtrain.cli.plan.recipe_lines import at_their_lines
from memtrain.errors import DataError, Fault, MemtrainError
from memtrain.recipes.formats.detect import METHOD_FORMATS
from memtrain.recipes.reading.load import LoadedRecipe
from memtrain.recipes.reading.yaml_tree import Items, Leaf, Mapping, Node, Path, find
from memtrain.recipes.sections.data import Source
from memtrain.recipes.sections.model import Model


def missing_paths(loaded: LoadedRecipe, at_fault: frozenset[Path]) -> list[Fault]:
    """Faults of the written paths of the sections `model` and `data` where these have a key at fault,
    and of `data` where the method is.

    `loaded`: the recipe without the keys at fault; its tree is complete. Only presence is looked at: what
    the rows are read by may be the key at fault.
    """
    sections = {key[0] for key in at_fault}
    looks: list[Callable[[], None]] = []
    if "model" in sections:
        looks += [look for key in ("path", "config") if (look := _look_at_model(loaded, key))]
    if sections & {"data", "method"}:
        looks += [look for key in ("train", "eval") for look in _looks_at_sources(loaded, ("data", key))]
    faults: list[Fault] = []
    for look in looks:
        try:
            with at_their_lines(loaded):
                look()
        except MemtrainError as error:
            faults += error.faults
    return list(dict.fromkeys(faults))


def _look_at_model(loaded: LoadedRecipe, key: str) -> Callable[[], None] | None:
    """A look for the model at a key of the section `model`; None where the key holds no text of a path."""
    from memtrain.cli.plan.lookup import look_at_model

    text = _text(loaded.tree, ("model", key))
    if text is None:
        return None
    revision = _text(loaded.tree, ("model", "revision")) if key == "path" else None
    # No validation: another key is at fault, and a rule of the section may need it.
    model = Model.model_construct(**{key: text, "revision": revision})
    return lambda: _ignore(look_at_model(model))


def _looks_at_sources(loaded: LoadedRecipe, key: Path) -> Iterator[Callable[[], None]]:
    """A look for each source of `data.train` or `data.eval` whose path is a text."""
    found = find(loaded.tree, key)
    if found is None:
        return
    node = found[1]
    several = isinstance(node, Items)
    for number, item in enumerate(node.items if isinstance(node, Items) else (node,)):
        text = _source(item)
        if text is not None:
            place = f"{key[0]}.{key[1]}[{number}]" if several else f"{key[0]}.{key[1]}"
            source = Source(
                source=text,
                split=_text(item, ("split",)) or "train",
                name=_text(item, ("name",)),
                revision=_text(item, ("revision",)),
            )
            yield lambda source=source, place=place: _look_at_source(loaded, source, place)


def _look_at_source(loaded: LoadedRecipe, source: Source, place: str) -> None:
    """Nothing, where there are files of a source.

    Raises: DataError.
    """
    from memtrain.trainers.data.sources.sources import at_key, is_on_hub, located

    if is_on_hub(source):
        return
    try:
        located(source, METHOD_FORMATS[loaded.recipe.method][0], streaming=False)
    except DataError as error:
        raise at_key(error, place) from None


def _source(node: Node) -> str | None:
    """The text of a source: a path alone, or the key `source` of a mapping."""
    return _text(node, ("source",)) if isinstance(node, Mapping) else _text(node, ())


def _text(node: Node, path: Path) -> str | None:
    """The text at a path below a node; None where there is none, or another value."""
    found = find(node, path)
    if found is None or not isinstance(found[1], Leaf):
        return None
    value = found[1].value
    return value if isinstance(value, str) and value else None


def _ignore(_: object) -> None:
    return None
