"""Errors: a class for each kind of fault, with exit code, place and fix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

EXIT_SAVED = 75
"""Exit code of a run that was asked to stop (by a signal), saved, and can be continued (EX_TEMPFAIL)."""

EXIT_OUR_FAULT = 70
"""Exit code of a fault of memtrain itself (EX_SOFTWARE)."""


_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Control characters but tab and line end, marks of text direction, and halves of characters."""


def printable(text: str, *, is_line: bool = False) -> str:
    """Text of anyone as a terminal may show it: what would steer the terminal stands as `\\u001b`.

    `is_line`: line ends are escaped too, so that a name cannot become a line of its own.
    """
    shown = _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return shown.replace("\n", "\\n") if is_line else shown


OR = "\n   or: "
"""The join of several ways out in one `fix`: a line each on the terminal."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: the error (with the value in hand), its place (`file:line:column`), and the fix."""

    what: str
    where: str = ""
    fix: str = ""

    def lines(self) -> list[str]:
        """The fault as the user reads it, without the leading word `error:`."""
        shown = [printable(self.what, is_line=True)]
        if self.where:
            shown.append(f"   at: {printable(self.where, is_line=True)}")
        if self.fix:
            ways = [printable(way, is_line=True) for way in self.fix.split(OR)]
            shown.append(f"  try: {OR.join(ways)}")
        return shown


class MemtrainError(Exception):
    """The user's to mend: shown as `error: what / at / try`, never with a traceback.

    `faults` holds every fault found, so that one run of a command tells them all.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str | Sequence[Fault], where: str = "", fix: str = "") -> None:
        faults = (Fault(what, where, fix),) if isinstance(what, str) else what
        self.faults: tuple[Fault, ...] = tuple(
            Fault(sayable(one.what), sayable(one.where), sayable(one.fix)) for one in faults
        )
        super().__init__(self.text())

    def __reduce__(self) -> tuple[type[MemtrainError], tuple[tuple[Fault, ...]]]:
        # An error of another process is the same error here, with its faults.
        return type(self), (self.faults,)

    def text(self) -> str:
        """Every fault in the form the command line prints."""
        return "\n".join("error: " + "\n".join(fault.lines()) for fault in self.faults)

    def _render_traceback_(self) -> list[str]:
        """Lines of a notebook's cell (IPython asks for them): the faults, no line of memtrain's own code."""
        return [*self.text().splitlines(), *getattr(self, "__notes__", ())]


class RecipeError(MemtrainError):
    """The recipe, an override or a command-line word cannot be taken as written."""

    exit_code = 2


class DoesNotFit(MemtrainError):
    """No plan fits the memory at hand."""

    exit_code = 3


class DataError(MemtrainError):
    """A data file, a row or a tokenizer cannot be used as declared."""

    exit_code = 4


class LaunchError(MemtrainError):
    """The run cannot start: devices, processes, packages, or a folder that cannot be written."""

    exit_code = 5


class ResumeError(MemtrainError):
    """The run folder cannot be continued with this recipe."""

    exit_code = 6


class OutOfMemory(MemtrainError):
    """The run ran out of memory and could not continue."""

    exit_code = 7


class Diverged(MemtrainError):
    """The loss, or the norm of the gradient, is no finite number any more: the training cannot continue."""

    exit_code = 8


class Interrupted(MemtrainError):
    """The run was asked to stop and has saved its state."""

    exit_code = EXIT_SAVED


def sayable(text: str) -> str:
    """The text with halves of surrogate pairs spelled out: they have no UTF-8 form, no file and no terminal
    takes them."""
    return text.encode("utf-8", "backslashreplace").decode()


def first_line_of(error: BaseException) -> str:
    """The first line of another library's error, or its kind where it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


MOST_WORDS = 2000
"""Letters of another library's error that are reported: a list of ten thousand weights is not read."""


_UNTOLD = re.compile("trust_remote_code|^(Should contain|Model type should be) one of")


def words_of(error: BaseException) -> str:
    """The message of another library's error, in one line and whole, or its kind where it is empty.

    Advice to run code of a model (`trust_remote_code`) and the list of all models that transformers knows
    are left out.
    """
    sentences = re.split(r"(?<=[.!?])\s+|\n+", str(error))
    told = [one for one in sentences if not _UNTOLD.search(one)]
    text = " ".join(" ".join(one.split()) for one in told).strip()
    if not text:
        return type(error).__name__
    if len(text) > MOST_WORDS:
        text = f"{text[:MOST_WORDS]} ... ({len(text) - MOST_WORDS:,} more letters)"
    text = sayable(text)
    # A KeyError says nothing but the key.
    return f"{type(error).__name__} {text}" if isinstance(error, KeyError) else text.rstrip(".")
