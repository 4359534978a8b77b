"""Real reports of runs that ran out of memory: each gets a plan that fits, or the reason why none can."""

from types import SimpleNamespace

import pytest
from reports import KNOWN_KEYS, Report, answer, reports, rows

from memtrain.cli.rescue import find
from memtrain.cli.rescue.words import plan_learns
from memtrain.errors import DoesNotFit

REPORTS = reports()
QUICK = ("axolotl#814", "LlamaFactory#5545", "trl#3678", "qlora#17", "unsloth#786", "verl#2031")
"""One of each tool; the others take two minutes together."""
OF_FLOAT16 = ("lit-llama#204", "LlamaFactory#7833")
"""Cards without bfloat16; the second was under ZeRO-3 with its weights on the host."""


def at(name: str) -> int:
    return next(place for place, report in enumerate(REPORTS) if report.name == name)


def test_every_row_says_where_it_is_from_and_what_was_said():
    assert len({row["link"] for row in rows()}) == len(rows())
    for row in rows():
        assert set(row) <= KNOWN_KEYS, row["link"]
        assert row["said"], row["link"]
        assert row.get("gpu") or row.get("message"), row["link"]


def test_nine_of_ten_reports_are_to_be_rescued():
    assert len(REPORTS) >= 100
    assert sum(bool(report.beyond) for report in REPORTS) <= 0.1 * len(REPORTS)


@pytest.mark.parametrize("name", [*QUICK, *OF_FLOAT16])
def test_a_report_is_rescued(name: str):
    assert_rescued(REPORTS[at(name)], at(name))


def assert_rescued(report: Report, place: int) -> None:
    found = answer(place)
    assert found.plan is not None, report.link
    assert found.plan.chosen.need_bytes <= found.budget_bytes
    if found.own is not None:
        assert found.own.priced.need_bytes <= found.budget_bytes
        assert found.own.keys or found.own.environment


def test_a_run_that_died_of_logits_is_reported():
    """8B at 51,974 tokens: float32 logits of a vocabulary of 128,256 are 24.8 GiB, and held several times."""
    found = answer(at("LlamaFactory#5545"))
    assert found.held is not None
    assert found.held.owners[0].owner == "logits"
    assert found.own is not None
    assert found.own.keys == {"enable_liger_kernel": True}
    assert plan_learns(found) == ()


def test_the_change_of_the_thread_is_found():
    """8B, all weights, ZeRO-3 on 8 x 3090: with the offloading file it ran; a card showed 13 GB, among them
    torch's cache, which is not all predicted."""
    found = answer(at("LlamaFactory#5977"))
    assert found.own is not None
    assert found.own.keys == {"deepspeed": "examples/deepspeed/ds_z3_offload_config.json"}
    assert 7e9 < found.own.priced.need_bytes < 13e9


def test_what_offloads_on_one_card_has_its_weights_on_the_host():
    """30B under ZeRO-3's offloading on a 4090: 60 GiB of weights were planned on the card; logits held it."""
    found = answer(at("LlamaFactory#9572"))
    assert found.was is not None
    assert found.was.priced.settings.weights_offload
    assert found.held is not None
    assert found.held.owners[0].owner == "logits"


def test_what_fits_by_a_hair_needs_no_key():
    """65B in 4 bits on 47.54 GiB died for 688 MiB: segments that grow are enough."""
    found = answer(at("qlora#17"))
    assert found.was is not None
    assert found.was.priced.need_bytes > found.budget_bytes
    assert found.own is not None
    assert (found.own.keys, len(found.own.environment)) == ({}, 1)


def test_a_loss_without_logits_is_not_proposed_where_none_hold_the_memory():
    """7B, all weights, FSDP on 4 x A100-40: states and their scratch were 31.4 GiB, and Liger's loss fitted
    by the fewer fragments that are counted beside it."""
    found = answer(at("stanford_alpaca#308"))
    assert found.held is not None
    assert "logits" not in [one.owner for one in found.held.owners]
    assert found.own is not None
    assert (found.own.keys, len(found.own.environment)) == ({}, 1)


def test_the_evaluation_is_what_died():
    """deepseek-coder-6.7b, LoRA, 4 rows of 8,192 tokens evaluated beside 2 that are trained: by the steps
    alone it fitted."""
    found = answer(at("LlamaFactory#3310"))
    assert found.was is not None
    assert found.was.priced.prediction.peak.phase == "evaluation"
    assert found.was.need_bytes > found.budget_bytes


def test_two_searches_show_that_nothing_can_fit(monkeypatch: pytest.MonkeyPatch):
    """Mixtral on 15.71 GiB: 2 plans are looked for, the run's own and the least there is; 44 before."""
    looked: list[object] = []

    def counted(asked: object, facts: object) -> None:
        looked.append(asked)
        raise DoesNotFit([])

    monkeypatch.setattr(find, "resolved_if_it_fits", counted)
    report = REPORTS[at("axolotl#998")]
    assert find.rescued_foreign(report.foreign, report.asked).plan is None
    assert len(looked) == 2


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
