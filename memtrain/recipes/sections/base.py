"""The base of every recipe section: strict, frozen, and documented field by field."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

UNITS = {
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused, nothing is coerced, nothing changes after reading.

    The text under a field is its documentation; `reading.field_docs` reads it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


def changes(section: Section, name: str) -> bool:
    """Whether a field differs from its default: a recipe with every default written out is the same one."""
    return getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True)


def parse_bytes(value: object) -> object:
    """Bytes of `24GiB`, `512MiB` or `80GB` (a plain number is bytes already).

    Raises: ValueError when the text is no size.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", value)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"'{value}' is not a size; write a number and a unit, such as 24GiB or 512MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def address_of_server(name: str, value: str) -> None:
    """Nothing for an address of HTTP, or the reference that stands for it in what is written.

    Raises: ValueError for another, and for one that holds a password.
    """
    if re.fullmatch(r"\$\{oc\.env:[^{},]+\}", value):
        return
    read = re.fullmatch(r"https?://([^\s/?#]+)(/[^\s?#]*)?", value)
    if read is None:
        raise ValueError(f"{name} {value} is not an address; write http://HOST:PORT")
    if "@" in read[1]:
        raise ValueError(
            f"{name} holds a name or a password, and addresses are written into the plan; leave them out"
        )


def one_or_many(value: object) -> object:
    """A single item as a tuple of one; a list as a tuple."""
    if isinstance(value, list):
        items: list[object] = value  # pyright: ignore[reportUnknownVariableType]
        return tuple(items)
    if isinstance(value, (str, dict, int, float)):
        return (value,)  # pyright: ignore[reportUnknownVariableType]
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
"""A size in bytes, written with a unit: `24GiB`, `512MiB`, `80GB`."""

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
