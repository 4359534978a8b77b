"""What a training script calls, and with which values, read from its syntax; nothing is executed."""

from __future__ import annotations

import ast
import posixpath
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.notebook import with_indents, without_magics
from memtrain.recipes.importers.script_arguments import Fields, Function, OwnArguments, own_arguments
from memtrain.recipes.importers.shell import RELATIONS

MOST_BYTES = 2**20
"""Largest script that is read. Taste."""

MOST_STEPS = 50_000
"""Statements that are read, those of a function once for each call of it. Taste."""

RUN_STEPS = 20
"""Statements that a call of a function counts as, for the names that are laid out for it."""

MOST_LETTERS = 10_000
"""Longest text, and most letters and parts of a list or a mapping, that is made of others. Taste."""

_PRECISIONS = ("bfloat16", "float16", "float32")
_SUPPORTED = ("is_bfloat16_supported", "is_bf16_supported", "is_torch_bf16_gpu_available")
_OF_ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
"""Functions whose second argument is what they give where nothing sets the variable."""

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Div: lambda left, right: left / right,
    ast.Mod: lambda left, right: left % right,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **RELATIONS,
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_CONVERTS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "Path": str}
_UNKNOWN = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""Ways in which a computation of a script shows that its value is not known here."""


class Computed(str):
    """A value that nobody knows before the script runs: its text."""


class Made(Computed):
    """The result of a call, or an item of one."""

    call: Call


class Several(Computed):
    """A list some of whose items are computed."""

    items: list[Any]


@dataclass(slots=True, eq=False)
class Call:
    """A call: the function's last name, what stands before it, and its arguments."""

    name: str
    owner: str
    """Text of the object before the name."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    positional: tuple[Any, ...] = ()
    subject: Any = None
    """Value of the object before the name."""
    line: int = 0
    doubts: tuple[str, ...] = ()
    """Tests that decide, when the script runs, what its arguments are."""

    def given(self, name: str, place: int | None = None) -> Any:
        """The argument of a name, or at a place; None where neither is."""
        if name in self.arguments or place is None or place >= len(self.positional):
            return self.arguments.get(name)
        return self.positional[place]


@dataclass(slots=True)
class Script:
    """A script as far as it was read."""

    tree: ast.Module
    own: OwnArguments
    calls: list[Call] = field(default_factory=list[Call])
    """Every call, in the order in which they are made."""
    set_on: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of attributes of objects that the script sets (`tokenizer.chat_template`)."""
    bases: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Classes that the script makes, and those that they extend."""


def made_by(value: Any) -> Call | None:
    """The call whose result a value is."""
    return value.call if isinstance(value, Made) else None


def is_computed(value: Any) -> bool:
    """Whether a value, or a part of it, is computed when the script runs."""
    if isinstance(value, Mapping):
        return any(is_computed(one) for one in cast(Mapping[Any, Any], value).values())
    if isinstance(value, list):
        return any(is_computed(one) for one in cast(list[Any], value))
    return isinstance(value, Computed)


def read_script(text: str, name: str, given: Mapping[str, Any] | None = None) -> Script:
    """A script, read in the order in which it runs. `given`: what a command gives of its own arguments.

    Raises: RecipeError when it is no Python, or more work to read than a training script is.
    """
    tree = _tree(text, name)
    try:
        own = own_arguments(tree, _written_alone, given or {})
        reader = _Reader(tree, own)
        reader.whole()
    except RecursionError:
        raise RecipeError(
            f"{name} nests expressions or classes too deeply to be read", name, "name the script that trains"
        ) from None
    except _TooLongError:
        raise RecipeError(
            f"{name} makes more calls of its own functions than can be read ({MOST_STEPS:,} statements)",
            name,
            "name a script that trains once",
        ) from None
    return reader.script


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


class _TooLongError(Exception):
    """More statements than are read."""


def _written_alone(node: ast.expr) -> Any:
    """Value of an expression by itself. Raises: LookupError, TypeError, ValueError, ArithmeticError."""
    value = _Reader(ast.Module([], []), OwnArguments()).value(node)
    if is_computed(value):
        raise KeyError(str(value))
    return value


class _Reader:
    """Reads statement after statement, with the values of the names at that place."""

    def __init__(self, tree: ast.Module, own: OwnArguments) -> None:
        self.script = Script(tree, own)
        self.known: dict[str, Any] = dict(own.known)
        self.doubts: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.functions: dict[str, Function] = {}
        self.running: list[Function] = []
        self.returned: list[Any] = []
        self.ran: set[Function] = set()
        self.steps = MOST_STEPS

    def whole(self) -> None:
        """Read the script, then the functions that nothing of it calls."""
        tree = self.script.tree
        for one in ast.walk(tree):
            if isinstance(one, Function):
                self.functions.setdefault(one.name, one)
            elif isinstance(one, ast.ClassDef):
                self.script.bases[one.name] = [ast.unparse(base) for base in one.bases]
        for line in tree.body:
            self.statement(line)
        for one in ast.walk(tree):
            if isinstance(one, Function) and one not in self.ran:
                self.run(one, {})

    def body(self, lines: Iterable[ast.stmt]) -> bool:
        """Read statements; whether the last one that is read leaves them."""
        return any(self.statement(line) for line in lines)

    def statement(self, line: ast.stmt) -> bool:
        """Read a statement; whether it leaves its block."""
        self.steps -= 1
        if self.steps < 0:
            raise _TooLongError
        match line:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self.bind(target, self.value(value), value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, self.value(value), value)
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                both = ast.BinOp(ast.Name(name), op, value)
                self.bind(target, self.value(ast.copy_location(both, line)), value)
            case ast.Expr(value=value):
                self.value(value)
            case ast.Return(value=value):
                self.returned.append(None if value is None else self.value(value))
                return True
            case ast.Raise() | ast.Continue() | ast.Break():
                return True
            case ast.If(test=test, body=body, orelse=other):
                return self.branch(test, body, other)
            case (
                ast.For(target=target, iter=over, body=body, orelse=other)
                | ast.AsyncFor(target=target, iter=over, body=body, orelse=other)
            ):
                self.value(over)
                self.bind(target, Computed(ast.unparse(target)[:200]), over)
                self.body(body)
                return self.body(other)
            case ast.While(test=test, body=body):
                if self.truth(test) is not False:
                    self.body(body)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    value = self.value(item.context_expr)
                    if item.optional_vars is not None:
                        self.bind(item.optional_vars, value, item.context_expr)
                return self.body(body)
            case ast.Try(body=body, orelse=other, finalbody=last):
                left = self.body(body) or self.body(other)
                return self.body(last) or left
            case ast.Match(subject=subject, cases=cases):
                self.value(subject)
                for one in cases:
                    self.body(one.body)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                self.names |= {one.asname: one.name for one in names if one.asname}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[line.name] = line
            case _:
                pass
        return False

    def branch(self, test: ast.expr, body: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> bool:
        """Read the branch that is taken; where nothing says which, both, and the first wins with a doubt."""
        truth = self.truth(test)
        if truth is not None:
            return self.body(body if truth else other)
        before = dict(self.known)
        left = self.body(body)
        first, self.known = self.known, dict(before)
        leaves = self.body(other)
        if left:
            return leaves
        for name, value in first.items():
            if name in before and before[name] is value:
                continue
            if not leaves and name in self.known and self.known[name] is not value:
                self.doubts[name] = ast.unparse(test)[:80]
            self.known[name] = value
        return False

    def truth(self, test: ast.expr) -> bool | None:
        """The value of a test; None where it is not known."""
        value = self.value(test)
        return None if is_computed(value) or isinstance(value, Fields) else bool(value)

    def bind(self, target: ast.expr, value: Any, of: ast.expr) -> None:
        """Give a name, or several, or an attribute its value."""
        if isinstance(target, ast.Tuple | ast.List):
            several = self.splits(value) if isinstance(value, Made) else value
            several = several.items if isinstance(several, Several) else several
            is_list = isinstance(several, list) and len(cast(list[Any], several)) == len(target.elts)
            for place, one in enumerate(target.elts):
                self.bind(one, cast(list[Any], several)[place] if is_list else value, of)
        elif isinstance(target, ast.Name):
            named = self.script.own.known.get(target.id) if isinstance(value, Computed) else None
            self.known[target.id] = value if named is None else named
            doubted = (
                [self.doubts[one.id] for one in _names(of) if one.id in self.doubts] if self.doubts else []
            )
            self.doubts.pop(target.id, None)
            if doubted:
                self.doubts[target.id] = doubted[0]
        elif isinstance(target, ast.Attribute):
            holder = self.value(target.value)
            made = made_by(holder)
            if made is not None and made.name.endswith(("Config", "Arguments")):
                made.arguments[target.attr] = value
            elif isinstance(holder, Fields):
                holder[target.attr] = value
            path = f"{ast.unparse(target.value)}.{target.attr}"
            self.known[path] = self.script.set_on[path] = value
        elif isinstance(target, ast.Subscript):
            holder, key = self.value(target.value), self.value(target.slice)
            if isinstance(holder, dict) and not is_computed(key):
                holder[key] = value

    def splits(self, value: Made) -> Any:
        """The results of a call that loads several splits, one for each; else the call's one result."""
        call = value.call
        asked = call.arguments.get("split")
        if not isinstance(asked, list):
            return value
        several: list[Made] = []
        for split in cast(list[Any], asked):
            one = Made(value)
            one.call = replace(call, arguments={**call.arguments, "split": split})
            self.script.calls.append(one.call)
            several.append(one)
        self.script.calls.remove(call)
        return several

    def value(self, node: ast.expr) -> Any:
        """Value of an expression, where it is known; else what it is made by, or its text as `Computed`."""
        try:
            return self.known_value(node)
        except _UNKNOWN:
            return Computed(ast.unparse(node)[:200])

    def known_value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                if not isinstance(value, str | int | float | None):
                    raise TypeError("no value of a configuration")
                return value
            case ast.Name(id=name):
                return self.known[name]
            case ast.Attribute(value=inner, attr=name):
                return self.attribute(inner, name)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return self.items(node, [self.value(one) for one in items])
            case ast.Dict(keys=keys, values=values):
                made: dict[Any, Any] = {}
                for key, one in zip(keys, values, strict=True):
                    value = self.value(one)
                    if key is not None:
                        made[self.plain(key)] = value
                    elif isinstance(value, dict):
                        made |= cast(dict[Any, Any], value)
                return _bounded(made)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -_number(self.plain(operand))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.plain(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return self.computed(op, self.value(left), self.value(right))
            case ast.BoolOp(op=op, values=values):
                return self.either(isinstance(op, ast.Or), values)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return _COMPARED[type(op)](self.plain(left), self.plain(right))
            case ast.IfExp(test=test, body=body, orelse=other):
                truth = self.truth(test)
                if truth is None:
                    first = self.value(body)
                    self.value(other)
                    return first if isinstance(first, Made) else Computed(ast.unparse(node)[:200])
                return self.value(body if truth else other)
            case ast.Call():
                return self.call(node)
            case ast.Subscript(value=inner, slice=key):
                return self.subscript(node, self.value(inner), self.value(key))
            case ast.JoinedStr(values=parts):
                return _bounded("".join(str(self.plain(_inside(part))) for part in parts))
            case ast.Await(value=inner) | ast.Starred(value=inner) | ast.NamedExpr(value=inner):
                return self.value(inner)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                for one in node.generators:
                    self.value(one.iter)
                self.value(node.elt)
            case _:
                pass
        raise KeyError

    def plain(self, node: ast.expr) -> Any:
        """Value of an expression. Raises: KeyError where it is computed."""
        value = self.value(node)
        if is_computed(value) or isinstance(value, Fields):
            raise KeyError
        return value

    def attribute(self, inner: ast.expr, name: str) -> Any:
        path = f"{ast.unparse(inner)}.{name}"
        if path in self.known:
            return self.known[path]
        holder = self.value(inner)
        made = made_by(holder)
        if isinstance(holder, Fields):
            return holder[name]
        if made is not None and name in made.arguments:
            return made.arguments[name]
        if name in _PRECISIONS:
            return name
        raise KeyError(name)

    def items(self, node: ast.expr, items: list[Any]) -> Any:
        if not any(isinstance(one, Computed | Fields) or is_computed(one) for one in items):
            return _bounded(items)
        several = Several(ast.unparse(node)[:200])
        several.items = _bounded(items)
        return several

    def computed(self, op: ast.operator, left: Any, right: Any) -> Any:
        work = _ARITHMETIC[type(op)]
        is_text = isinstance(left, str) and isinstance(right, str) and not is_computed([left, right])
        is_list = isinstance(left, list) and isinstance(right, list)
        if isinstance(op, ast.Add) and (is_text or is_list):
            return _bounded(work(left, right))
        return work(_number(left), _number(right))

    def either(self, is_or: bool, values: Sequence[ast.expr]) -> Any:
        """The value of `a or b`, `a and b`."""
        found: Any = None
        for one in values:
            found = self.plain(one)
            if bool(found) is is_or:
                break
        return found

    def subscript(self, node: ast.Subscript, holder: Any, key: Any) -> Any:
        if isinstance(holder, Made):
            return self.made(node, Call("[]", "", {}, (key,), holder, node.lineno))
        if isinstance(holder, Several):
            return holder.items[key]
        if is_computed(key) or isinstance(holder, str):
            raise KeyError
        return holder[key]

    def made(self, node: ast.expr, call: Call) -> Made:
        value = Made(ast.unparse(node)[:200])
        value.call = call
        return value

    def call(self, node: ast.Call) -> Any:
        function, owner, subject = node.func, "", None
        if isinstance(function, ast.Attribute):
            owner, name = ast.unparse(function.value), function.attr
            subject = self.value(function.value)
        elif isinstance(function, ast.Name):
            name = self.names.get(function.id, function.id)
        else:
            self.value(function)
            raise KeyError
        positional: list[Any] = []
        for one in node.args:
            value = self.value(one)
            is_spread = isinstance(one, ast.Starred) and isinstance(value, list)
            positional += cast(list[Any], value) if is_spread else [value]
        arguments: dict[str, Any] = {}
        for word in node.keywords:
            value = self.value(word.value)
            if word.arg is not None:
                arguments[word.arg] = value
            elif isinstance(value, dict):
                arguments |= {str(key): one for key, one in cast(dict[Any, Any], value).items()}
            else:
                arguments[f"**{ast.unparse(word.value)[:80]}"] = Computed(value)
        call = Call(name, owner, arguments, tuple(positional), subject, node.lineno, self.doubts_of(node))
        known = self.result(call, f"{owner}.{name}" if owner else name)
        self.script.calls.append(call)
        return self.made(node, call) if known is None else known

    def doubts_of(self, node: ast.expr) -> tuple[str, ...]:
        if not self.doubts:
            return ()
        return tuple(f"{one.id} ({self.doubts[one.id]})" for one in _names(node) if one.id in self.doubts)

    def result(self, call: Call, path: str) -> Any:
        """What a call gives, where that is known; None where it is the call's."""
        values = call.positional
        if call.name in _SUPPORTED:
            return True
        if path in _OF_ENVIRONMENT and len(values) == 2 and not is_computed(values[1]):
            return values[1]
        if path in _CONVERTS and len(values) == 1 and not is_computed(values[0]):
            return _bounded(_CONVERTS[path](values[0]))
        if path == "dict" and not values:
            return call.arguments
        if path.endswith("path.join") and all(isinstance(one, str) for one in values) and values:
            return None if any(map(is_computed, values)) else _bounded(posixpath.join(*values))
        fields = self.script.own.known.get(call.name)
        if isinstance(fields, Fields) and not call.owner and call.name in self.script.bases:
            return Fields({**fields, **call.arguments})
        function = self.functions.get(call.name)
        if function is not None and call.owner in ("", "self"):
            return self.run(function, _parameters(function, call))
        return None

    def run(self, function: Function, parameters: Mapping[str, Any]) -> Any:
        """Read a function with its arguments; what it returns, None where that is nothing."""
        if function in self.running or len(self.running) > 20:
            return None
        self.ran.add(function)
        self.steps -= RUN_STEPS
        self.running.append(function)
        names = [
            one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        ]
        outer, returned, self.returned = self.known, self.returned, []
        own = self.script.own.known
        self.known = {
            **{key: value for key, value in outer.items() if key not in names},
            **_defaults(function, self.value),
            **{key: own[key] for key in names if key in own},
            **parameters,
        }
        self.body(function.body)
        shared = {name for one in ast.walk(function) if isinstance(one, ast.Global) for name in one.names}
        shared |= {name for name in self.known if "." in name}
        inner, self.known = self.known, outer
        self.known |= {name: inner[name] for name in shared if name in inner}
        found, self.returned = self.returned, returned
        self.running.pop()
        return next((one for one in found if one is not None), None)


def _defaults(function: Function, read: Callable[[ast.expr], Any]) -> dict[str, Any]:
    given = function.args
    first = len(given.args) - len(given.defaults)
    pairs = [*zip(given.args[max(first, 0) :], given.defaults, strict=False)]
    pairs += [
        (one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default
    ]
    return {one.arg: read(default) for one, default in pairs}


def _parameters(function: Function, call: Call) -> dict[str, Any]:
    """The arguments of a call by the names that its function has for them."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if names[:1] == ["self"] else names
    return dict(zip(names, call.positional, strict=False)) | call.arguments


def _names(node: ast.expr) -> list[ast.Name]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Name)]


def _inside(part: ast.expr) -> ast.expr:
    """The expression in a part of an f-string; its form is left out where there is none."""
    if isinstance(part, ast.FormattedValue) and part.format_spec is None and part.conversion == -1:
        return part.value
    return part


def _number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e12:
        raise TypeError("no number that a script computes with")
    return value


def _bounded(value: Any) -> Any:
    """A value that was put together. Raises: ValueError where it is longer than a configuration's."""
    if isinstance(value, str):
        size = len(value)
    else:
        size, parts = 0, [value]
        while parts and size <= MOST_LETTERS:
            one = parts.pop()
            size += 1 + (len(one) if isinstance(one, str) else 0)
            if isinstance(one, Mapping):
                parts += [*cast(Mapping[Any, Any], one).values()]
            elif isinstance(one, list):
                parts += cast(list[Any], one)
    if size > MOST_LETTERS:
        raise ValueError("longer than a value of a configuration")
    return value
