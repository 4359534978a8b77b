"""The report says what the run folder says, whole, partial or empty, in one page that needs nothing else."""

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from memtrain.memory.plan.plan import PhasePeak, Plan
from memtrain.trainers.protocols.events import (
    DataEvent,
    EvalEvent,
    Event,
    FinalEvent,
    MemoryEvent,
    NoteEvent,
    SaveEvent,
    StepEvent,
)
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.metrics import MetricsWriter
from memtrain.trainers.run_folder.progress import length_words, pair_words, speed_tokens
from memtrain.trainers.run_folder.report.benchmarks import RESULT_FILE
from memtrain.trainers.run_folder.report.curves import curve_groups
from memtrain.trainers.run_folder.report.data_words import lost_words, source_words
from memtrain.trainers.run_folder.report.model_card import write_card
from memtrain.trainers.run_folder.report.phase_memory import PhaseMemory, lighter_words
from memtrain.trainers.run_folder.report.report import (
    figures_of,
    load_report,
    phases_of,
    summary,
)
from memtrain.trainers.run_folder.report.report_html import write_report
from memtrain.trainers.run_folder.report.sample import sample_rows
from memtrain.trainers.run_folder.report.time_words import save_words

MakePlan = Callable[..., Plan]
MIB, GIB = 2**20, 2**30


def step(number: int, loss: float, **more: object) -> StepEvent:
    given: dict = {"lr": 1e-4, "grad_norm": 1.0, "tokens": 100, "loss_tokens": 40, "seconds": 0.5, **more}
    return StepEvent(step=number, loss=loss, **given)


EVENTS: list[Event] = [
    DataEvent(rows=5, tokens=50, loss_tokens=20, sequences=2),
    DataEvent(
        rows=1000,
        tokens=90_000,
        loss_tokens=40_000,
        sequences=90,
        fill=0.9876,
        rows_cut=31,
        tokens_cut=1912,
        loss_tokens_cut=1810,
        fragments=4,
        lengths=((512, 900), (1024, 69), (1536, 31)),
    ),
    MemoryEvent(step=0, phase="load", allocated=2 * GIB),
    MemoryEvent(step=1, phase="steady step", allocated=9 * GIB),
    MemoryEvent(step=2, phase="steady step", allocated=10 * GIB),
    MemoryEvent(step=2, phase="merging", allocated=1 * GIB, owners={"weights": GIB}),
    step(1, 4.0, seconds=10.0),
    step(2, 3.0, extra={"accuracy": 0.5}),
    EvalEvent(step=2, loss=2.5, tokens=10),
    step(3, math.nan, grad_norm=None),
    step(4, 2.0),
    EvalEvent(step=4, loss=2.75, tokens=10),
    NoteEvent(step=2, text="step-000002 was passed over: <b>note.txt</b> is missing"),
    FinalEvent(step=4, state="done", seconds=75.0, sample="3 + 4 = <7>"),
]


def run_folder(path: Path, plan: Plan | None, events: list[Event]) -> RunFolder:
    folder = RunFolder(path / "my-run")
    folder.path.mkdir()
    if plan is not None:
        plan.write(folder.path)
        folder.recipe.write_text("method: sft  # <mine>\n")
        folder.write_status(RunState.DONE, 4)
    if events:
        with MetricsWriter(folder.metrics) as writer:
            for event in events:
                writer.write(event)
    return folder


def text_of(folder: RunFolder, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary(folder))
    return console.export_text()


class Page(HTMLParser):
    """Checks that every element is closed, and collects what a browser would fetch."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_figures_are_those_of_the_metrics(tmp_path: Path, make_plan: MakePlan):
    """Without the first step: 300 tokens in 1.5 s. Peaks: predicted 9.5 GiB, plain 2 + 2 + 4 + 12."""
    report = load_report(run_folder(tmp_path, make_plan(), EVENTS))
    figures = figures_of(report)
    assert (figures.first_loss, figures.last_loss) == (4.0, 2.0)
    assert (figures.first_eval, figures.last_eval) == (2.5, 2.75)
    assert figures.best_eval is not None
    assert figures.best_eval.step == 2
    assert (figures.tokens, figures.loss_tokens, figures.tokens_per_s) == (400, 160, 200.0)
    assert figures.measured_bytes == 10 * GIB
    assert figures.predicted_bytes == 9.5 * GIB
    assert figures.plain_bytes == 20 * GIB
    assert [data.rows for data in report.data] == [1000]


def test_benchmarks_stand_on_the_page_and_in_the_card(tmp_path: Path, make_plan: MakePlan):
    """They were in a file of the run folder alone, and the card said that nothing was evaluated."""
    folder = run_folder(tmp_path, make_plan(), EVENTS)
    folder.final.mkdir()
    assert "nothing else has been evaluated" in write_card(folder).read_text()
    given = {"results": {"parity": {"acc,none": 0.75, "acc_stderr,none": 0.05, "sample_len": 40}}}
    (folder.path / RESULT_FILE).write_text(json.dumps(given))
    page = write_report(folder).read_text()
    Page(page)
    assert "Benchmarks of the final model" in page
    assert '<td class="num ">0.75 ±0.05</td>' in page
    card = write_card(folder).read_text()
    assert "| parity | acc | 0.75 ±0.05 | 40 |" in card
    assert "nothing else" not in card


def test_long_runs_show_means_of_the_first_and_last_steps(tmp_path: Path):
    events: list[Event] = [step(number, float(number)) for number in range(1, 41)]
    figures = figures_of(load_report(run_folder(tmp_path, None, events)))
    assert figures.averaged_steps == 4
    assert (figures.first_loss, figures.last_loss) == (2.5, 38.5)


def test_phases_stand_side_by_side(tmp_path: Path, make_plan: MakePlan):
    phases = phases_of(load_report(run_folder(tmp_path, make_plan(), EVENTS)))
    assert [one.phase for one in phases] == ["load", "first step", "steady step", "evaluation", "merging"]
    assert phases[2].difference == pytest.approx(10 / 9.5 - 1)
    assert [one.difference is None for one in phases] == [False, True, False, True, True]


def test_a_lighter_step_than_the_heaviest_says_so(make_plan: MakePlan):
    plan = make_plan()
    plan = plan.model_copy(update={"settings": plan.settings.model_copy(update={"micro_tokens": 512})})
    predicted = PhasePeak(phase="steady step", num_bytes=1000, owners=())
    cases = {(800, 400): True, (800, 512): False, (990, 400): False, (800, 0): False}
    for (allocated, tokens), is_said in cases.items():
        measured = MemoryEvent(step=3, phase="steady step", allocated=allocated, tokens=tokens)
        said = lighter_words([PhaseMemory("steady step", predicted, measured)], plan)
        words = "predicted for micro-batches of up to 512 tokens; the largest had 400 in the steady step"
        assert said == ([words] if is_said else [])


def test_the_page_says_that_a_step_was_lighter(tmp_path: Path, make_plan: MakePlan):
    plan = make_plan()
    plan = plan.model_copy(update={"settings": plan.settings.model_copy(update={"micro_tokens": 512})})
    said = "Predicted for micro-batches of up to 512 tokens; the largest had 400 in the steady step."
    most = {one.phase: one.num_bytes for one in plan.prediction.phases}["steady step"]
    for allocated, is_said in ((most // 2, True), (most, False)):
        step = MemoryEvent(step=3, phase="steady step", allocated=allocated, tokens=400)
        events = [one for one in EVENTS if not isinstance(one, MemoryEvent)]
        (apart := tmp_path / str(allocated)).mkdir()
        page = write_report(run_folder(apart, plan, [*events, step])).read_text()
        assert (said in page) == is_said


def test_the_page_needs_nothing_beside_itself(tmp_path: Path, make_plan: MakePlan):
    page = write_report(run_folder(tmp_path, make_plan(), EVENTS)).read_text()
    assert Page(page).fetched == []
    assert "url(" not in page
    assert "@import" not in page
    assert not re.search(r"https?://", page)
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(svg)


def test_the_page_says_what_the_run_left(tmp_path: Path, make_plan: MakePlan):
    page = write_report(run_folder(tmp_path, make_plan(), EVENTS)).read_text()
    for said in (
        "my-run",
        "9.50 GiB predicted",
        "10.00 GiB (+5.3%)",
        "31 rows truncated (1,912 tokens, 1,810 loss tokens)",
        "98.76% filled",
        "best 2.5000 at step 2",
        "the only one that keeps packed rows apart on a CPU",
        "5.23.0",
        "method: sft  # &lt;mine&gt;",
        "3 + 4 = &lt;7&gt;",
        "&lt;b&gt;note.txt",
        "Accuracy of tokens",
        "max_length 1,024",
        "budget 16.00 GiB",
    ):
        assert said in page, said
    assert "<b>note.txt" not in page


@pytest.mark.parametrize("count", [0, *range(1, len(EVENTS))])
def test_a_run_that_has_only_begun_can_be_looked_at(tmp_path: Path, make_plan: MakePlan, count: int):
    folder = run_folder(tmp_path, make_plan() if count else None, EVENTS[:count])
    Page(write_report(folder).read_text())
    assert text_of(folder)


def test_a_page_without_steps_says_so(tmp_path: Path):
    assert "No step has been made yet." in write_report(run_folder(tmp_path, None, [])).read_text()


def test_the_terminal_says_the_same(tmp_path: Path, make_plan: MakePlan):
    folder = run_folder(tmp_path, make_plan(), EVENTS)
    folder.final.mkdir()
    shown = re.sub(r" +", " ", text_of(folder))
    for said in (
        "run done, 4 steps in 1 min 15 s",
        "loss 4.0000 -> 2.0000",
        "held-out loss 2.5000 -> 2.7500 (best 2.5000 at step 2)",
        "200 tokens/s (400 tokens, 160 loss tokens)",
        "10.00 GiB measured, 9.50 GiB predicted, 20.00 GiB without strategies",
        "steady step 9.50 GiB 10.00 GiB +5.3%",
        "merging - 1.00 GiB",
        "train 1,000 90,000 40,000 90 98.76%",
        "lost from train: 31 rows truncated",
        "note: step 2",
    ):
        assert said in shown, said


def test_what_steps_waited_for_checkpoints_is_reported():
    """Those that were waited for, and from before that was reported, count with all of their time."""
    saves = [SaveEvent(step=1, seconds=2.0), SaveEvent(step=2, seconds=3.0, held_s=0.25)]
    assert save_words(saves) == "2 written, steps waited 2.2 s"
    late = SaveEvent(step=3, seconds=3.0, held_s=1.5, waited_s=1.25)
    assert save_words([late]) == "1 written, steps waited 1.5 s, 1.2 s of it for one still being written"


def test_a_run_that_is_judged_tells_its_rewards_in_place_of_minus_a_loss(tmp_path: Path, make_plan: MakePlan):
    """A rollout is reported once, by its first step; one without any verdict has NaN."""
    judged: list[Event] = [
        step(1, 0.0, extra={"reward": 0.125, "completion_tokens": 9.0, "kl": 0.0, "entropy": 3.0}),
        step(2, 0.1, extra={"kl": 0.1}),
        EvalEvent(step=2, loss=-0.5, tokens=10, extra={"reward": 0.5}),
        step(3, 0.0, extra={"reward": 0.75, "completion_tokens": 8.0}),
        EvalEvent(step=4, loss=-0.25, tokens=10, extra={"reward": 0.25}),
        step(5, 0.0, extra={"reward": math.nan}),
    ]
    folder = run_folder(tmp_path, make_plan(), judged)
    shown = re.sub(r" +", " ", text_of(folder))
    assert "reward 0.1250 -> 0.7500" in shown
    assert "held-out reward 0.5000 -> 0.2500 (best 0.5000 at step 2)" in shown
    assert "held-out loss" not in shown
    page = write_report(folder).read_text()
    for title in ("Reward", "Length of completions", "KL to the reference", "Entropy", "Loss"):
        assert f"<h3>{title}</h3>" in page
    for group in ("KL and entropy", "Lengths", "Optimization and speed"):
        assert f'<h3 class="group">{group}</h3>' in page
    assert "held-out loss" not in page


def test_a_mixture_is_reported_by_source(tmp_path: Path, make_plan: Callable[..., Plan]):
    sources = (("a.jsonl", 1, 300, 30), ("b.jsonl", 8, 600, 60))
    mixture = DataEvent(rows=9, tokens=900, loss_tokens=90, sequences=5, sources=sources)
    words = [
        "train from a.jsonl: 1 row, 300 tokens, 30 loss tokens (33.3% of the tokens)",
        "train from b.jsonl: 8 rows, 600 tokens, 60 loss tokens (66.7% of the tokens)",
    ]
    assert source_words(mixture) == words
    folder = run_folder(tmp_path, make_plan(), [mixture])
    assert all(one in " ".join(text_of(folder).split()) for one in words)
    page = write_report(folder).read_text()
    assert all(one in page for one in words)


def test_held_out_accuracy_and_margin_of_pairs_are_reported(tmp_path: Path, make_plan: Callable[..., Plan]):
    evals = [
        EvalEvent(step=at, loss=0.6, tokens=9, extra={"rewards/accuracies": share, "rewards/margins": gap})
        for at, share, gap in ((2, 0.5, -0.00001), (4, 0.75, 0.5))
    ]
    folder = run_folder(tmp_path, make_plan(), [*evals])
    shown = re.sub(r" +", " ", text_of(folder))
    assert "held-out accuracy 0.5000 -> 0.7500" in shown
    assert "held-out margin 0.0000 -> 0.5000" in shown
    assert "held-out accuracy" in write_report(folder).read_text()
    assert pair_words(evals[1]) == "accuracy 0.7500  margin 0.5000"
    assert pair_words(EvalEvent(step=1, loss=1.0, tokens=1)) == ""


def test_phases_of_earlier_versions_have_their_names_of_today(tmp_path: Path, make_plan: Callable[..., Plan]):
    peaks = [MemoryEvent(step=1, phase=name, allocated=MIB, reserved=MIB) for name in ("rehearsal: passes",)]
    phases = [one.phase for one in phases_of(load_report(run_folder(tmp_path, make_plan(), peaks)))]
    assert phases[-1] == "dry run: log-probs"


def test_metrics_of_a_python_file_are_reported_of_all_rows_and_of_each_set(
    tmp_path: Path, make_plan: Callable[..., Plan]
):
    plan = make_plan(
        {
            "data.eval_fraction": 0.0,
            "data.eval": {"math": "builtin:arithmetic"},
            "eval.metrics": {"functions": "./metrics.py:exact"},
        }
    )
    evals = [
        EvalEvent(step=at, loss=1.0, tokens=9, extra={"exact": share, "math/exact": share, "entropy": 2.0})
        for at, share in ((2, 0.25), (4, 0.5))
    ]
    folder = run_folder(tmp_path, plan, [*evals])
    shown = re.sub(r" +", " ", text_of(folder))
    assert "held-out exact 0.2500 -> 0.5000" in shown
    assert "held-out exact of math 0.2500 -> 0.5000" in shown
    assert "held-out entropy" not in shown
    assert "held-out exact of math" in write_report(folder).read_text()


def test_the_speed_of_an_online_run_counts_its_rollouts(tmp_path: Path, make_plan: Callable[..., Plan]):
    """300 tokens in 3 steps of 1 s and one rollout of 7 s: 30 tokens/s, not 100."""
    steps: list[Event] = [
        StepEvent(step=at, loss=0.0, lr=1e-4, tokens=100, loss_tokens=50, seconds=1.0, rollout_s=waited)
        for at, waited in ((1, 7.0), (2, 0.0), (3, 0.0))
    ]
    figures = figures_of(load_report(run_folder(tmp_path, make_plan(), steps)))
    assert figures.tokens_per_s == 30.0
    assert figures.seconds == 10.0


def test_completions_that_are_left_out_count_in_the_speed_and_lengths_are_reported(
    tmp_path: Path, make_plan: Callable[..., Plan]
):
    """A rollout of 800 tokens, of which the update learns from none, in 2 s: 400 tokens/s, not 0."""
    reported = {"reward": 0.0, "rollout_tokens": 800.0, "completion_tokens": 20.0}
    left_out = StepEvent(
        step=1, loss=0.0, lr=1e-4, tokens=0, loss_tokens=0, seconds=0.5, rollout_s=1.5, extra=reported
    )
    folder = run_folder(tmp_path, make_plan(), [left_out])
    assert figures_of(load_report(folder)).tokens_per_s == 400.0
    shown = re.sub(r" +", " ", text_of(folder))
    assert "speed 400 tokens/s (800 tokens of prompts and completions; no loss tokens: every" in shown
    assert "completion length 20.0 tokens" in shown
    assert speed_tokens(left_out, True) == 800
    assert length_words(left_out) == "  length 20.0"


def test_the_sample_says_what_was_given_and_what_was_written(tmp_path: Path, make_plan: Callable[..., Plan]):
    end = FinalEvent(step=1, state="done", seconds=1.0, sample="3 + 4 = <7>", sample_prompt="3 + 4 =")
    folder = run_folder(tmp_path, make_plan(), [end])
    assert sample_rows(load_report(folder)) == [("sample: given", "3 + 4 ="), ("sample: written", " <7>")]
    assert "3 + 4 =<mark> &lt;7&gt;</mark>" in write_report(folder).read_text()


def test_the_first_row_stands_in_the_page(tmp_path: Path, make_plan: Callable[..., Plan]):
    plan = make_plan()
    train = plan.data.train.model_copy(update={"example": (("<|user|>ask", False), ("say<eos>", True))})
    plan = plan.model_copy(update={"data": plan.data.model_copy(update={"train": train})})
    page = write_report(run_folder(tmp_path, plan, [])).read_text()
    assert "&lt;|user|&gt;ask<mark>say&lt;eos&gt;</mark>" in page


def test_tokens_left_out_of_split_rows_are_reported():
    split = DataEvent(
        rows=9, tokens=900, loss_tokens=90, sequences=5, tokens_idle=400, rows_split=2, fragments=5
    )
    assert lost_words(split) == ("400 tokens in pieces without a loss token (2 rows split into 5 pieces)")
    whole = DataEvent(rows=9, tokens=900, loss_tokens=90, sequences=5, rows_split=1, fragments=2)
    assert lost_words(whole) == "nothing (1 row split into 2 pieces)"


def test_curves_lie_in_groups_with_units_and_unknown_ones_are_folded(tmp_path: Path, make_plan: MakePlan):
    reported = {"rewards/accuracies": 0.5, "rewards/chosen": 0.1, "rewards/rejected": -0.1, "own/metric": 3.0}
    report = load_report(run_folder(tmp_path, make_plan(), [step(at, 0.6, extra=reported) for at in (1, 2)]))
    large, groups, folded = curve_groups(report)
    assert [figure.title for figure in large] == ["Loss"]
    shown = {group.title: [figure.title for figure in group.figures] for group in groups}
    assert shown["Preferences"] == ["Accuracy", "Implicit rewards"]
    assert "Rewards" not in shown
    assert [figure.title for figure in folded] == ["own/metric"]
    assert ">share of pairs</text>" in groups[0].figures[0].svg
    assert groups[0].figures[1].legend == (("chosen", "c1"), ("rejected", "c2"))


def test_a_heading_of_two_things_is_not_one_over_the_second_alone(tmp_path: Path, make_plan: MakePlan):
    """SFT has an entropy and no KL: it stood under "KL and entropy"."""
    report = load_report(run_folder(tmp_path, make_plan(), [step(1, 0.6, extra={"entropy": 2.0})]))
    assert [group.title for group in curve_groups(report)[1]] == ["Entropy", "Optimization and speed"]
