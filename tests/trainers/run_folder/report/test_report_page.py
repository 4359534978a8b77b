"""The report as a browser shows it: nothing empty, nothing cut off on a phone, a unit on every axis."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from memtrain.memory.plan.plan import PhasePeak, Plan, SamplePrompt
from memtrain.trainers.pages.charts import SMALL_WIDTH
from memtrain.trainers.protocols.events import Event, HostEvent, MemoryEvent, SampleEvent, StepEvent
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.metrics import MetricsWriter
from memtrain.trainers.run_folder.report.curves import FOLDED, curve_groups
from memtrain.trainers.run_folder.report.report import load_report
from memtrain.trainers.run_folder.report.report_html import write_report

MakePlan = Callable[..., Plan]
GIB = 2**30


def step(number: int, **extra: float) -> StepEvent:
    return StepEvent(
        step=number, loss=2.0, lr=1e-4, grad_norm=1.0, tokens=100, loss_tokens=40, seconds=0.5, extra=extra
    )


def page_of(path: Path, plan: Plan | None, events: Sequence[Event]) -> str:
    folder = RunFolder(path / "run")
    folder.path.mkdir()
    if plan is not None:
        plan.write(folder.path)
    with MetricsWriter(folder.metrics) as writer:
        for event in events:
            writer.write(event)
    return write_report(folder).read_text()


def test_a_column_without_a_measurement_is_left_out(tmp_path: Path, make_plan: MakePlan):
    on_cpu = page_of(tmp_path, make_plan(), [MemoryEvent(step=1, phase="step", allocated=GIB, rss=2 * GIB)])
    assert "resident</th>" in on_cpu
    assert "reserved by the allocator" not in on_cpu
    (tmp_path / "gpu").mkdir()
    both = [MemoryEvent(step=1, phase="step", allocated=GIB, reserved=3 * GIB)]
    on_gpu = page_of(tmp_path / "gpu", make_plan(), both)
    assert "reserved by the allocator</th>" in on_gpu
    assert "3.00 GiB</td>" in on_gpu
    assert "resident</th>" not in on_gpu


def test_a_peak_as_predicted_has_no_sign(tmp_path: Path, make_plan: MakePlan):
    plan = make_plan()
    peak = next(iter(plan.prediction.phases))
    assert isinstance(peak, PhasePeak)
    event = MemoryEvent(step=1, phase=peak.phase, allocated=peak.num_bytes - 1)
    page = page_of(tmp_path, plan, [event])
    assert "(0.0%)</text>" in page
    assert not re.search(r"[+-]0\.0+ ?%", page)


def test_the_large_curves_have_a_drawing_for_a_phone(tmp_path: Path):
    page = page_of(tmp_path, None, [step(1), step(2)])
    narrow = re.search(r'<div class="narrow"><svg viewBox="0 0 (\d+)', page)
    assert narrow is not None
    assert int(narrow[1]) == SMALL_WIDTH
    assert page.count('aria-label="Loss over steps"') == 2


def test_the_pointers_line_is_hidden_where_it_waits(tmp_path: Path):
    """Charts of a phone show what is drawn outside them: the line waits at -9, left of the chart."""
    page = page_of(tmp_path, None, [step(1), step(2)])
    assert 'class="cursor" y1' in page
    assert '.cursor[x1="-9"] { display: none; }' in page


def test_a_sample_of_nothing_says_so(tmp_path: Path, make_plan: MakePlan):
    plan = make_plan()
    prompts = (SamplePrompt(text="Say", ids=(1,)),)
    plan = plan.model_copy(update={"data": plan.data.model_copy(update={"samples": prompts})})
    page = page_of(tmp_path, plan, [step(1), SampleEvent(step=1, texts=(" \n",))])
    assert re.search(r"step 1</div><span[^>]*>nothing</span>", page)


@pytest.mark.parametrize(("device", "name"), [("cpu", "Python"), ("cuda", "GPU idle")])
def test_the_time_of_the_host_is_named_by_what_it_means(
    tmp_path: Path, make_plan: MakePlan, device: str, name: str
):
    plan = make_plan()
    plan = plan.model_copy(update={"settings": plan.settings.model_copy(update={"device": device})})
    page = page_of(tmp_path, plan, [step(1), HostEvent(step=4, waited=0.25, seconds=0.5, micro_batches=2)])
    assert f"<span>{name}</span><b>25.0%</b><small>of step 4 (the last of its 2 micro-batches)" in page


def test_every_known_folded_curve_has_a_title_and_a_unit(tmp_path: Path):
    names = [name for chart in FOLDED for name in chart.metrics]
    assert len(names) == len(set(names))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with MetricsWriter(folder.metrics) as writer:
        for number in (1, 2):
            writer.write(step(number, **dict.fromkeys(names, 0.5), own=1.0))
    _, _, folded = curve_groups(load_report(folder))
    assert [figure.title for figure in folded] == [*(chart.title for chart in FOLDED), "own"]
    for chart, figure in zip(FOLDED, folded, strict=False):
        assert chart.unit
        assert f">{chart.unit}</text>".replace("'", "&#x27;") in figure.svg
