"""A terminal sees every step in one line; a file has plain lines and no control characters."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from memtrain.trainers.protocols.events import EvalEvent, StepEvent
from memtrain.trainers.run_folder.progress import Progress, decimal, duration


def emit(progress: Progress, steps: int) -> None:
    with progress:
        for number in range(1, steps + 1):
            progress.stepped(
                StepEvent(
                    step=number,
                    loss=2.0,
                    lr=1e-4,
                    tokens=10,
                    loss_tokens=5,
                    seconds=0.1,
                    peak_bytes=3 * 2**30,
                )
            )
        progress.evaluated(EvalEvent(step=steps, loss=1.5, tokens=10))


def test_a_file_has_plain_lines_every_few_steps(tmp_path: Path):
    shown = io.StringIO()
    progress = Progress(25, every_steps=10, log=tmp_path / "log.txt", console=Console(file=shown, width=60))
    emit(progress, 25)
    lines = shown.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25", "25"]
    assert lines[1].startswith("step 10/25  loss 2.0000  lr 1.00e-04  ")
    assert "peak 3.00 GiB" in lines[1]
    assert lines[-1] == "step 25  held-out loss 1.5000"
    assert "\x1b" not in shown.getvalue()
    assert [line.split("  ", 1)[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == lines


def test_a_terminal_has_one_line_that_is_gone_at_the_end(tmp_path: Path):
    shown = io.StringIO()
    console = Console(file=shown, width=120, force_terminal=True)
    emit(Progress(25, log=tmp_path / "log.txt", console=console), 25)
    assert "step 25/25" in shown.getvalue()
    assert "held-out loss 1.5000" in shown.getvalue()
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 5


def test_other_ranks_say_nothing():
    shown = io.StringIO()
    emit(Progress(5, console=Console(file=shown, force_terminal=True), is_shown=False), 5)
    assert shown.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0.0 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (7800, "2 h 10 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, said: str):
    assert duration(seconds) == said


def test_what_a_run_says_holds_no_orders_for_a_terminal(tmp_path):
    file = io.StringIO()
    log = tmp_path / "run.log"
    console = Console(file=file, force_terminal=False, width=200)
    Progress(total_steps=1, log=log, console=console).print_line("read a\x1b[2J\x9bm.jsonl")
    for reported in (file.getvalue(), log.read_text()):
        assert r"read a\u001b[2J\u009bm.jsonl" in reported


def test_zero_has_no_sign():
    assert [decimal(value) for value in (-0.00001, 0.0, -0.5, 1.25)] == [
        "0.0000",
        "0.0000",
        "-0.5000",
        "1.2500",
    ]


def test_an_evaluation_shows_the_metrics_of_a_python_file():
    file = io.StringIO()
    progress = Progress(4, console=Console(file=file, width=200), metrics=("exact",))
    extra = {"entropy": 2.0, "math/loss": 1.25, "math/entropy": 2.0, "exact": 0.5, "math/exact": 0.25}
    progress.evaluated(EvalEvent(step=4, loss=1.5, tokens=10, extra=extra))
    assert file.getvalue() == (
        "step 4  held-out loss 1.5000  math/loss 1.2500  exact 0.5000  math/exact 0.2500\n"
    )
