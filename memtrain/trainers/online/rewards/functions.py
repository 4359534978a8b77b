"""Reward functions by name: found, imported, and their parameters read. No torch."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from memtrain.errors import Fault, RecipeError
from memtrain.recipes.sections.rewards import RewardFunction, Rewards
from memtrain.trainers.online.rewards.builtin import BUILTINS

ENVIRONMENT = "environment"
"""Argument of recipes with an environment: the object that answered the completion."""
GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments of every row beside its columns. A function that is called for each takes `prompt`, `completion`
and `completion_ids`."""


@dataclass(frozen=True, slots=True)
class Function:
    """A reward function, ready to be called."""

    recipe: RewardFunction
    call: Callable[..., Any]
    is_batched: bool
    """Whether the function takes all completions at once."""
    is_async: bool
    is_builtin: bool
    takes: tuple[str, ...]
    """Parameters that can be given by name, without `recipe.args`."""
    needs: tuple[str, ...]
    """Parameters without a default."""
    takes_all: bool
    """Whether the function has `**kwargs`: every column is given."""

    @property
    def label(self) -> str:
        """Name in the metrics."""
        return self.recipe.label


def load_functions(rewards: Rewards) -> tuple[Function, ...]:
    """Every function of the section.

    Raises: RecipeError with all faults at once: no such file, module or function; not callable so.
    """
    loaded: list[Function] = []
    faults: list[Fault] = []
    for index, recipe in enumerate(rewards.functions):
        try:
            loaded.append(_load(recipe, f"{rewards.KEY}.functions.{index}"))
        except RecipeError as error:
            faults += error.faults
    if faults:
        raise RecipeError(faults)
    return tuple(loaded)


def check_columns(
    functions: Mapping[int, Function], columns: Sequence[str], rewards: Rewards | type[Rewards] = Rewards
) -> None:
    """Raise RecipeError when a function, by its place in the section, needs columns that the rows lack."""
    faults: list[Fault] = []
    for index, function in functions.items():
        where = f"{rewards.KEY}.functions.{index}"
        renamed = function.recipe.columns
        for taken, column in renamed.items():
            if column not in columns:
                what = f"reward '{function.label}' needs the column '{column}' as {taken}"
                faults.append(Fault(what, where, _has(columns)))
        given = {*GIVEN, "prompt", "completion", *columns, *renamed}
        missing = [need for need in function.needs if need not in given]
        if missing:
            what = f"reward '{function.label}' needs {' and '.join(missing)}, which the rows do not have"
            fix = f"{_has(columns)}; name another with columns: {{{missing[0]}: ...}} of that reward, "
            faults.append(Fault(what, where, f"{fix}or a value with args: {{{missing[0]}: ...}}"))
    if faults:
        raise RecipeError(faults)


def _has(columns: Sequence[str]) -> str:
    return f"beside the prompt they have {', '.join(columns) or 'no column'}"


def _load(recipe: RewardFunction, where: str) -> Function:
    if recipe.model is not None:
        return Function(recipe, _asked_apart, True, False, True, (), (), False)
    module_name, _, name = str(recipe.function).rpartition(":")
    if not module_name:
        return looked_at(recipe, BUILTINS[name], where, is_builtin=True)
    call = named_in_module(str(recipe.function), where)
    return looked_at(recipe, call, where, is_builtin=False)


def named_in_module(path: str, where: str) -> Any:
    """Object that `./file.py:name` or `package.module:name` stands for.

    Raises: RecipeError when there is no such file, module or name, or it cannot be imported.
    """
    module_name, _, name = path.rpartition(":")
    is_file = module_name.endswith(".py") or "/" in module_name
    module = (
        _from_file(reward_file(module_name, where), where) if is_file else _from_package(module_name, where)
    )
    if not callable(getattr(module, name, None)):
        has = [
            one
            for one, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value)) and one[0] != "_"
        ]
        raise RecipeError(
            f"{module_name} has no function '{name}'",
            where,
            f"name one of its functions: {', '.join(has) or 'it has none'}",
        )
    return getattr(module, name)


def _asked_apart() -> None:
    """Stands for a reward model, which is asked on all ranks (rewards/models.py)."""
    raise AssertionError("A reward model is no function.")


def reward_file(name: str, where: str) -> Path:
    """The file of a reward function. Raises: RecipeError when it is not there."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise RecipeError(f"there is no file '{path}'", where, "paths are relative to the current folder")
    return path


def _from_file(path: Path, where: str) -> ModuleType:
    name = f"memtrain_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "A .py file has a loader."
    assert spec.loader is not None, "A .py file has a loader."
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # A reward file may import its neighbours, as it could if it were run.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RecipeError(*_import_fault(str(path), error, where)) from error
    return module


def _from_package(name: str, where: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise RecipeError(*_import_fault(name, error, where)) from error


def _import_fault(what: str, error: BaseException, where: str) -> tuple[str, str, str]:
    return (
        f"'{what}' cannot be imported: {type(error).__name__}: {error}",
        where,
        "fix it; `python -c 'import ...'` from the same folder shows where it fails",
    )


def looked_at(recipe: RewardFunction, call: Callable[..., Any], where: str, *, is_builtin: bool) -> Function:
    """The function with its parameters.

    Raises: RecipeError when no call could fill its parameters.
    """
    parameters = inspect.signature(call).parameters
    by_name = [
        one for one in parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    unnamed = [one.name for one in parameters.values() if one.kind is one.POSITIONAL_ONLY]
    names = [one.name for one in by_name]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    is_batched = "completions" in names
    if unnamed:
        raise RecipeError(
            f"reward '{recipe.label}' takes {unnamed[0]} by position only",
            where,
            "remove the / from its parameters",
        )
    if not takes_all and not {"completions", "completion", "completion_ids", ENVIRONMENT} & set(names):
        raise RecipeError(
            f"reward '{recipe.label}' has no parameter for completions "
            f"({', '.join(names) or 'nothing at all'})",
            where,
            "give it a parameter `completions` (all at once) or `completion` (one by one)",
        )
    if recipe.pairwise and not (is_batched or takes_all):
        raise RecipeError(
            f"judge '{recipe.label}' has no parameter for completions "
            f"({', '.join(names) or 'nothing at all'})",
            where,
            "give it a parameter `completions`: a list of pairs, and return 0, 1 or None for each",
        )
    unknown = [name for name in (*recipe.args, *recipe.columns) if name not in names and not takes_all]
    if unknown:
        raise RecipeError(
            f"reward '{recipe.label}' has no parameter '{unknown[0]}'",
            where,
            f"use its own: {', '.join(names)}",
        )
    left = [one for one in by_name if one.name not in recipe.args]
    return Function(
        recipe=recipe,
        call=call,
        is_batched=is_batched or recipe.pairwise,
        is_async=inspect.iscoroutinefunction(call),
        is_builtin=is_builtin,
        takes=tuple(one.name for one in left),
        needs=tuple(one.name for one in left if one.default is one.empty),
        takes_all=takes_all,
    )


def arguments(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call: its share of `given`, renamed columns, and its args."""
    renamed = {taken: given[column] for taken, column in function.recipe.columns.items()}
    everything = {**given, **renamed}
    taken = everything if function.takes_all else {k: v for k, v in everything.items() if k in function.takes}
    return {**taken, **function.recipe.args}
