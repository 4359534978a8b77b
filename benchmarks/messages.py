"""Every error that memtrain can raise, as its template: what, where, and the way out.

    python benchmarks/messages.py [-o messages.md]

Read from the source, not from runs: each `Fault(...)`, and each error of memtrain/errors.py that is made.
`{...}` stands where a value is put in. tests/house/test_messages.py holds that none lacks place or cure.
"""

from __future__ import annotations

import argparse
import ast
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
    "Interrupted",
    "Fault",
)
SLOTS = ("what", "where", "fix")


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
        given = dict(zip(SLOTS, (template(one) for one in node.args), strict=False))
        given |= {one.arg: template(one.value) for one in node.keywords if one.arg in SLOTS}
        if given.get("what", "").startswith("*") or is_passed_on(node):
            continue
        place = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
        yield Message(place, name, given.get("what", ""), given.get("where", ""), given.get("fix", ""))


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
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    lines: list[str] = []
    for one in messages():
        lines += [f"{one.place} {one.kind}", f"  error: {one.what}"]
        lines += [f"     at: {one.where}", f"    try: {one.fix}", ""]
    if asked.output is None:
        print("\n".join(lines))
    else:
        asked.output.write_text("\n".join(lines))
    print(f"{len(messages())} messages")


if __name__ == "__main__":
    main()
