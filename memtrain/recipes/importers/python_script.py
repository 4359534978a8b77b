"""Arguments of a training script in Python, read from its syntax; nothing of it is executed."""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.notebook import with_indents, without_magics
from memtrain.recipes.importers.script_arguments import Fields, OwnArguments, own_arguments

_PRECISIONS = ("bfloat16", "float16", "float32")
_SUPPORTED = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available")


def _add(left: float, right: float) -> float:
    return left + right


def _subtract(left: float, right: float) -> float:
    return left - right


def _multiply(left: float, right: float) -> float:
    return left * right


def _divide(left: float, right: float) -> float:
    return left / right


def _divide_whole(left: float, right: float) -> float:
    return left // right


_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.FloorDiv: _divide_whole,
    ast.Div: _divide,
}

_OF_ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
"""Functions whose second argument is what they give where nothing sets the variable."""

MOST_BYTES = 2**20
"""Largest script that is read. Taste."""


class Computed(str):
    """An argument whose value nobody knows before the script runs: its text."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call: the function's last name, the object before it, and its arguments."""

    name: str
    owner: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    positional: tuple[Any, ...] = ()
    result: str = ""
    """Variable that the result goes to, where it is one."""
    is_unread: bool = False
    """The result goes to a variable that nothing reads."""


def calls_of(text: str, name: str, given: Mapping[str, Any] | None = None) -> tuple[list[Call], OwnArguments]:
    """(every call of a script, in order, with the values of its arguments as far as they are written; the
    script's own arguments). `given`: what a command gives of these.

    Raises: RecipeError when it is no Python.
    """
    tree = _tree(text, name)
    own = own_arguments(tree, lambda value: _written(value, {}), given or {})
    read = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    known: dict[str, Any] = {**own.known}
    found: list[Call] = []
    results: dict[ast.expr, str] = {}
    for node in _in_order(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            _assign(node, known)
            known = {**own.known, **known}
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            results |= dict.fromkeys(_chain(node.value), ast.unparse(target))
        elif isinstance(node, ast.Call):
            call = _call(node, known)
            if call is not None:
                result = results.get(node, "")
                is_unread = result.isidentifier() and result not in read
                found.append(replace(call, result=result, is_unread=is_unread))
    return found, own


def _tree(text: str, name: str) -> ast.Module:
    if len(text) > MOST_BYTES:
        raise RecipeError(f"{name} is longer than a training script", name, "name the script that trains")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(with_indents(without_magics(textwrap.dedent(text))))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"{name}:{line}" if line else name
        raise RecipeError(
            f"{name} is not valid Python: {getattr(error, 'msg', error)}", where, "fix the script"
        ) from None


def _chain(value: ast.expr) -> Iterator[ast.expr]:
    """The calls of `load(...).eval().to(...)`, whose result is one."""
    while isinstance(value, ast.Call):
        yield value
        if not isinstance(value.func, ast.Attribute):
            return
        value = value.func.value


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes in the order of their lines; assignments of a line before its calls."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign | ast.Call)]
    return iter(sorted(nodes, key=lambda node: (node.lineno, isinstance(node, ast.Call))))


def _assign(node: ast.Assign | ast.AnnAssign, known: dict[str, Any]) -> None:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    assert node.value is not None, "Only assignments with a value are read."
    value = _value(node.value, known)
    for target in targets:
        if isinstance(target, ast.Name) and not isinstance(value, Computed):
            known[target.id] = value
        elif isinstance(target, ast.Name):
            known.pop(target.id, None)


def _call(node: ast.Call, known: dict[str, Any]) -> Call | None:
    function, owner = node.func, ""
    if isinstance(function, ast.Attribute):
        owner = ast.unparse(function.value)
        name = function.attr
    elif isinstance(function, ast.Name):
        name = function.id
    else:
        return None
    arguments: dict[str, Any] = {}
    for word in node.keywords:
        if word.arg is not None:
            arguments[word.arg] = _value(word.value, known)
            continue
        spread = _value(word.value, known)
        if isinstance(spread, dict):
            arguments |= {str(key): value for key, value in cast(dict[Any, Any], spread).items()}
    return Call(name, owner, arguments, tuple(_value(one, known) for one in node.args))


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """Value of an expression, where it is written; else its text as `Computed`."""
    try:
        return _written(node, known)
    except (KeyError, TypeError, ZeroDivisionError, ValueError, OverflowError):
        return Computed(ast.unparse(node)[:200])


def _written(node: ast.expr, known: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if not isinstance(known[name], Fields):
            return known[name]
        case ast.Attribute(value=ast.Name(id=owner), attr=name) if isinstance(known.get(owner), Fields):
            return known[owner][name]
        case ast.Attribute(attr=name) if name in _PRECISIONS:
            return name
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_written(one, known) for one in items]
        case ast.Dict(keys=keys, values=values):
            return {
                _written(key, known): _value(value, known)
                for key, value in zip(keys, values, strict=True)
                if key
            }
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_written(operand, known)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _written(operand, known)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            numbers = _number(_written(left, known)), _number(_written(right, known))
            return _ARITHMETIC[type(op)](*numbers)
        case ast.IfExp(test=test, body=body, orelse=other):
            return _written(body if _written(test, known) else other, known)
        case ast.Call(func=function) if ast.unparse(function).rpartition(".")[2] in _SUPPORTED:
            return True
        case ast.Call(func=function, args=[_, default]) if ast.unparse(function) in _OF_ENVIRONMENT:
            return _written(default, known)
        case ast.JoinedStr(values=parts):
            return "".join(str(_written(_inside(part), known)) for part in parts)
        case _:
            raise KeyError(ast.unparse(node)[:80])


def _inside(part: ast.expr) -> ast.expr:
    """The expression in a part of an f-string; its form is left out where there is none."""
    if isinstance(part, ast.FormattedValue) and part.format_spec is None and part.conversion == -1:
        return part.value
    return part


def _number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e12:
        raise TypeError("no number that a script computes with")
    return value
