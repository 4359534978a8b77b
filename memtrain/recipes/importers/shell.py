"""A shell script as far as a paste needs it: its commands, with the variables that are set before them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

MOST_OPEN = 20_000
"""Letters of one command that its quotes may leave open. Taste."""

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.S)
_ARRAY = re.compile(r"\s*(?:export\s+|declare\s+-a\s+|local\s+)?([A-Za-z_]\w*)\+?=\((.*)", re.S)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|([A-Za-z_]\w*))")


def commands(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(each command, the variables set before it), the known variables in their places.

    A variable that the script does not set is the environment's, as in the shell; one that nothing sets
    stays as it is written. A log of `set -x` is read without its marks.
    """
    known = {"HOME": str(Path.home())}
    for line in _whole_lines(re.sub(r"\\[ \t]*\n", " ", text)):
        line = re.sub(r"^\s*\++ ", "", line).strip()
        array = _ARRAY.fullmatch(line)
        if array is not None:
            words = _words(array[2].rstrip().removesuffix(")")) or []
            known[array[1]] = with_variables(shlex.join(words).replace("'", ""), known)
            continue
        found = _assignments(line)
        if found is None:
            yield with_variables(line, known), dict(known)
        for name, value in (found or {}).items():
            known[name] = with_variables(value, known)


def with_variables(text: str, known: dict[str, str]) -> str:
    """A text with its variables' values, `${NAME:-default}` by its default where nothing sets it."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return known.get(name, _of_environment(name, found[0] if default is None else default))

    # Quoted arrays are their words, each quoted.
    return _VARIABLE.sub(value, re.sub(r'"(\$\{\w+\[@\]\})"', r"\1", text))


_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|SESSION|PRIVATE", re.I)
_SECRET = re.compile(
    r"(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[a-z]-|AKIA|eyJ|AIza|-----BEGIN)|[0-9a-f]{32,}"
    r"|(?=.*[0-9])(?=.*[a-z])(?=.*[A-Z])[\w+/=-]{24,}"
)


def _of_environment(name: str, default: str) -> str:
    """The value of a variable of the environment, for a recipe to hold: never what looks like a secret."""
    value = os.environ.get(name)
    if value is None or _SECRET_NAME.search(name) or _SECRET.match(value):
        return default
    return value


def names_in(text: str) -> list[str]:
    """Names of the variables that a text still has."""
    return [found[1] or found[3] for found in _VARIABLE.finditer(text)]


def _whole_lines(text: str) -> Iterator[str]:
    """Lines that say something, those joined that quotes or the brackets of an array hold together."""
    held = ""
    for line in text.splitlines():
        if not held and _words(line) is None and not re.search(r"=|--\w", line):
            continue  # A sentence beside the command, with an apostrophe.
        held = f"{held}\n{line}" if held else line
        if len(held) < MOST_OPEN and _is_open(held):
            continue
        if held.strip() and not held.lstrip().startswith("#"):
            yield held
        held = ""
    if held.strip():
        yield held


def _is_open(text: str) -> bool:
    words = _words(text)
    if words is None:
        return True
    return _ARRAY.fullmatch(text) is not None and not text.rstrip().endswith(")")


def _assignments(line: str) -> dict[str, str] | None:
    """The variables that a line sets and does nothing beside; None for a command."""
    words = _words(line)
    if not words:
        return None if words is None else {}
    words = words[1:] if words[0] in ("export", "declare", "local", "set") else words
    found = [_ASSIGNED.fullmatch(word) for word in words]
    return None if None in found else {one[1]: one[2] for one in found if one is not None}


def _words(text: str) -> list[str] | None:
    """The words of a line; None where its quotes do not close."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return None
