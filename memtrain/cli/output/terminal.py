"""Tables and sentences on the screen: 80 columns, plain text where no terminal reads them."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import typer

from memtrain.errors import RecipeError, printable

PIPE_COLUMNS = 80
"""Width where no terminal reads. Terminals are taken as they are, up to 120."""

GLUE = "\u00a0"
"""Stands for a space that a line is not broken at, until it is printed."""


def columns() -> int:
    """Letters that fit on a line."""
    if not sys.stdout.isatty():
        return PIPE_COLUMNS
    return min(shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns, 120)


def whole(place: object) -> str:
    """A path or a place (`file:line:column`) as one word, which is never broken where a line ends."""
    return str(place).replace(" ", GLUE)


def wrapped(text: str, width: int, *, drop_whitespace: bool = True) -> list[str]:
    """Lines of a paragraph, broken between words only: a longer word stands out of its line."""
    lines = textwrap.wrap(
        text, width, break_long_words=False, break_on_hyphens=False, drop_whitespace=drop_whitespace
    )
    return [line.replace(GLUE, " ") for line in lines]


def print_text(text: str = "") -> None:
    """Print a paragraph, wrapped at words; a path with spaces is to be given as `whole(path)`."""
    typer.echo("\n".join(wrapped(printable(text), columns())))


def hide_progress_bars() -> None:
    """Silence of transformers' progress bars, which would stand among the lines of a command."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def table_lines(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A table as lines: columns two spaces apart, the last one wrapped at `width`, the head first.

    A column whose cells are all numbers is set flush right.
    """
    headers, rows = _printable(headers), [_printable(row) for row in rows]
    sizes = [max(len(row[at]) for row in [headers, *rows]) for at in range(len(headers))]
    flush_right = [bool(rows) and all(_is_number(row[at]) for row in rows) for at in range(len(headers))]
    before = sum(sizes[:-1]) + 2 * (len(headers) - 1)
    room = max(width - before, 20)
    lines: list[str] = []
    for row in [headers, *rows]:
        cells = [
            cell.rjust(size) if right else cell.ljust(size)
            for cell, size, right in zip(row[:-1], sizes, flush_right, strict=False)
        ]
        last = row[-1].rjust(sizes[-1]) if flush_right[-1] else row[-1]
        first, *others = wrapped(last, room, drop_whitespace=not flush_right[-1]) or [""]
        lines.append("  ".join([*(cell.replace(GLUE, " ") for cell in cells), first]).rstrip())
        lines.extend(" " * before + more for more in others)
    return lines


def _printable(cells: Sequence[str]) -> list[str]:
    """Cells as a terminal may show them; the last one is wrapped as a paragraph."""
    return [printable(cell, is_line=cell is not cells[-1]) for cell in cells]


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "", 1).lstrip("+-").isdecimal()


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; its head is bold on a terminal."""
    head, *lines = table_lines(headers, rows, columns())
    typer.secho(head, bold=True)
    for line in lines:
        typer.echo(line)


def write_text(
    text: str, output: Path | None, *, replace: bool = True, confirm_on_stderr: bool = False
) -> None:
    """Print a text, or write it to a file and confirm it (`confirm_on_stderr`: on stderr).

    Raises: RecipeError when the file cannot be written, or exists and may not be replaced.
    """
    if output is None:
        typer.echo(printable(text), nl=not text.endswith("\n"))
        return
    if output.exists() and not replace:
        raise RecipeError(f"{output} exists already", "-o", "name another file, or add --force to replace it")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"{output} cannot be written: {error.strerror}", "-o", "name a file in a folder that exists"
        ) from error
    typer.echo(f"wrote {output}", err=confirm_on_stderr)
