"""Every message that memtrain can print, with file and line: errors as what, where and fix, then all texts.

    python benchmarks/messages.py [--errors] [-o messages.md]

Read from the source, not from runs: each `Fault(...)`, each error of memtrain/errors.py, each bad row and
each refusal of the planner that is made; then every other text of two words or more (warnings, lines of plans
and consoles, words of reports, help), and the text of templates. `{...}` stands where a value is put in.
tests/house/test_messages.py holds that no error lacks place or cure, and that no text uses a retired word.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ERRORS = (
    "MemtrainError",
    "RecipeError",
    "DataError",
    "DoesNotFit",
    "LaunchError",
    "ResumeError",
    "OutOfMemory",
    "Diverged",
    "Interrupted",
    "Fault",
    "refuse",
    "BadRow",
)
SLOTS = {"BadRow": ("what", "fix")}
"""Arguments by their place; all other errors take what, where and fix."""
TEMPLATES = (".j2", ".js")


@dataclass(frozen=True, slots=True)
class Message:
    """One error of the source; a part that is missing is empty."""

    place: str
    kind: str
    what: str
    where: str
    fix: str


def messages() -> list[Message]:
    """Every message of the package, in the order of the files."""
    return [one for path in sorted((ROOT / "memtrain").rglob("*.py")) for one in messages_of(path)]


def messages_of(path: Path) -> Iterator[Message]:
    """The messages that a file makes itself; those that it passes on are in the file that made them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in ERRORS or not (node.args or node.keywords):
            continue
        slots = SLOTS.get(name, ("what", "where", "fix"))
        given = dict(zip(slots, (template(one) for one in node.args), strict=False))
        given |= {one.arg: template(one.value) for one in node.keywords if one.arg in slots}
        if name == "BadRow":
            given["where"] = "{the row's file and line}"
        if given.get("what", "").startswith("*") or is_passed_on(node):
            continue
        place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
        yield Message(place, name, given.get("what", ""), given.get("where", ""), given.get("fix", ""))


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text of the source that is no docstring."""

    place: str
    text: str


def sentences() -> list[Sentence]:
    """Every text of two words or more in the package, in the order of the files; errors among them."""
    files = sorted(path for path in (ROOT / "memtrain").rglob("*") if path.suffix in (".py", *TEMPLATES))
    return [one for path in files for one in sentences_of(path)]


def sentences_of(path: Path) -> Iterator[Sentence]:
    """The texts of a file: string literals that are joined, without docstrings; lines of a template."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix in TEMPLATES:
        for line, text in enumerate(path.read_text().splitlines(), 1):
            if is_sentence(re.sub(r"<[^>]*>|{%.*?%}|{{.*?}}", " ", text)):
                yield Sentence(f"{name}:{line}", text.strip())
        return
    tree = ast.parse(path.read_text())
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.expr) and is_text(node):
            made = template(node)
            if is_sentence(re.sub(r"{[^{}]*}", " ", made)):
                yield Sentence(f"{name}:{node.lineno}", made)
                continue
        waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def is_text(node: ast.expr) -> bool:
    """Whether an expression is a string literal, an f-string, or a sum of such."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return is_text(node.left) or is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_sentence(text: str) -> bool:
    """Whether a text without its values has two words or more."""
    return " " in text.strip() and len(re.findall(r"[A-Za-z]{2,}", text)) > 1


def is_passed_on(node: ast.Call) -> bool:
    """Whether the call is given faults that were made before: a list, a name of one, or `error.faults`."""
    first = node.args[0] if node.args else node.keywords[0].value
    if len(node.args) > 1 or node.keywords[len(node.args) == 0 :]:
        return False
    return not isinstance(first, ast.Constant | ast.JoinedStr | ast.BinOp | ast.IfExp)


def template(node: ast.expr) -> str:
    """The text of an argument, with `{source}` for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(one) for one in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    if isinstance(node, ast.IfExp):
        parts = [template(node.body), template(node.orelse)]
        return " | ".join(part or "(nothing)" for part in parts)
    if isinstance(node, ast.Starred):
        return "*" + ast.unparse(node.value)
    return "{" + ast.unparse(node) + "}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--errors", action="store_true", help="errors alone")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    lines: list[str] = []
    for one in messages():
        lines += [f"{one.place} {one.kind}", f"  error: {one.what}"]
        lines += [f"     at: {one.where}", f"    try: {one.fix}", ""]
    others = [] if asked.errors else sentences()
    lines += [f"{one.place}  {one.text}" for one in others]
    if asked.output is None:
        print("\n".join(lines))
    else:
        asked.output.write_text("\n".join(lines))
    print(f"{len(messages())} errors, {len(others)} texts")


if __name__ == "__main__":
    main()
