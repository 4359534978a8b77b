"""Parameters of reward functions, read from their files without running a line. No torch."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from memtrain.errors import Fault, RecipeError
from memtrain.recipes.sections.rewards import RewardFunction, Rewards
from memtrain.trainers.online.rewards.builtin import BUILTINS
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
        bound = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
        bound |= {(one.asname or one.name) for one in ast.walk(tree) if isinstance(one, ast.alias)}
        bound |= {one.name for one in ast.walk(tree) if isinstance(one, Declared | ast.ClassDef)}
        if bound & {name, "*"}:
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
