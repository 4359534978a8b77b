"""Defects planted one by one: does a test notice each of them, and `memtrain verify` those within its claim?

    python benchmarks/mutants.py                      # all of benchmarks/mutants.toml, tests and verify
    python benchmarks/mutants.py --only kl --no-verify
    python benchmarks/mutants.py --new                # those that were never run; the others' results stay
    python benchmarks/mutants.py --check              # every snippet is there, once; nothing is run

A defect is a text that stands once in memtrain/ and what stands in its place. It is found where a named test
file fails that passes without it. One process imports what is heavy (torch, transformers), and forks for each
defect; memtrain is imported in the fork alone, from a copy of the tree in which the defect stands. A text
that is gone, or stands twice, ends everything: the list is wrong then, not the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from result_files import write_result

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
RESULT = Path(__file__).parent / "results" / "mutants.json"
LIMIT_S = 400
"""A defect may make a loop endless. The slowest file takes a fifth of this on a busy machine."""
FAILED, PASSED = 1, 0
"""Exit codes of pytest; of `memtrain verify` too."""
HEAVY = ("torch", "transformers", "peft", "numpy", "pytest", "hypothesis", "tokenizers", "pydantic", "typer")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted defect."""

    name: str
    area: str
    before: str
    after: str
    tests: tuple[str, ...]
    """Names of test files, without ending, and without folder but the first one in tests/ where two have a
    name."""
    verify: str | None
    """The recipe by which `memtrain verify` must find it; None where it is beyond its claim."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was seen of a defect."""

    name: str
    area: str
    file: str
    tests: str
    """`found`, `survived`, `broken` (the tests could not be collected), `endless`."""
    first_failure: str
    verify: str
    """The same; empty where it is not asked."""
    seconds: float
    commit: str = ""
    """Of the tree that it was planted in."""


def read_list(path: Path = LIST) -> tuple[list[Mutant], dict[str, list[str]]]:
    """(the defects, the recipes of `memtrain verify` by name)."""
    given = tomllib.loads(path.read_text(encoding="utf-8"))
    mutants = [
        Mutant(one["name"], one["area"], one["before"], one["after"], tuple(one["tests"]), one.get("verify"))
        for one in given["mutant"]
    ]
    names = [one.name for one in mutants]
    assert len(set(names)) == len(names), "Two defects have one name."
    return mutants, given["verify"]


def places_of(mutants: Sequence[Mutant], tree: Path) -> dict[str, Path]:
    """The one file that each defect's text stands in, by the defect's name. Every file is read once.

    Raises: SystemExit that names every text that stands nowhere, or more than once.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((tree / "memtrain").rglob("*.py"))}
    places: dict[str, Path] = {}
    faults: list[str] = []
    for mutant in mutants:
        counts = {path: count for path, text in texts.items() if (count := text.count(mutant.before))}
        if sum(counts.values()) == 1:
            places[mutant.name] = next(iter(counts))
        else:
            said = ", ".join(f"{path.relative_to(tree)} ({count})" for path, count in counts.items())
            faults.append(f"{mutant.name}: its text stands {said or 'nowhere'}:\n{mutant.before}")
    if faults:
        raise SystemExit("\n".join(faults))
    return places


def test_files(names: Sequence[str], tree: Path) -> list[str]:
    """The test files of these names. Raises: SystemExit where there is not one of a name."""
    files: list[str] = []
    every = sorted((tree / "tests").rglob("test_*.py"))
    for given in names:
        floor, _, name = given.rpartition("/")
        found = [path for path in every if path.stem == name and path.is_relative_to(tree / "tests" / floor)]
        if len(found) != 1:
            raise SystemExit(f"there are {len(found)} test files {name}.py in tests/{floor}")
        files.append(str(found[0].relative_to(tree)))
    return files


def copy_tree(folder: Path) -> Path:
    """A copy of what tests need, without compiled files: a stale one would hide a defect."""
    tree = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("memtrain", "tests", "configs", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "Makefile"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)
    return tree


@contextmanager
def planted(mutant: Mutant, tree: Path) -> Iterator[Path]:
    """The tree with the defect in it."""
    path = places_of([mutant], tree)[mutant.name]
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        yield path
    finally:
        path.write_text(sound, encoding="utf-8")


def in_fork(tree: Path, log: Path, arguments: Sequence[str], *, is_verify: bool) -> int | None:
    """Exit code of pytest, or of `memtrain verify`, on the tree; None where it did not end in time."""
    log.write_text("")
    child = os.fork()
    if child == 0:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_TRUNC | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = 70
        try:
            code = _run(tree, arguments, is_verify=is_verify)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 70
        finally:
            sys.stdout.flush()
            os._exit(code)
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run(tree: Path, arguments: Sequence[str], *, is_verify: bool) -> int:
    """Inside the fork: memtrain is imported for the first time, from the tree."""
    assert not any(name.split(".")[0] == "memtrain" for name in sys.modules), "memtrain is imported already."
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    if is_verify:
        from memtrain.cli.app import run

        return run(list(arguments))
    import pytest

    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-n", "0", *MARKED, *arguments]))


MARKED = ("-m", "not slow and not gpu and not slurm and not vllm", "--hypothesis-seed=0", "--tb=line")
"""The fast tests, by the same examples every time."""


def outcome(code: int | None) -> str:
    """What an exit code says of a defect."""
    if code is None:
        return "endless"
    return {FAILED: "found", PASSED: "survived"}.get(code, "broken")


def first_failure(log: Path) -> str:
    """The first test that failed."""
    match = re.search(r"^FAILED \S*?([^/\s]+\.py::[^ \n]+)", log.read_text(errors="replace"), re.MULTILINE)
    return match.group(1) if match else ""


def check_sound(tree: Path, log: Path, files: Sequence[str], recipes: dict[str, list[str]]) -> None:
    """Raise SystemExit where a test file, or a recipe of `memtrain verify`, fails without any defect."""
    for file in files:
        if in_fork(tree, log, [file], is_verify=False) != PASSED:
            raise SystemExit(f"{file} fails without a defect:\n{log.read_text(errors='replace')[-2000:]}")
    for name, arguments in recipes.items():
        if in_fork(tree, log, ["verify", *arguments], is_verify=True) != PASSED:
            raise SystemExit(
                f"verify {name} fails without a defect:\n{log.read_text(errors='replace')[-2000:]}"
            )


def look_for(mutant: Mutant, tree: Path, log: Path, recipes: dict[str, list[str]], commit: str) -> Found:
    """Plant one defect, run its tests, and `memtrain verify` where it is asked."""
    started = time.monotonic()
    with planted(mutant, tree) as path:
        tests = outcome(in_fork(tree, log, test_files(mutant.tests, tree), is_verify=False))
        failure = first_failure(log)
        seen = ""
        if mutant.verify is not None and recipes:
            code = in_fork(tree, log, ["verify", *recipes[mutant.verify]], is_verify=True)
            seen = outcome(code) if code in (FAILED, PASSED, None) else "found"
    file = str(path.relative_to(tree))
    seconds = round(time.monotonic() - started, 1)
    return Found(mutant.name, mutant.area, file, tests, failure, seen, seconds, commit)


def commit_here() -> str:
    """The commit of this tree."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def read_results(path: Path) -> dict[str, Found]:
    """What was found before, by the defect's name."""
    if not path.is_file():
        return {}
    made = json.loads(path.read_text(encoding="utf-8"))
    return {one["name"]: Found(**{"commit": made["commit"]} | one) for one in made["each"]}


def facts() -> dict[str, Any]:
    """Where and of what the result was made."""
    import torch

    return {
        "command": " ".join(["python", "benchmarks/mutants.py", *sys.argv[1:]]),
        "commit": commit_here(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Plant the defects that are asked for, and write what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="defects whose name or area matches this expression")
    parser.add_argument("--new", action="store_true", help="defects that the results lack")
    parser.add_argument("--check", action="store_true", help="look for the texts, and run nothing")
    parser.add_argument("--no-verify", action="store_true", help="run the tests alone")
    parser.add_argument("--no-sound", action="store_true", help="do not run the tests without a defect first")
    parser.add_argument("--jobs", type=int, default=1, help="processes that look side by side")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin with no defect after so many")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    given = parser.parse_args()
    mutants, recipes = read_list()
    known = read_results(given.output)
    chosen = [one for one in mutants if re.search(given.only, one.name) or re.search(given.only, one.area)]
    chosen = [one for one in chosen if not (given.new and one.name in known)]
    places_of(chosen, ROOT)
    test_files(sorted({name for one in chosen for name in one.tests}), ROOT)
    if given.check:
        print(f"{len(chosen)} defects, each in one place")
        return
    began = time.monotonic()
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in HEAVY:
        __import__(name)
    asked = {} if given.no_verify else {one.verify: recipes[one.verify] for one in chosen if one.verify}
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        parts = [Path(place) / str(number) for number in range(given.jobs)]
        files = [] if given.no_sound else test_files(sorted({t for one in chosen for t in one.tests}), ROOT)
        recipes_asked = [] if given.no_sound else sorted(asked)
        children: list[int] = []
        for number, part in enumerate(parts):
            part.mkdir()
            child = os.fork()
            if child == 0:
                sound = files[number :: given.jobs], recipes_asked[number :: given.jobs]
                _work(part, chosen[number :: given.jobs], asked, *sound, until=began + 60 * given.minutes)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        for part in parts:
            lines = (part / "found.jsonl").read_text().splitlines() if any(part.glob("found.jsonl")) else []
            known |= {one["name"]: Found(**one) for one in map(json.loads, lines)}
    _write(given.output, [known[one.name] for one in mutants if one.name in known], len(mutants))
    if any(codes):
        raise SystemExit("a process ended before its defects were looked for")


def _work(
    part: Path,
    chosen: Sequence[Mutant],
    asked: dict[str, list[str]],
    files: list[str],
    recipes: list[str],
    *,
    until: float,
) -> NoReturn:
    """What one process does: its share of the sound files and recipes, and of the defects."""
    code = 1
    try:
        tree, log = copy_tree(part), part / "log"
        check_sound(tree, log, files, {name: asked[name] for name in recipes})
        print(f"sound: {len(files)} test files, {len(recipes)} recipes", flush=True)
        commit = commit_here()
        for one in chosen:
            if time.monotonic() > until:
                break
            made = look_for(one, tree, log, asked, commit)
            with (part / "found.jsonl").open("a") as file:
                file.write(json.dumps(asdict(made)) + "\n")
            seen = f"{made.tests:9} {made.verify:9} {made.seconds:6.1f} s  {made.name}  {made.first_failure}"
            print(seen, flush=True)
        code = 0
    except SystemExit as ended:
        print(ended, flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _write(output: Path, found: Sequence[Found], num_listed: int) -> None:
    asked = [one for one in found if one.verify]
    said = facts() | {
        "listed": num_listed,
        "planted": len(found),
        "found_by_tests": sum(one.tests == "found" for one in found),
        "within_verify": len(asked),
        "found_by_verify": sum(one.verify == "found" for one in asked),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    made = said | {"each": [asdict(one) for one in found]}
    write_result(output, made)
    print(json.dumps(said))
    missed = [one.name for one in found if one.tests != "found" or one.verify not in ("", "found")]
    if missed:
        raise SystemExit(f"not found: {', '.join(missed)}")


if __name__ == "__main__":
    main()
