"""The shape of the code: purposes, sources, floors. docs: CONTRIBUTING.md."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "memtrain").rglob("*.py"))
LIGHT = ("recipes", "memory", "cli")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


TEXTS = {name_of(path): path.read_text() for path in FILES}
TREES = {name: ast.parse(text) for name, text in TEXTS.items()}


def floor_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "memtrain").parts
    return parts[0] if len(parts) > 1 else ""


def test_the_first_line_of_a_module_is_its_purpose():
    silent = [
        name
        for name, tree in TREES.items()
        if not (ast.get_docstring(tree) or "").partition("\n")[0].endswith((".", "?"))
    ]
    assert not silent


def test_no_torch_above_a_function_in_the_light_floors():
    heavy = {
        "torch",
        "transformers",
        "accelerate",
        "datasets",
        "peft",
        "bitsandbytes",
        "deepspeed",
        "liger_kernel",
    }
    found: list[str] = []
    for path in FILES:
        if floor_of(path) not in LIGHT:
            continue
        for node in top_level(TREES[name_of(path)]):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found += [f"{name_of(path)}: {name}" for name in names if name.split(".")[0] in heavy]
    assert not found


def top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import; `if TYPE_CHECKING:` bodies do not."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        waiting.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


def test_the_light_floors_are_imported_whole_without_torch():
    """Through everything they import, the trainers' floor included."""
    modules = [
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in FILES
        if floor_of(path) in LIGHT
    ]
    code = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n    assert 'transformers' not in sys.modules, name\n"
    )
    reported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert reported.returncode == 0, reported.stderr


def test_every_memory_strategy_names_its_source():
    pages = {name: text for name, text in TEXTS.items() if "\nSTRATEGY = " in text}
    assert len(pages) > 20
    assert not [name for name, text in pages.items() if not re.search(r"^\s*Source: \S", text, re.MULTILINE)]


def test_every_loss_names_its_source():
    """In its own docstring, or once in the module's."""
    silent: list[str] = []
    for path in FILES:
        if not name_of(path).startswith("memtrain/trainers/losses/"):
            continue
        tree = TREES[name_of(path)]
        for node in functions(tree):
            reported = (ast.get_docstring(node) or "") + (ast.get_docstring(tree) or "")
            if node.name.endswith("_loss") and not node.name.startswith("_") and "Source: " not in reported:
                silent.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert not silent


def test_nothing_is_left_unfinished():
    unfinished = re.compile(r"raise NotImplementedError|\b(FIXME|XXX|TODO(?!\())")
    assert not [name for name, text in TEXTS.items() if unfinished.search(text)]


def test_every_public_function_says_what_comes_out():
    silent = [
        f"{name_of(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in TREES[name_of(path)].body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not silent


def test_imports_are_absolute():
    relative = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(TREES[name_of(path)])
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_configurations_are_made_in_one_place_that_lets_no_model_choose_code():
    """docs/security.md: transformers would run what `attn_implementation` of a config.json names."""
    makers = re.compile(r"AutoConfig\.(for_model|from_pretrained)")
    found = [name_of(path) for path in FILES if makers.search(path.read_text())]
    assert len(found) == 1, found


def test_ranks_send_each_other_no_pickles():
    """docs/security.md: torch's collectives for objects unpickle what they are sent."""
    collectives = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\(")
    assert not [name_of(path) for path in FILES if collectives.search(path.read_text())]


def test_the_tree_in_the_readme_says_the_purposes_of_the_modules():
    """A line `  path/file.py   words` of a README tree must be the first words of that module's docstring."""
    readme = (ROOT / "README.md").read_text()
    wrong: list[str] = []
    for path, words in re.findall(r"^\s*(memtrain/[\w/]+\.py)\s{2,}(.+)$", readme, re.MULTILINE):
        docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
        if not docstring.startswith(words.strip().rstrip(".")):
            wrong.append(f"{path}: {words}")
    assert not wrong


def test_nothing_that_is_kept_names_a_machine():
    kept = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    texts = [ROOT / name for name in kept if Path(name).suffix in (".py", ".md", ".yaml", ".json", ".toml")]
    home = re.compile(r"(?<![\w.])/(home|Users|root)/\w+")
    assert not [name_of(path) for path in texts if path.is_file() and home.search(path.read_text())]


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """The modules of the package that a module names anywhere: also in its functions, and for types only."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{one.name}" for one in node.names}
            found |= members & modules or {node.module}
    return found & modules


def test_no_module_needs_itself_again():
    """Packages are left out: their `__init__` holds a purpose, and what a user of the API imports."""
    trees = {name.removesuffix(".py").replace("/", "."): tree for name, tree in TREES.items()}
    modules = {name for name in trees if not name.endswith(".__init__")}
    needed = {name: imported(trees[name], modules) - {name} for name in modules}
    assert sum(map(len, needed.values())) > len(modules)
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
