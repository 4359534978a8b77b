"""Validation: a tree to a recipe, or every fault of it at once, in plain words, each with its line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from memtrain.recipes.reading.error_messages import default_words, refusal, sentence, way_out
from memtrain.recipes.reading.field_types import (
    Annotation,
    describe,
    field_types,
    follow,
    item_of,
    parts,
    readers,
    section_of,
    takes_null,
)
from memtrain.recipes.reading.unknown_keys import Unknown, unknown_key
from memtrain.recipes.reading.without_faults import missing_section, named_keys, without
from memtrain.recipes.reading.yaml_tree import (
    MOST_FAULTS,
    Faults,
    Items,
    Leaf,
    Mapping,
    Node,
    Path,
    Place,
    dotted,
    find,
    plain,
)
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.base import Section, parse_bytes

NOT_SHOWN = "unknown key"
METHOD: Path = ("method",)
FIRST_METHOD = next(iter(METHODS))


def recipe_of(tree: Mapping, faults: Faults, command: str | None = None) -> Recipe | None:
    """The recipe that a tree says, or None with every fault noted.

    A rule between keys is checked only where its keys are right: after a fault, the recipe without the keys
    at fault is checked again, until no rule is broken.

    `command`: the method of the command line; the recipe's must be the same.
    """
    recipe, _ = part_without_faults(tree, faults, command)
    return None if faults else recipe


def part_without_faults(
    tree: Mapping, faults: Faults, command: str | None = None
) -> tuple[Recipe | None, frozenset[Path]]:
    """(the recipe without the keys at fault, which have their defaults or stand-ins; those keys): for more
    checks of what holds. No recipe where a fault is in every part."""
    _check_method(tree, faults, command)
    checked = _Checked(tree, faults, command)
    bare = checked.section(tree, Recipe, ())
    recipe = _recipe_without_faults(bare, checked)
    if recipe is None and METHOD in checked.at_fault:
        recipe = _recipe_by_any_method(bare, checked)
    return recipe, frozenset() if recipe is None else frozenset(checked.at_fault | checked.unknown)


def _recipe_without_faults(bare: dict[str, object], checked: _Checked) -> Recipe | None:
    """The recipe of the keys that are not at fault; None where the method is, or a fault is in every part."""
    kept: dict[str, object] | None = bare
    for _ in range(MOST_FAULTS):
        try:
            return Recipe.model_validate(kept)
        except ValidationError as error:
            at_fault = _emit(error.errors(include_url=False), checked)
            kept = without(kept, at_fault) if at_fault - checked.at_fault else None
            checked.at_fault.update(at_fault)
        if kept is None:
            break
    return None


def _recipe_by_any_method(bare: dict[str, object], checked: _Checked) -> Recipe | None:
    """The recipe by the method that is probably meant, where its own is wrong or missing. A fault is noted
    only where it is one by every method."""
    names = sorted(METHODS, key=lambda name: name != (section_method(checked.tree) or FIRST_METHOD))
    rest = without(bare, checked.at_fault - {METHOD})
    if rest is None:
        return None
    known = len(checked.faults.found)
    trials: list[tuple[Recipe | None, _Checked]] = []
    for name in names:
        trial = checked.copy()
        own = {key: value for key, value in rest.items() if key not in METHODS or key == name}
        trials.append((_recipe_without_faults({**own, "method": name}, trial), trial))
    recipe, first = trials[0]
    later = [{fault for _, fault in trial.faults.found[known:]} for _, trial in trials]
    checked.faults.found += [
        one for one in first.faults.found[known:] if all(one[1] in each for each in later)
    ]
    checked.at_fault.update(first.at_fault)
    return recipe


def section_method(tree: Mapping) -> str | None:
    """The one method whose section is written; None where there are none or several."""
    written = [name for name in METHODS if name in tree.entries]
    return written[0] if len(written) == 1 else None


def _check_method(tree: Mapping, faults: Faults, command: str | None) -> None:
    node = tree.node("method")
    if not isinstance(node, Leaf) or not isinstance(node.value, str):
        return
    if command is not None and node.value != command and node.value in METHODS:
        faults.add(
            f"the command is `memtrain {METHODS[command].command}`, but the recipe has method: {node.value}",
            node.place,
            f"run `memtrain {METHODS[node.value].command}`, or write method: {command} with data for it",
        )
    if node.value in METHODS:
        for fault in foreign_sections(tree, node, METHODS):
            faults.add(*fault)


def foreign_sections(tree: Mapping, method: Leaf, methods: Iterable[str]) -> list[tuple[str, Place, str]]:
    """(what, where, fix) of every section that belongs to another method than the recipe's."""
    return [
        (
            f"{name}: the section of another method; {method.place} has method: {method.value}",
            tree.entries[name].place,
            f"remove the section, or write method: {name}",
        )
        for name in methods
        if name in tree.entries and name != method.value
    ]


@dataclass(frozen=True, slots=True)
class _Checked:
    """Bare values for pydantic, without the keys that were refused on the way."""

    tree: Mapping
    faults: Faults
    command: str | None = None
    """The method of the command line."""
    meant: set[str] = field(default_factory=set[str])
    """Keys that some advice names already: that they are missing need not be reported as well."""
    at_fault: set[Path] = field(default_factory=set[Path])
    """Keys that are left out, so that the rules between the others can be checked."""
    unknown: set[Path] = field(default_factory=set[Path])
    """Keys that no section has, and keys without a value."""

    def copy(self) -> _Checked:
        """The same so far, with lists of its own."""
        faults = Faults(list(self.faults.found))
        return _Checked(
            self.tree, faults, self.command, set(self.meant), set(self.at_fault), set(self.unknown)
        )

    def section(self, node: Mapping, section: type[Section], path: Path) -> dict[str, object]:
        known = field_types(section)
        bare: dict[str, object] = {}
        for key, entry in node.entries.items():
            if key not in known:
                if not (path == () and key in METHODS):
                    # Advice is a search over every key: past what is told of one recipe there is none.
                    is_reported = len(self.faults.found) < MOST_FAULTS
                    given = entry.node.value if isinstance(entry.node, Leaf) else None
                    below = list(entry.node.entries) if isinstance(entry.node, Mapping) else []
                    unknown = (
                        unknown_key(key, section, path, given, below)
                        if is_reported
                        else Unknown(NOT_SHOWN, "", ())
                    )
                    self.faults.add(unknown.what, entry.place, unknown.fix)
                    self.meant.update(unknown.meant)
                    self.unknown.add((*path, key))
                continue
            annotation = known[key]
            if isinstance(entry.node, Leaf) and entry.node.is_empty:
                self.empty(section, annotation, (*path, key), entry.place)
                if section_of(annotation):
                    bare[key] = {}
                continue
            bare[key] = self.value(entry.node, annotation, (*path, key))
        return bare

    def is_meant(self, path: Path) -> bool:
        """Whether advice was given on this key, or on a key below."""
        return any(f"{meant}.".startswith(f"{dotted(path)}.") for meant in self.meant)

    def names_a_fault(self, message: str, path: Path) -> bool:
        """Whether a rule speaks of a key that is at fault already, or whose right name was given."""
        named = named_keys(message, path)
        return any(one[: len(fault)] == fault for one in named for fault in self.at_fault) or any(
            dotted(one) in self.meant for one in named
        )

    def value(self, node: Node, annotation: Annotation, path: Path) -> object:
        section, item = section_of(annotation), item_of(annotation)
        if section is None and item is not None:
            section = section_of(item)
            if isinstance(node, Items):
                return [self.value(one, item, (*path, at)) for at, one in enumerate(node.items)]
        if section is not None and isinstance(node, Mapping):
            return self.section(node, section, path)
        return plain(node)

    def empty(self, section: type[Section], annotation: Annotation, path: Path, place: Place) -> None:
        """Refuse a key with nothing after it, but for a top section with all its lines commented out.

        A bare `adapter:` is refused: it might be meant as one with all defaults, or as none.
        """
        key = dotted(path)
        if section_of(annotation) is None:
            fix = f"write {describe(annotation)}; or remove it{default_words(section, str(path[-1]))}"
        elif takes_null(annotation) and len(path) > 1:
            fix = f"write `{path[-1]}: {{}}` for its defaults, `{path[-1]}: null` for none"
        else:
            return
        self.meant.add(key)
        self.unknown.add(path)
        self.faults.add(f"{key}: no value", place, fix)


def _emit(errors: Sequence[ErrorDetails], checked: _Checked) -> set[Path]:
    """Note pydantic's errors in our words: the branches of a union as one, none twice at one place, and none
    that follows from another. The keys at fault."""
    by_path: dict[Path, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(follow(Recipe, error["loc"])[0], []).append(error)
    broken = {place for place, _ in checked.faults.found}
    at_fault: set[Path] = set()
    for path, group in by_path.items():
        annotation = follow(Recipe, path)[1]
        messages = [_message(error) for error in group if error["type"] == "value_error"]
        is_rule = bool(messages) and (section_of(annotation) is not None or not path)
        place, node = _nearest(checked.tree, path)
        at_fault.add(_blamed(messages[0], path, checked) if is_rule else path)
        if any(error["type"] == "missing" for error in group):
            if not checked.is_meant(path) and not checked.at_fault:
                _add_missing(path, annotation, place, checked)
        elif messages and path and (dotted(path) in checked.meant if is_rule else checked.is_meant(path)):
            continue
        elif is_rule or (messages and _reader_speaks(annotation)):
            if not checked.names_a_fault(messages[0], path):
                _add_broken_rule(messages[0], path, place, checked)
        elif node.place not in broken:
            _add_wrong_value(path, annotation, node, checked)
    return at_fault


def _blamed(message: str, path: Path, checked: _Checked) -> Path:
    """The first key of a broken rule that is written and not at fault yet; else the whole section."""
    for named in named_keys(message, path):
        if len(named) > len(path) and find(checked.tree, named) is not None and named not in checked.at_fault:
            return named
    missing = missing_section(message) if not path else None
    return path if missing is None or find(checked.tree, missing) is not None else missing


def _message(error: ErrorDetails) -> str:
    reason: Any = error.get("ctx", {}).get("error")
    return str(cast(object, reason))


def _reader_speaks(annotation: Annotation) -> bool:
    """Whether a reader of the field (other than that of sizes) may have words of its own."""
    return any(
        parse_bytes not in readers(metadata) and readers(metadata) for _, metadata in parts(annotation)
    )


def _nearest(tree: Mapping, path: Path) -> tuple[Place, Node]:
    """The place and the node of a path, or of the nearest written path above."""
    for length in range(len(path), 0, -1):
        found = find(tree, path[:length])
        if found is not None:
            return found
    return tree.place, tree


def _add_missing(path: Path, annotation: Annotation, place: Place, checked: _Checked) -> None:
    section, faults = section_of(annotation), checked.faults
    if path == METHOD:
        meant = checked.command or section_method(checked.tree)
        words = f"or another of {', '.join([*METHODS][1:])}"
        if meant:
            words = "the method of the command" if checked.command else "whose section is written"
        faults.add("method: missing", place, f"add `method: {meant or FIRST_METHOD}`, {words}")
    elif section is None:
        faults.add(f"{dotted(path)}: missing", place, f"add it. {sentence(path)}")
    else:
        keys = ", ".join(list(section.model_fields)[:3])
        faults.add(f"{dotted(path)}: missing", place, f"add `{path[-1]}:` with its keys ({keys}, ...)")


def _add_broken_rule(message: str, path: Path, place: Place, checked: _Checked) -> None:
    """A rule between keys: `what; way out`. A rule of the whole recipe is told at the first key it names."""
    what, _, fix = message.partition("; ")
    named = {key: found[0] for key in named_keys(message, path) if (found := find(checked.tree, key))}
    places = [*named.values()]
    # A word of the command line broke the rule, where there is one: the file held before it came.
    places = [one for one in places if not one.line] or (places if not path else [])
    in_file = [(key, one) for key, one in named.items() if one.line]
    if fix.endswith("not both") and places and not places[0].line and len(in_file) == 1:
        (key, one) = in_file[0]
        fix += f": add `{dotted(key)}=null`, which takes away what {one} sets"
    place = places[0] if places else place
    checked.faults.add(what, place, fix)


def _add_wrong_value(path: Path, annotation: Annotation, node: Node, checked: _Checked) -> None:
    fix, meant = way_out(path, annotation, node), section_method(checked.tree) if path == METHOD else None
    if meant is not None:
        fix = f"write method: {meant}, whose section is at {checked.tree.entries[meant].place}"
    checked.faults.add(f"{dotted(path)}: {refusal(node, annotation)}", node.place, fix)
