"""Arguments of a script's own: argparse's, fields of classes, parameters of a function that `fire` starts."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Reader = Callable[[ast.expr], Any]
"""Value of an expression that is written. Raises: LookupError, TypeError or ValueError where none is."""

Function = ast.FunctionDef | ast.AsyncFunctionDef

MOST_CLASSES = 1000
"""Classes of a script that is read. Taste."""

MISSING = object()
"""Value of an argument that has no default, or one that is computed."""

_PARSES = ("parse_args", "parse_known_args")
_PARSES_CLASSES = ("parse_args_into_dataclasses", "parse_args_and_config")
_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
_OF_ONE_CLASS = ("cli", "parse")
"""Functions of tyro and simple_parsing that make an object of a class from the command's arguments."""
_STARTERS = ("Fire", "run", "CLI")
"""Functions of fire, typer and jsonargparse that start a function with the command's arguments."""
_SWITCHES: Mapping[str, bool | None] = {"store_true": False, "store_false": True}
_TYPES: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}


class Fields(dict[str, Any]):
    """Values of arguments by name: a command's, else defaults; an argument that has neither is not there."""


@dataclass(slots=True)
class OwnArguments:
    """Names of a script that its arguments are read from."""

    known: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values by name: `Fields`, or the parameter of a function that is started."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Every argument that a command may give, with its value; MISSING where it has none."""


def own_arguments(tree: ast.AST, read: Reader, given: Mapping[str, Any]) -> OwnArguments:
    """The arguments of a script, as a command gives them, else with their defaults.

    Raises: RecursionError when it has more classes, or deeper ones, than a training script.
    """
    classes = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)}
    if len(classes) > MOST_CLASSES:
        raise RecursionError
    functions = {one.name: one for one in ast.walk(tree) if isinstance(one, Function)}
    of_parser = dict(_of_argparse(tree, read))
    of_classes = {name: dict(_of_class(one, classes, read)) for name, one in classes.items()}
    for names in (of_parser, *of_classes.values()):
        names |= {name: given[name] for name in names.keys() & given.keys()}
    parsed, fields = _fields(of_parser), {name: _fields(one) for name, one in of_classes.items()}
    order = _parsed_classes(tree)
    found = OwnArguments({name: one for name, one in fields.items() if one})
    for target, value in _assignments(tree):
        made = _made(value, parsed, fields, functions, order)
        targets = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        for one, of_one in zip(targets, made, strict=False):
            if isinstance(one, ast.Name) and of_one:
                found.known[one.id] = of_one
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    for call in calls:
        _pass_on(found, call, functions, read, given)
    read_as = [ast.unparse(call.args[0]) for call in calls if call.args and _called(call) in _OF_ONE_CLASS]
    for names in (of_parser, *(of_classes[name] for name in {*order, *read_as} & of_classes.keys())):
        found.arguments |= names
    return found


def _fields(arguments: Mapping[str, Any]) -> Fields:
    return Fields({name: value for name, value in arguments.items() if value is not MISSING})


def _made(
    value: ast.expr,
    parsed: Fields,
    fields: Mapping[str, Fields],
    functions: Mapping[str, Function],
    order: Sequence[str],
) -> list[Fields | None]:
    """The arguments that an expression makes, one after the other."""
    place = 0
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
        place, value = (value.slice.value if isinstance(value.slice.value, int) else 0), value.value
    name = _called(value)
    if name in _PARSES_CLASSES:
        return [fields.get(one) for one in order[place:]]
    if name in _PARSES or _parses(functions.get(name)):
        return [parsed]
    if isinstance(value, ast.Call) and name in _OF_ONE_CLASS and value.args:
        return [fields.get(ast.unparse(value.args[0]))]
    return [fields.get(name)]


def _pass_on(
    found: OwnArguments,
    call: ast.Call,
    functions: Mapping[str, Function],
    read: Reader,
    given: Mapping[str, Any],
) -> None:
    """Note the parameters of a function: those that are given arguments, or that a command gives."""
    called = _called(call)
    if called in _STARTERS and call.args and (started := functions.get(ast.unparse(call.args[0]))):
        values = dict(_of_function(started, read))
        values |= {name: given[name] for name in values.keys() & given.keys()}
        found.known |= _fields(values)
        found.arguments |= values
        return
    function = functions.get(called)
    for parameter, one in zip(function.args.args if function else [], call.args, strict=False):
        passed = found.known.get(one.id) if isinstance(one, ast.Name) else None
        if isinstance(passed, Fields):
            found.known.setdefault(parameter.arg, passed)


def _of_argparse(tree: ast.AST, read: Reader) -> Iterator[tuple[str, Any]]:
    """(name, default) of each `add_argument`."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or _called(call) != "add_argument":
            continue
        words = {one.arg: one.value for one in call.keywords}
        written = [one.value for one in call.args if isinstance(one, ast.Constant)]
        flags = [one for one in written if isinstance(one, str)]
        name = next((one for one in flags if one.startswith("--")), flags[0] if flags else "")
        name = str(_read(words["dest"], read)) if "dest" in words else name.lstrip("-").replace("-", "_")
        default = _read(words.get("default"), read)
        if "default" not in words and "required" not in words and flags and flags[0].startswith("-"):
            default = _SWITCHES.get(str(_read(words.get("action"), read)))
        kind = _TYPES.get(ast.unparse(words["type"])) if "type" in words else None
        if name:
            yield (
                name,
                _read_as(kind, default) if kind and isinstance(default, str | int | float) else default,
            )


def _read_as(kind: Callable[[Any], Any], default: Any) -> Any:
    """A default as argparse gives it; MISSING for one that its type refuses."""
    try:
        return kind(default)
    except (ValueError, OverflowError):
        return MISSING


def _of_class(
    one: ast.ClassDef,
    classes: Mapping[str, ast.ClassDef],
    read: Reader,
    seen: set[ast.ClassDef] | None = None,
) -> Iterator[tuple[str, Any]]:
    """(name, default) of the fields of a class, those of the script's classes that it extends first."""
    seen = set() if seen is None else seen
    seen.add(one)
    for base in reversed(one.bases):
        above = classes.get(ast.unparse(base))
        if above is not None and above not in seen:
            yield from _of_class(above, classes, read, seen)
    for line in one.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id, _read(_default_of(line.value), read)
        elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            yield line.targets[0].id, _read(line.value, read)


def _default_of(value: ast.expr | None) -> ast.expr | None:
    """The default in `field(default=..., metadata=...)`, or the value itself."""
    if not isinstance(value, ast.Call) or _called(value) != "field":
        return value
    words = {one.arg: one.value for one in value.keywords}
    made = words.get("default_factory")
    return made.body if isinstance(made, ast.Lambda) else words.get("default")


def _of_function(function: Function, read: Reader) -> Iterator[tuple[str, Any]]:
    """(name, default) of each parameter."""
    given = function.args
    first = len(given.args) - len(given.defaults)
    for one, default in zip(given.args[first:], given.defaults, strict=True):
        yield one.arg, _read(default, read)
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield one.arg, _read(default, read)


def _read(value: ast.expr | None, read: Reader) -> Any:
    """The value of an expression; MISSING where there is none, or it is computed."""
    if value is None:
        return MISSING
    try:
        return read(value)
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return MISSING


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    for one in ast.walk(tree):
        if isinstance(one, ast.Assign):
            yield from ((target, one.value) for target in one.targets)
        elif isinstance(one, ast.AnnAssign) and one.value is not None:
            yield one.target, one.value


def _called(value: ast.expr) -> str:
    """The last name of what is called; nothing where nothing is."""
    return ast.unparse(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""


def _parses(function: Function | None) -> bool:
    """Whether a function of the script reads the command's arguments by argparse."""
    return function is not None and any(
        isinstance(one, ast.Call) and _called(one) in _PARSES for one in ast.walk(function)
    )


def _parsed_classes(tree: ast.AST) -> list[str]:
    """Classes in the order that transformers' parser is given them."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and _called(call) in _PARSERS:
            given = [*call.args, *(one.value for one in call.keywords if one.arg == "dataclass_types")][:1]
            several = given[0].elts if given and isinstance(given[0], ast.Tuple | ast.List) else given
            return [ast.unparse(one) for one in several]
    return []
