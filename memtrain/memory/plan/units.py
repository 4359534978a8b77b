"""Bytes, shares and counts in words: how sizes are read and shown."""

from __future__ import annotations

from memtrain.errors import RecipeError
from memtrain.recipes.sections.base import parse_bytes

KIB = 2**10
MIB = 2**20
GIB = 2**30


def gib(num_bytes: float) -> str:
    """`num_bytes` as people read memory: `5.02 GiB`, `640 MiB`, `12 KiB`, `7 B`.

    At least three digits where they say something, no unit above GiB (cards are counted in GiB).
    """
    sign = "-" if num_bytes < 0 else ""
    size = abs(num_bytes)
    if size >= 0.9995 * GIB:
        value = size / GIB
        digits = 2 if value < 99.995 else 1
        return f"{sign}{value:.{digits}f} GiB"
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= 0.9995 * unit:
            value = size / unit
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{sign}{value:.{digits}f} {name}"
    return f"{sign}{size:.0f} B"


def count_of(count: int, thing: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def signed(share: float, decimals: int = 1) -> str:
    """A difference as a signed percentage: `+5.2%`, `-0.3%`; what rounds to zero has no sign: `0.0%`."""
    text = f"{share:+.{decimals}%}"
    return text[1:] if not text.strip("+-0.%") else text


def read_size(text: str, where: str = "") -> int:
    """Bytes of `24GiB`, `512MiB`, `80GB`; a number alone is GiB, as cards are named.

    Raises: RecipeError when the text is no size above zero.
    """
    written = text.strip()
    try:
        value = parse_bytes(f"{written}GiB" if written.replace(".", "", 1).isdigit() else written)
    except ValueError as error:
        raise RecipeError(str(error), where, "write a size such as 24GiB, 512MiB or 80GB") from None
    if not isinstance(value, int) or value <= 0:
        raise RecipeError(
            f"'{text}' is not a size above zero", where, "write a size such as 24GiB, 512MiB or 80GB"
        )
    return value


def round_up(num: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `num`."""
    return -(-num // multiple) * multiple
