"""Real reports of runs that ran out of memory: each gets a plan that fits, or the reason why none can."""

from types import SimpleNamespace

import pytest
from reports import KNOWN_KEYS, Report, answer, reports, rows

from memtrain.cli.rescue.words import plan_learns

REPORTS = reports()
QUICK = ("axolotl#814", "LlamaFactory#5545", "trl#3678", "qlora#17", "unsloth#786", "verl#2031")
"""One of each tool; the others take a minute together."""


def at(name: str) -> int:
    return next(place for place, report in enumerate(REPORTS) if report.name == name)


def test_every_row_says_where_it_is_from_and_what_was_said():
    assert len({row["link"] for row in rows()}) == len(rows())
    for row in rows():
        assert set(row) <= KNOWN_KEYS, row["link"]
        assert row["said"], row["link"]
        assert row.get("gpu") or row.get("message"), row["link"]


@pytest.mark.parametrize("name", QUICK)
def test_a_report_is_rescued(name: str):
    assert_rescued(REPORTS[at(name)], at(name))


def assert_rescued(report: Report, place: int) -> None:
    found = answer(place)
    assert found.plan is not None, report.link
    assert found.plan.chosen.need_bytes <= found.budget_bytes
    if found.own is not None:
        assert found.own.priced.need_bytes <= found.budget_bytes
        assert found.own.keys or found.own.environment


def test_a_run_that_died_of_logits_is_told_so():
    """8B at 51,974 tokens: float32 logits of a vocabulary of 128,256 are 24.8 GiB, and held several times."""
    found = answer(at("LlamaFactory#5545"))
    assert found.held is not None
    assert found.held.owners[0].owner == "logits"
    assert found.own is not None
    assert found.own.keys == {"enable_liger_kernel": True}
    assert plan_learns(found) == ()


def test_what_fits_by_a_hair_needs_no_key():
    """65B in 4 bits on 47.54 GiB died for 688 MiB: segments that grow are enough."""
    found = answer(at("qlora#17"))
    assert found.was is not None
    assert found.was.priced.need_bytes > found.budget_bytes
    assert found.own is not None
    assert (found.own.keys, len(found.own.environment)) == ({}, 1)


@pytest.mark.slow
def test_every_report_that_can_fit_is_rescued():
    for place, report in enumerate(REPORTS):
        if report.beyond:
            assert answer(place).plan is None, report.link
        else:
            assert_rescued(report, place)


@pytest.mark.slow
@pytest.mark.parametrize("name", [report.name for report in REPORTS if not report.beyond])
def test_no_plan_fits_by_arithmetic_alone(name: str):
    """The run's own step, traced, needs no more than the budget: no false "fits"."""
    from memtrain.cli.plan.answer import trace_answer
    from memtrain.memory.estimate.static import needed

    found = answer(at(name))
    assert found.plan is not None
    assert found.facts is not None
    looked = SimpleNamespace(config=found.facts.config)
    made = SimpleNamespace(resolved=found.plan, question=SimpleNamespace(looked=looked))
    traced, why_not = trace_answer(made, is_whole=False)  # pyright: ignore[reportArgumentType]
    if traced is None:
        pytest.skip(f"cannot be traced: {why_not}")
    assert needed(traced.prediction.peak.num_bytes, found.plan.settings) <= found.budget_bytes
