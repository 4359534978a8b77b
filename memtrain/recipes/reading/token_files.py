"""The tokens of `model.add_tokens`: written in the recipe, or one a line in text files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memtrain.errors import DataError
from memtrain.recipes.reading.regular_file import read_regular

ADD_TOKENS = "model.add_tokens"


def tokens_of(asked: Sequence[str]) -> list[str]:
    """Every token that is to be added, in order.

    Raises: DataError when a file cannot be read.
    """
    return [token for one in asked for token in ([one] if not one.endswith(".txt") else _lines_of(one))]


def _lines_of(name: str) -> list[str]:
    path = Path(name).expanduser()
    try:
        return [line for line in read_regular(path).splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
        raise DataError(
            f"the tokens of {path} cannot be read: {reason}", ADD_TOKENS, "name a text file, one token a line"
        ) from None
