"""Output of a training command: reading the data, the plan before the run, the summary after it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from memtrain.cli.output.once import ASSISTANTS_TURNS, first_time
from memtrain.cli.output.terminal import print_table, print_text, whole
from memtrain.cli.plan.tables import rows_words, why_words
from memtrain.errors import printable
from memtrain.memory.plan.units import gib
from memtrain.trainers.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from memtrain.cli.plan.make_plan import Planned

EVERY_S = 0.5


@contextmanager
def reading_progress() -> Iterator[Callable[[int, int], None]]:
    """Takes (rows, tokens) read so far; tells them on a terminal, in one line that is written over."""
    is_live = sys.stderr.isatty()
    started = printed_at = time.monotonic()

    def progress(rows: int, tokens: int) -> None:
        nonlocal printed_at
        now = time.monotonic()
        if is_live and now - printed_at >= EVERY_S:
            printed_at = now
            speed = rows / max(now - started, 1e-9)
            sys.stderr.write(f"\r\x1b[Ktokenizing: {rows:,} rows, {tokens:,} tokens, {speed:,.0f} rows/s")
            sys.stderr.flush()

    yield progress
    if is_live:
        sys.stderr.write("\r\x1b[K")


def print_plan(planned: Planned) -> None:
    """The plan in short: the rows, the decisions, the predicted peak with and without them."""
    plan = planned.plan
    print_text(f"{plan.recipe.method}: {whole(plan.recipe_path)} into {whole(plan.run_dir)}")
    print_text(f"Trained parameters: {plan.parameters_words()}.")
    print_text(rows_words(planned.profile.report))
    for sentence in plan.data.words():
        print_text(sentence)
    if plan.data.has_turns and plan.recipe.data.assistant_only_loss is None and first_time("assistant-turns"):
        print_text(ASSISTANTS_TURNS)
    typer.echo()
    print_table(
        ("setting", "value", "why"),
        [(one.setting, one.value, why_words(one)) for one in plan.decisions],
    )
    typer.echo()
    peak, plain = plan.prediction.peak, plan.plain.peak
    print_text(
        f"Predicted peak of live tensors: {gib(peak.num_bytes)} in the {peak.phase}; "
        f"{gib(plain.num_bytes)} without memory strategies."
    )
    typer.echo()


def print_end(folder: RunFolder) -> None:
    """The run as the report tells it."""
    from rich.console import Console

    from memtrain.trainers.run_folder.report.report import summary

    Console(highlight=False, soft_wrap=not sys.stdout.isatty()).print(summary(folder))
    typer.echo(printable(f"model   {folder.final}"))
    typer.echo(printable(f"report  {folder.report}"))
