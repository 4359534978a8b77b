"""Parameters of reward functions and environments, read from their files without running a line. No torch."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memtrain.errors import Fault, RecipeError
from memtrain.recipes.sections.rewards import Environment, RewardFunction, Rewards
from memtrain.trainers.online.rewards.builtin import BUILTINS
from memtrain.trainers.online.rewards.environment import (
    PLACE,
    check_environment,
    environment_class,
    no_environment,
)
from memtrain.trainers.online.rewards.functions import Function, looked_at, reward_file

Declared = ast.FunctionDef | ast.AsyncFunctionDef


def declared_functions(rewards: Rewards) -> dict[int, Function]:
    """The functions of the section that can be judged by their text, by their place; they cannot be called.

    Built-ins, and plain functions of a file. What a file imports, makes or decorates, and packages, are found
    out when the run begins: nothing is run here, since a file may load a judge.
    Raises: RecipeError with all faults at once: no such file or function, no Python, parameters that no call
    could fill.
    """
    found: dict[int, Function] = {}
    faults: list[Fault] = []
    for index, recipe in enumerate(rewards.functions):
        try:
            function = _declared(recipe, f"{rewards.KEY}.functions.{index}") if recipe.model is None else None
        except RecipeError as error:
            faults += error.faults
        else:
            if function is not None:
                found[index] = function
    if faults:
        raise RecipeError(faults)
    return found


def _declared(recipe: RewardFunction, where: str) -> Function | None:
    module, _, name = str(recipe.function).rpartition(":")
    if not module:
        return looked_at(recipe, BUILTINS[name], where, is_builtin=True)
    if not (module.endswith(".py") or "/" in module):
        return None
    tree = _parsed(reward_file(module, where), where)
    named = [one for one in tree.body if isinstance(one, Declared)]
    found = [one for one in named if one.name == name]
    if not found:
        defined = {one.name for one in ast.walk(tree) if isinstance(one, Declared | ast.ClassDef)}
        if (_bound(tree) | defined) & {name, "*"}:
            return None
        has = ", ".join(one.name for one in named if one.name[0] != "_")
        raise RecipeError(
            f"{module} has no function '{name}'", where, f"name one of its functions: {has or 'it has none'}"
        )
    if found[-1].decorator_list:
        return None

    def call(**given: Any) -> None:
        raise AssertionError("A declared function is not called.")

    call.__signature__ = _signature(found[-1])  # pyright: ignore[reportFunctionMemberAccess]
    return looked_at(recipe, call, where, is_builtin=False)


def _bound(tree: ast.Module) -> set[str]:
    """Names that a file imports or makes; `*` where it imports all of another."""
    names = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
    return names | {(one.asname or one.name) for one in ast.walk(tree) if isinstance(one, ast.alias)}


def check_declared_environment(recipe: Environment, columns: Sequence[str] | None = None) -> None:
    """Check the class of an environment by the text of its file, and what its `reset` takes; nothing is run.

    `columns`: of the rows, where they are known. A class that is imported, made or decorated, or that
    inherits from one of another file, is found out when the run begins.
    Raises: RecipeError when there is no such file or class, it has no `step`, or `reset` needs what the rows
    do not have.
    """
    module, _, name = recipe.path.rpartition(":")
    if not (module.endswith(".py") or "/" in module):
        return
    tree = _parsed(reward_file(module, PLACE), PLACE)
    classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
    if any(isinstance(one, Declared) and one.name == name for one in tree.body):
        raise no_environment(recipe)
    if name not in classes:
        if _bound(tree) & {name, "*"}:
            return
        known = ", ".join(one for one in classes if one[0] != "_")
        raise RecipeError(
            f"{module} has no class '{name}'", PLACE, f"name one of its classes: {known or 'it has none'}"
        )
    methods, is_whole = _methods(classes, name)
    if "step" not in methods and is_whole:
        raise no_environment(recipe)
    reset = methods.get("reset")
    if reset is not None and columns is not None and not reset.decorator_list:
        given = [*_signature(reset).parameters.values()][1:]
        check_environment(environment_class(recipe, object, given), columns)


def _methods(classes: Mapping[str, ast.ClassDef], name: str) -> tuple[dict[str, Declared], bool]:
    """(methods of a class with those that it inherits in its file, whether there are no others)."""
    made = classes[name]
    found: dict[str, Declared] = {}
    is_whole = not made.decorator_list and not made.keywords
    for base in reversed(made.bases):
        if isinstance(base, ast.Name) and base.id in classes and base.id != name:
            inherited, is_known = _methods(classes, base.id)
            found |= inherited
            is_whole &= is_known
        else:
            is_whole &= isinstance(base, ast.Name) and base.id == "object"
    own = [one for one in made.body if isinstance(one, Declared)]
    is_whole &= not any(isinstance(one, ast.Assign | ast.AnnAssign) and _is_step(one) for one in made.body)
    return found | {one.name: one for one in own}, is_whole


def _is_step(assigned: ast.Assign | ast.AnnAssign) -> bool:
    """Whether a line of a class makes its `step` otherwise than by `def`."""
    targets = assigned.targets if isinstance(assigned, ast.Assign) else [assigned.target]
    return any(isinstance(one, ast.Name) and one.id == "step" for one in targets)


def _parsed(path: Path, where: str) -> ast.Module:
    try:
        return ast.parse(path.read_text(), str(path))
    except (SyntaxError, ValueError) as error:
        at = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else where
        raise RecipeError(f"'{path}' is not valid Python: {error}", at, "fix it") from None


def _signature(function: Declared) -> inspect.Signature:
    """Names, kinds, and whether there is a default."""
    given, kinds = function.args, inspect.Parameter
    by_place = [*given.posonlyargs, *given.args]
    first_default = len(by_place) - len(given.defaults)
    parameters = [
        kinds(
            one.arg,
            kinds.POSITIONAL_ONLY if place < len(given.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD,
            default=None if place >= first_default else kinds.empty,
        )
        for place, one in enumerate(by_place)
    ]
    parameters += [kinds(given.vararg.arg, kinds.VAR_POSITIONAL)] if given.vararg else []
    parameters += [
        kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    parameters += [kinds(given.kwarg.arg, kinds.VAR_KEYWORD)] if given.kwarg else []
    return inspect.Signature(parameters)
