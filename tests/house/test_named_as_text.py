"""Modules, attributes and files that are named as text are there: no import and no type checker sees them."""

import ast
import importlib
import pkgutil
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import memtrain
from memtrain.cli.app import COMMANDS, Command
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.registry import METHODS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXTS = (".py", ".md", ".toml", ".j2", ".sbatch", ".sh", ".yaml", ".yml")
HISTORY = ("CHANGELOG.md", "benchmarks/results/", "docs/decisions/")
"""Text about a time when other modules were there."""
DOTTED = re.compile(r"(?<![\w./-])memtrain(?:\.[A-Za-z_]\w*)+")
FILE_SUFFIXES = ("yaml", "json", "toml")
PROGRAM = re.compile(r"""-m["']?,?\s+["']?(memtrain(?:\.\w+)+)""")
IMPORT_IN_TEXT = re.compile(r"from (memtrain(?:\.\w+)*) import ([\w, ]+)")
SOURCE_PATH = re.compile(r"(?<![\w/.-])memtrain/(?:[\w-]+/)*[\w-]+\.(?:py|j2)\b")
OWN_INTERPRETER = ("memtrain.trainers.online.vllm.worker",)
"""Run by an interpreter that has vLLM; tests/trainers/online/vllm/test_sampler.py runs it."""

NEEDS_TRITON = () if find_spec("triton") else ("memtrain.trainers.losses.head.triton_tiles",)
"""Imported once a plan has found triton; tests/trainers/losses/head/test_fused_tiles.py runs it there."""

ATTENDING = [str(one) for one in AttentionBackend if one is not AttentionBackend.TRANSFORMERS]
FILLED_IN: dict[str, list[str]] = {
    "page": [
        ".".join(path.with_suffix("").parts[-2:])
        for path in sorted((ROOT / "memtrain/memory/strategies").glob("*/[a-z]*.py"))
    ],
    "module_name": [verb.target.partition(":")[0] for verb in COMMANDS],
    "backend": ATTENDING,
}
"""What stands for a name within a module's path that is put together."""
FROM_ELSEWHERE = (
    "METHODS[recipe.method].trainer",
    "name",
    "module",
    "package",
    "MODULE",
    "f'deepspeed.runtime.zero.{name}'",
)
"""Modules that a table of methods, a recipe, a message or a package names; the first are tested below."""


@cache
def kept_texts() -> tuple[Path, ...]:
    """Every text file under version control that speaks of the code as it is."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\n") if name and not name.startswith(HISTORY)]
    paths = [ROOT / name for name in names if name.endswith(TEXTS) or name == "Makefile"]
    return tuple(path for path in paths if path.is_file() and path != Path(__file__))


def places(pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    """Every match in those texts, with `file:line`."""
    for path in kept_texts():
        text = path.read_text()
        for found in pattern.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}", found


def named(dotted: str) -> object:
    """The module or attribute of a dotted name.

    Raises: ImportError, AttributeError when it is not there.
    """
    words = dotted.split(".")
    found: object = importlib.import_module(words[0])
    for count, word in enumerate(words[1:], 2):
        if isinstance(found, ModuleType) and not hasattr(found, word):
            importlib.import_module(".".join(words[:count]))
        found = getattr(found, word)
    return found


def missing(names: list[tuple[str, str]]) -> list[str]:
    """`place: why` of the dotted names that lead nowhere."""
    faults: dict[str, str] = {}
    for name in {name for _, name in names if not name.startswith(NEEDS_TRITON)}:
        try:
            named(name)
        except (ImportError, AttributeError) as error:
            faults[name] = str(error)
    return [f"{place}: {faults[name]}" for place, name in names if name in faults]


def test_every_module_of_the_package_imports():
    found = [one.name for one in pkgutil.walk_packages(memtrain.__path__, "memtrain.")]
    assert len(found) > 100
    assert not missing([("the package", name) for name in found if name not in OWN_INTERPRETER])


def test_every_dotted_name_in_a_text_is_there():
    found = [(place, match.group()) for place, match in places(DOTTED)]
    names = [
        (place, name)
        for place, name in found
        if name.split(".")[1] not in FILE_SUFFIXES and not name.startswith(OWN_INTERPRETER)
    ]
    assert len(names) > 500
    assert not missing(names)


def test_every_import_within_a_text_is_there():
    """Code in strings (of tests that start a process) imports what is there."""
    names = [
        (place, f"{match[1]}.{word.split(' as ')[0].strip()}")
        for place, match in places(IMPORT_IN_TEXT)
        for word in match[2].split(",")
        if word.strip()
    ]
    assert not missing([one for one in names if not one[1].startswith(OWN_INTERPRETER)])


def test_every_module_that_is_run_as_a_program_is_one():
    programs = {match[1] for _, match in places(PROGRAM)}
    assert {name.rpartition(".")[2] for name in programs} >= {"worker", "slurm_entry", "slurm_exit", "bench"}
    for name in programs:
        module = importlib.import_module(name)
        assert 'if __name__ == "__main__":' in Path(module.__file__ or "").read_text(), name


def test_the_tracing_worker_is_a_program():
    from memtrain.trainers.tools.trace.client import WORKER

    module = importlib.import_module(WORKER)
    assert 'if __name__ == "__main__":' in Path(module.__file__ or "").read_text()


def test_every_source_file_that_a_text_names_is_there():
    found = [(place, match.group()) for place, match in places(SOURCE_PATH)]
    assert found
    assert not [f"{place}: {name}" for place, name in found if not (ROOT / name).is_file()]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_its_function(command: Command):
    module, _, attribute = command.target.partition(":")
    found = named(f"memtrain.cli.commands.{module}.{attribute}")
    assert callable(found if command.key is None else found[command.key])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_its_trainer(name: str):
    module = importlib.import_module(METHODS[name].trainer)
    assert callable(module.method)
    assert callable(module.feed)


@pytest.mark.parametrize("script", sorted(PROJECT["project"]["scripts"].values()))
def test_every_script_of_the_package_is_there(script: str):
    assert callable(named(script.replace(":", ".")))


def test_every_attention_back_end_attends():
    from memtrain.trainers.model.attention.functions import attend_of
    from memtrain.trainers.model.attention.sliced import KERNELS

    assert all(callable(attend_of(AttentionBackend(backend))) for backend in ATTENDING)
    folder = attend_of.__module__.rpartition(".")[0]
    assert all(isinstance(named(f"{folder}.{backend}.{kernel}"), type) for backend, kernel in KERNELS.items())


def test_every_module_path_that_is_put_together_leads_somewhere():
    """`import_module(f"...{word}")`: the prefix stands in the source, the words in FILLED_IN."""
    names: list[tuple[str, str]] = []
    for path in sorted((ROOT / "memtrain").rglob("*.py")):
        for place, argument in put_together(path):
            if ast.unparse(argument) in FROM_ELSEWHERE:
                continue
            assert isinstance(argument, ast.JoinedStr), f"{place}: {ast.unparse(argument)} is not known here"
            prefix, word = argument.values
            assert isinstance(prefix, ast.Constant)
            assert isinstance(word, ast.FormattedValue)
            names += [(place, f"{prefix.value}{value}") for value in FILLED_IN[ast.unparse(word.value)]]
    assert names
    assert not missing(names)


def put_together(path: Path) -> Iterator[tuple[str, ast.expr]]:
    """The arguments of `import_module` that are no plain text."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_call = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")
        if is_call and not isinstance(node.args[0], ast.Constant):
            yield f"{path.relative_to(ROOT)}:{node.lineno}", node.args[0]


def test_every_file_beside_a_module_is_there():
    """Folders of templates and of tokenizers, and the program that vLLM's own interpreter runs."""
    found: list[str] = []
    for path in sorted((ROOT / "memtrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BinOp) and ast.unparse(node.left) == "Path(__file__).parent":
                assert isinstance(node.right, ast.Constant)
                found.append(str(path.parent / str(node.right.value)))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Path(__file__).with_name":
                found.append(str(path.with_name(ast.literal_eval(node.args[0]))))
    assert len(found) > 4
    assert not [name for name in found if not Path(name).exists()]


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        (lambda: missing([("a", "memtrain.recipes.gone")]), "No module named 'memtrain.recipes.gone'"),
        (lambda: missing([("a", "memtrain.recipes.registry.GONE")]), "No module named"),
        (lambda: missing([("a", "memtrain.errors.MemtrainError.gone")]), "has no attribute 'gone'"),
    ],
)
def test_a_name_that_leads_nowhere_is_found(check: Callable[[], list[str]], fault: str):
    assert fault in check()[0]
