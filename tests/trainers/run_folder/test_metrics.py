"""Every step is in metrics.jsonl once, whatever was killed and resumed."""

import json
import math
from pathlib import Path

import pytest

from memtrain.errors import DataError, LaunchError
from memtrain.trainers.protocols.events import (
    DataEvent,
    EvalEvent,
    Event,
    FinalEvent,
    HostMemoryEvent,
    MemoryEvent,
    NoteEvent,
    StepEvent,
    from_line,
    to_line,
)
from memtrain.trainers.run_folder.metrics import MetricsWriter, read_metrics


def step(number: int, loss: float = 1.0) -> StepEvent:
    return StepEvent(step=number, loss=loss, lr=1e-4, tokens=10, loss_tokens=5, seconds=0.1)


EVENTS: list[Event] = [
    StepEvent(
        step=3,
        loss=0.1 + 0.2,
        lr=1e-5,
        grad_norm=math.inf,
        tokens=10,
        loss_tokens=4,
        seconds=0.5,
        peak_bytes=2**33,
        epoch=0.5,
        extra={"accuracy": 0.25},
    ),
    EvalEvent(step=3, loss=2.0, tokens=7),
    DataEvent(
        rows=10, tokens=100, loss_tokens=50, sequences=3, fill=0.98, rows_cut=1, lengths=((16, 4), (32, 6))
    ),
    DataEvent(
        rows=1, tokens=9, loss_tokens=5, sequences=1, loss_tokens_cut=3, loss_tokens_cut_by_answer=(1, 2)
    ),
    MemoryEvent(step=1, phase="load", allocated=5, reserved=6, rss=7, owners={"weights": 5}),
    HostMemoryEvent(step=9, resident=5, processes=2),
    NoteEvent(step=0, text="resumed"),
    FinalEvent(step=9, state="done", seconds=1.5, model="final", best_step=6),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_from_its_line(event: Event):
    line = to_line(event, 0.0)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert from_line(line) == event


def test_a_loss_that_is_no_number_is_kept_as_such(tmp_path: Path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(step(1, math.nan))
    (event,) = read_metrics(tmp_path / "metrics.jsonl")
    assert isinstance(event, StepEvent)
    assert math.isnan(event.loss)


def test_a_line_can_be_read_at_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(step(1))
    assert read_metrics(path) == [step(1)]
    writer.close()


def test_fields_that_spell_an_event_are_checked(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"kind": "eval", "step": 7, "loss": 2.0, "tokens": 3, "accuracy": 0.5})
        writer.write({"kind": "memory", "phase": "evaluation", "allocated": 5})
        with pytest.raises(ValueError, match="a memory event has no alocated"):
            writer.write({"kind": "memory", "phase": "load", "allocated": 5, "alocated": 5})
    assert read_metrics(path) == [
        EvalEvent(step=7, loss=2.0, tokens=3, extra={"accuracy": 0.5}),
        MemoryEvent(step=7, phase="evaluation", allocated=5),
    ]


def test_resuming_cuts_the_steps_behind_the_checkpoint(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for number in range(1, 6):
            writer.write(step(number, loss=1 / number))
    path.write_text(path.read_text() + '{"kind": "step", "st')
    with MetricsWriter(path, resumed_at=3) as writer:
        for number in range(4, 7):
            writer.write(step(number, loss=1 / number))
    assert read_metrics(path) == [step(number, loss=1 / number) for number in range(1, 7)]


def test_starting_anew_empties_the_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(step(1))
    MetricsWriter(path).write(step(2))
    assert read_metrics(path) == [step(2)]


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    line = to_line(step(1), 0.0)
    for end in range(len(line)):
        path.write_text(line + "\n" + line[:end])
        assert read_metrics(path) == [step(1)]
    assert read_metrics(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '{"kind": "steps"}', '{"kind": "step", "step": 1}'])
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line(step(1), 0.0) + f"\n{line}\n")
    with pytest.raises(DataError, match=r"metrics.jsonl:2"):
        read_metrics(path)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path):
    with pytest.raises(LaunchError, match="the metrics cannot be written"):
        MetricsWriter(tmp_path / "missing" / "metrics.jsonl")
