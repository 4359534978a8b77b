"""Functions of a training script: those that judge completions are written into a file beside the recipe."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence

from memtrain.recipes.importers.python_script import Script
from memtrain.recipes.importers.script_arguments import Function

_TRAINS = ("from_pretrained", "load_dataset", "get_peft_model", "train", "parse_args")
"""Calls of a script's lines that are never written into another file."""


def only_renders(script: Script, name: object) -> bool:
    """Whether a function only renders conversations by the tokenizer's chat template, as memtrain does."""
    function = next(
        (one for one in ast.walk(script.tree) if isinstance(one, Function) and one.name == str(name)), None
    )
    if function is None:
        return False
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
    called = {ast.unparse(one.func).rpartition(".")[2] for one in calls}
    kept = {"apply_chat_template", "removeprefix", "append", "zip", "len", "range"}
    texts = [
        one.value
        for call in calls
        if ast.unparse(call.func).endswith("removeprefix")
        for one in call.args
        if isinstance(one, ast.Constant)
    ]
    read = {
        one.slice.value
        for one in ast.walk(function)
        if isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Constant)
    }
    adds = any(isinstance(one, ast.BinOp | ast.JoinedStr) for one in ast.walk(function))
    thinks = any(
        word.arg not in ("tokenize", "add_generation_prompt") for call in calls for word in call.keywords
    )
    is_bos = all(text in ("<bos>", "<|begin_of_text|>", "<s>") for text in texts)
    return (
        "apply_chat_template" in called
        and called <= kept
        and len(read) == 1
        and is_bos
        and not (adds or thinks)
    )


def functions_text(
    script: Script, names: Sequence[str], origin: str, before: int
) -> tuple[str, dict[str, list[str]]]:
    """(a module with functions of a script and all that they use of it; those that cannot be written, by the
    reason: that nothing defines them before a line, or that they use what the script loads)."""
    defined = dict(_definitions([one for one in script.tree.body if one.lineno < before]))
    wanted: list[ast.stmt] = []
    lost: dict[str, list[str]] = {}
    for name in names:
        needed, missing = _needed(name, defined)
        if missing == [name]:
            lost.setdefault("no functions of the script itself", []).append(name)
        elif missing:
            lost.setdefault(f"with {', '.join(missing)} of the script as it runs", []).append(name)
        else:
            wanted += [one for one in needed if one not in wanted]
    order = [one for one in ast.walk(script.tree) if isinstance(one, ast.stmt) and one in wanted]
    order.sort(key=lambda one: (not isinstance(one, ast.Import | ast.ImportFrom), one.lineno))
    if not order:
        return "", lost
    body = "\n\n".join(ast.unparse(one) for one in order)
    return f'"""Reward functions of {origin}, as they stand there."""\n\n{body}\n', lost


def _definitions(lines: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """(name, a line that gives it its meaning) of a script's own names."""
    for line in lines:
        if isinstance(line, Function | ast.ClassDef):
            yield line.name, line
        elif isinstance(line, ast.Import | ast.ImportFrom):
            for one in line.names:
                yield (one.asname or one.name.partition(".")[0]), line
        elif isinstance(line, ast.Assign):
            for target in line.targets:
                for one in ast.walk(target):
                    if isinstance(one, ast.Name):
                        yield one.id, line
        elif isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id, line


def _needed(name: str, defined: dict[str, ast.stmt]) -> tuple[list[ast.stmt], list[str]]:
    """(the lines that a function needs, itself among them; the names that it has to have and has not)."""
    if not isinstance(defined.get(name), Function):
        return [], [name]
    needed: list[ast.stmt] = []
    missing: list[str] = []
    waiting = [name]
    seen: set[str] = set()
    while waiting:
        one = waiting.pop()
        line = defined.get(one)
        seen.add(one)
        if line is None:
            missing.append(one)
            continue
        calls = {
            ast.unparse(call.func).rpartition(".")[2] for call in ast.walk(line) if isinstance(call, ast.Call)
        }
        if not isinstance(line, Function | ast.ClassDef) and (
            calls & {*_TRAINS} or "Trainer" in "".join(calls)
        ):
            missing.append(one)
            continue
        needed.append(line)
        waiting += [used for used in _free_names(line) if used not in seen and used not in waiting]
    return needed, missing


def _free_names(line: ast.stmt) -> list[str]:
    """Names that a line reads and does not set itself."""
    own = {one.arg for one in ast.walk(line) if isinstance(one, ast.arg)} | {"__name__", "__file__"}
    own |= {
        str(one.name)
        for one in ast.walk(line)
        if isinstance(
            one, ast.ExceptHandler | ast.MatchAs | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        )
    }
    own |= {
        alias.asname or alias.name.partition(".")[0]
        for one in ast.walk(line)
        if isinstance(one, ast.Import | ast.ImportFrom)
        for alias in one.names
    }
    names = [one for one in ast.walk(line) if isinstance(one, ast.Name)]
    if isinstance(line, Function | ast.ClassDef):
        own |= {one.id for one in names if isinstance(one.ctx, ast.Store)}
    read = [one.id for one in names if isinstance(one.ctx, ast.Load)]
    return [one for one in dict.fromkeys(read) if one not in own and not hasattr(builtins, one)]
