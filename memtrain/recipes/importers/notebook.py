"""The Python of a notebook, and of a script that a notebook was saved as: IPython's own lines go."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, cast

from memtrain.errors import RecipeError

_KEEPS = re.compile(r"%%(capture|time|timeit|prun)\b")
"""Cell magics that run their cell as Python."""


def notebook_code(text: str, name: str) -> str:
    """The code cells of a notebook, one after the other.

    Raises: RecipeError when it is no notebook.
    """
    try:
        read = json.loads(text)
        cells = cast(list[dict[str, Any]], read["cells"])
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError):
        raise RecipeError(
            f"{name} is not a Jupyter notebook", name, "name a notebook, or save it as a script"
        ) from None
    return "\n".join(_cell(source) for source in sources)


def _cell(source: str) -> str:
    first = source.lstrip().partition("\n")[0]
    if first.startswith("%%") and not _KEEPS.match(first):
        return ""
    return without_magics(source)


def without_magics(text: str) -> str:
    """A script without IPython's lines (`!pip install`, `%env`, `?help`), its lines where they were.

    A text that is Python is left alone: a line of it may begin with `%` too.
    """
    if _is_python(text):
        return text
    lines: list[str] = []
    goes_on = False
    for line in text.splitlines():
        found = re.match(r"(\s*)([!%?]|[\w., ]+=\s*[!%])", line)
        is_magic = goes_on or found is not None
        goes_on = is_magic and line.endswith("\\")
        # A statement may be all that a block has.
        lines.append(f"{found[1]}pass" if found is not None else "" if is_magic else line)
    return "\n".join(lines)


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


MOST_MENDED = 50
"""Lines of a paste whose indents are mended. Taste."""


def with_indents(text: str) -> str:
    """A script whose indents a paste has lost: beginnings of blocks without a body go, and lines too far in
    come back; a line whose f-string only a later Python reads does nothing; every other text as it is."""
    lines = text.splitlines()
    for _ in range(MOST_MENDED):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse("\n".join(lines))
        except IndentationError as error:
            bare = re.search(r"on line (\d+)", error.msg)
            at = int(bare[1]) if bare else error.lineno or 0
            if not 0 < at <= len(lines):
                return text
            lines[at - 1] = "" if bare else lines[at - 1].lstrip()
        except SyntaxError as error:
            line = lines[(error.lineno or 0) - 1] if 0 < (error.lineno or 0) <= len(lines) else ""
            if not error.msg.startswith("f-string: ") or not re.match(r"\s*(print|logger)\b", line):
                return text
            lines[(error.lineno or 0) - 1] = f"{line[: len(line) - len(line.lstrip())]}pass"
        except (ValueError, RecursionError, MemoryError):
            return text
        else:
            return "\n".join(lines)
    return text
