"""The words of the code: a docstring names its noun first (CONTRIBUTING.md)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_FIRST = {
    *("as", "everything", "how", "it", "its", "one", "ones", "so", "that", "their", "there", "these", "they"),
    *(
        "this",
        "those",
        "what",
        "whatever",
        "when",
        "where",
        "which",
        "who",
        "whoever",
        "whom",
        "whose",
        "why",
    ),
}
"""Words that stand for a noun. A docstring that begins with one of them hides what it is about."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring: of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def starts_without_a_noun(text: str) -> bool:
    """A tuple of results in parentheses is a noun: `(what, where, fix)`."""
    first = re.match(r"[\W_]*(\w+)", text)
    return first is not None and not text.startswith("(") and first[1].lower() in NOT_FIRST


def test_the_rule_sees_a_pronoun_and_lets_a_noun_pass():
    found = [text for _, text in docstrings(ast.parse('"""What runs."""\nx = 1\n"""Bytes of it."""\n'))]
    assert [starts_without_a_noun(text) for text in found] == [True, False]
    assert not starts_without_a_noun("(what, where, fix) of a fault.")


def test_a_docstring_begins_with_its_noun():
    hidden = [
        f"{path.relative_to(ROOT)}:{line} {text.partition(chr(10))[0]}"
        for path in sorted((ROOT / "memtrain").rglob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text()))
        if starts_without_a_noun(text)
    ]
    assert not hidden


STANDS_FOR_A_NOUN = {"what", "those", "these", "one", "ones", "it", "they", "whatever"}


def first_sentence(text: str) -> str:
    """With fixed phrases taken out in which such a word stands for nothing."""
    sentence = re.split(r"(?<=[.;])\s", " ".join(text.split()), maxsplit=1)[0]
    return re.sub(r"\b(at least|at most|one by one|at once|as it is|what was measured)\b", "", sentence)


def test_a_first_sentence_has_nouns():
    """Two words that stand for a noun can be followed; with three a reader begins again."""
    crowded = []
    for path in sorted((ROOT / "memtrain").rglob("*.py")):
        for line, text in docstrings(ast.parse(path.read_text())):
            words = re.findall(r"\w+", first_sentence(text).lower())
            if sum(word in STANDS_FOR_A_NOUN for word in words) >= 3:
                crowded.append(f"{path.relative_to(ROOT)}:{line} {first_sentence(text)}")
    assert not crowded
