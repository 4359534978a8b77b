"""Names of modules in started processes: those of Python and of packages before the folder at hand."""

from __future__ import annotations

import os
from pathlib import Path

import memtrain


def safe_path() -> dict[str, str]:
    """The variable by which no file of the folder at hand (numbers.py) passes for a module of Python.

    Nothing where memtrain itself is found there: in a tree that is not installed.
    """
    is_at_hand = Path(memtrain.__file__).resolve().parents[1] == Path.cwd().resolve()
    return {} if is_at_hand else {"PYTHONSAFEPATH": "1"}


def for_this_process_alone() -> None:
    """Hand the variable on to no program that a run starts: tools and rewards find the files beside them."""
    os.environ.pop("PYTHONSAFEPATH", None)
