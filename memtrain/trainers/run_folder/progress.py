"""Progress of a run: one live line on a terminal, plain lines anywhere else; no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from memtrain.errors import printable
from memtrain.memory.plan.units import gib
from memtrain.recipes.sections.evaluation import LOSS, SET_MARK
from memtrain.trainers.protocols.events import REWARD, EvalEvent, StepEvent, from_values
from memtrain.trainers.runtime.streams import when_lost

LOST = "nobody reads {lost}: the run goes on, and its lines stand here alone"

WINDOW_STEPS = 20
"""Steps over which the speed is taken; taste."""
ROLLOUT_TOKENS = "rollout_tokens"
"""Metric of the step that a rollout was made for: tokens of its prompts and completions, trained or not."""


class Progress:
    """Tells the steps of a run, on the main rank. A context manager: the live line is gone at the end.

    A terminal shows every step in one line that is written over; a pipe or a file has a plain line every
    `every_steps` steps. `log` (the run's `log.txt`) gets the plain lines in both cases.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        every_steps: int = 10,
        first_step: int = 0,
        log: Path | None = None,
        console: Console | None = None,
        is_shown: bool = True,
        metrics: Sequence[str] = (),
    ) -> None:
        self.total_steps = total_steps
        self.every_steps = every_steps
        self.first_step = first_step
        self.is_shown = is_shown
        self._is_lost_told = False
        self._metrics = metrics
        self._log = log
        self._console = console or Console(highlight=False)
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)
        self._has_rollouts = False
        self._ended_s = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
        )
        is_live = is_shown and self._console.is_terminal
        self._bar = Bar(*columns, console=self._console, transient=True) if is_live else None
        self._task = self._bar.add_task("starting", total=total_steps, figures="") if self._bar else None

    def __enter__(self) -> Progress:
        when_lost(self._tell_lost)
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with self._shown():
                self._bar.stop()
        when_lost(None)

    def stepped(self, event: StepEvent | Mapping[str, Any]) -> None:
        """Tell one step."""
        step = from_values(event) if isinstance(event, Mapping) else event
        assert isinstance(step, StepEvent), "only steps are shown here"
        # Between the ends of two steps lie evaluation and saving too, and the time left must count them.
        now_s = time.monotonic()
        self._has_rollouts = self._has_rollouts or ROLLOUT_TOKENS in step.extra
        self._recent.append((speed_tokens(step, self._has_rollouts), now_s - self._ended_s))
        self._ended_s = now_s
        is_due = step.step % self.every_steps == 0 or step.step in (self.first_step + 1, self.total_steps)
        if self._bar is None and not is_due:
            return
        figures = self._figures(step)
        if self._bar is not None and self._task is not None:
            counted = f"step {step.step}/{self.total_steps}"
            with self._shown():
                self._bar.update(self._task, completed=step.step, description=counted, figures=figures)
        if is_due:
            self._line(
                f"step {step.step:>{len(str(self.total_steps))}}/{self.total_steps}  {figures}", is_step=True
            )

    def evaluated(self, event: EvalEvent) -> None:
        """Tell the held-out loss, or the reward where completions were written and judged, and the metrics of
        a Python file."""
        figures = f"loss {decimal(event.loss)}"
        if event.extra and REWARD in event.extra:
            figures = f"reward {decimal(event.extra[REWARD])}{length_words(event)}"
        if pairs := pair_words(event):
            figures += f"  {pairs}"
        names = (LOSS, REWARD, *self._metrics)
        more = [
            f"{key} {decimal(value)}"
            for key, value in event.extra.items()
            if key in self._metrics or key.endswith(tuple(f"{SET_MARK}{name}" for name in names))
        ]
        self.print_line("  ".join([f"step {event.step}  held-out {figures}", *more]))

    def print_line(self, text: str, *, is_shown: bool = True) -> None:
        """Tell something in a line of its own; `is_shown=False`: in the log alone."""
        self._line(text, is_step=False, is_shown=is_shown)

    def _figures(self, step: StepEvent) -> str:
        tokens = sum(count for count, _ in self._recent)
        seconds = max(sum(taken for _, taken in self._recent), 1e-9)
        left_s = (self.total_steps - step.step) * seconds / len(self._recent)
        figures = [f"loss {decimal(step.loss)}", f"lr {step.lr:.2e}", f"{tokens / seconds:,.0f} tokens/s"]
        if step.extra and REWARD in step.extra:
            figures.insert(1, f"reward {decimal(step.extra[REWARD])}{length_words(step)}")
        if step.peak_bytes:
            figures.append(f"peak {gib(step.peak_bytes)}")
        if step.step < self.total_steps:
            figures.append(f"{duration(left_s)} left")
        return "  ".join(figures)

    def _line(self, text: str, *, is_step: bool, is_shown: bool = True) -> None:
        text = printable(text)
        if self._log is not None:
            write_log(self._log, text)
        if is_shown and self.is_shown and not (is_step and self._bar is not None):
            with self._shown():
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _tell_lost(self, lost: str) -> None:
        """Say once in the log that nobody reads the console any more."""
        if self._log is None or self._is_lost_told:
            return
        self._is_lost_told = True
        # A full disk is met, and reported, by the run's own lines.
        with suppress(OSError):
            write_log(self._log, LOST.format(lost=lost))

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """A closed terminal, or a reader that is gone, ends the output and not the run: rich itself would end
        the process (SystemExit) at a broken pipe."""
        try:
            yield
        except (OSError, ValueError, SystemExit):
            self.is_shown = False
            self._tell_lost("the console")


def write_log(log: Path, text: str) -> None:
    """Append a line to `log.txt`, with its time. Raises: OSError when the disk refuses."""
    with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")


def speed_tokens(step: StepEvent, has_rollouts: bool) -> int:
    """Tokens of a step for its speed: of its sequences, or, where completions are written, of its rollout.

    Completions that are left out of the update were written all the same; a step that learns from an earlier
    rollout adds time and no tokens.
    """
    return round(step.extra.get(ROLLOUT_TOKENS, 0)) if has_rollouts else step.tokens


def length_words(event: StepEvent | EvalEvent) -> str:
    """Mean length of the completions, in tokens; empty where none were written."""
    length = event.extra.get("completion_tokens")
    return "" if length is None else f"  length {length:,.1f}"


def pair_words(event: EvalEvent) -> str:
    """Accuracy and margin of held-out pairs; empty where there are none."""
    figures = [
        f"{name} {decimal(event.extra[key])}"
        for key, name in (("rewards/accuracies", "accuracy"), ("rewards/margins", "margin"))
        if key in event.extra
    ]
    return "  ".join(figures)


def decimal(value: float) -> str:
    """A number with four decimals; zero without a sign: `-0.00001` is `0.0000`."""
    text = f"{value:.4f}"
    return text.removeprefix("-") if text == "-0.0000" else text


def duration(seconds: float) -> str:
    """Seconds as people say them: `0.8 s`, `42 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = whole // 60
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24} h"
