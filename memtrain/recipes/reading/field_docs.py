"""The sentences under the fields of a section, read from its source when a reader asks for one."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache

from memtrain.recipes.sections.base import Section


def sentences_of(section: type[Section], name: str) -> str:
    """The text under a field on one line; empty where the field has none. Own fields go before inherited
    ones."""
    for base in section.__mro__:
        if issubclass(base, Section) and (text := _texts(base).get(name)):
            return " ".join(text.split())
    return ""


@cache
def _texts(section: type[Section]) -> dict[str, str]:
    """The text under each field that a class writes itself.

    pydantic's `use_attribute_docstrings` reads the same, but for every section at import: a tenth of a plan's
    processor time.
    """
    if section is Section:
        return {}
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef), "The source of a class is a class."
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
