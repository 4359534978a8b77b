"""Built-in rewards: exact answer, format, length, repetition. They read text; they never run it. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

MARK = "####"
"""Mark that GSM8K writes before an answer."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FRACTION = re.compile(r"^\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}$")
_DECORATION = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}|\\[,;!: ]|\\left|\\right|[$,\s]")


def exact_answer(completion: str, answer: object) -> float:
    """1 when the completion's last answer (`#### 12`, or `\\boxed{12}`) equals that of the row, else 0.

    Numbers are compared as numbers (12, 12.0, 1,200, $3, 50%, 1/2, \\frac{1}{2}), other answers as text
    without spaces, by case. A completion that marks no answer gets 0.
    Source: the marks of Cobbe et al. 2021 (GSM8K), arXiv:2110.14168, and Hendrycks et al. 2021 (MATH),
    arXiv:2103.03874.
    """
    given = marked_answer(completion)
    if given is None:
        return 0.0
    wanted = marked_answer(str(answer))
    wanted = str(answer) if wanted is None else wanted
    return float(plain(given) == plain(wanted))


def marked_answer(text: str) -> str | None:
    """The last answer that the text marks, as it stands; None without a mark."""
    box = _last_box(text)
    at = text.rfind(MARK)
    if at < 0 and box is None:
        return None
    if box is not None and (at < 0 or box[0] > at):
        return box[1]
    return text[at + len(MARK) :].strip().split("\n", 1)[0].strip()


def plain(answer: str) -> Fraction | str:
    """An answer as a number where it is one, else as text without decoration."""
    bare = _DECORATION.sub(lambda match: match[1] or "", answer).rstrip(".")
    match = _FRACTION.match(bare)
    if match is not None:
        bare = f"{match[1]}/{match[2]}"
    percent = bare.endswith(("%", "\\%"))
    number = bare.rstrip("%\\") if percent else bare
    # A Fraction of a huge power of ten would take all memory: such text is compared as text.
    if len(number) > 64 or re.search("[eE]", number):
        return bare
    try:
        return Fraction(number)
    except (ValueError, ZeroDivisionError):
        return bare


def _last_box(text: str) -> tuple[int, str] | None:
    """(place, inside) of the last box; braces inside are matched, an unfinished box does not count."""
    boxes = {match.end() - 1: match.start() for match in _BOX.finditer(text)}
    open_at: list[int] = []
    last: tuple[int, str] | None = None
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            open_at.append(brace.start())
        elif open_at:
            start = boxes.get(inside := open_at.pop())
            if start is not None and (last is None or start > last[0]):
                last = start, text[inside + 1 : brace.start()]
    return last


def matches_format(completion: str, pattern: str = r"####\s*-?[\d.,]+\s*$") -> float:
    """1 when the regular expression is found in the completion (dot matches line ends), else 0.

    Measured against the default: a completion that ends in `#### 12`.
    """
    return float(re.search(pattern, completion, re.DOTALL) is not None)


def soft_length(completion_ids: Sequence[int], longest: int, room: int) -> float:
    """0 up to `longest - room` tokens, then falling linearly to -1 at `longest` and beyond.

    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13 (soft overlong punishment).
    """
    over = len(completion_ids) - (longest - room)
    return 0.0 if over <= 0 else -min(1.0, over / room)


def repetition(completion: str, ngram: int = 3, penalty: float = 1.0) -> float:
    """-penalty * share of the word n-grams that came before; 0 for fewer than `ngram` words.

    Source: Yeo et al. 2025, "Demystifying long chain-of-thought reasoning in LLMs", arXiv:2502.03373,
    appendix (the n-gram repetition penalty).
    """
    words = completion.lower().split()
    count = len(words) - ngram + 1
    if count <= 0:
        return 0.0
    different = {tuple(words[i : i + ngram]) for i in range(count)}
    return -penalty * (1 - len(different) / count)


BUILTINS: dict[str, Callable[..., Any]] = {
    "exact_answer": exact_answer,
    "format": matches_format,
    "length": soft_length,
    "repetition": repetition,
}
"""Built-in rewards by the name that a recipe gives them."""
