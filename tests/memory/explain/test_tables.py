"""A plan in tables and sentences."""

import pytest

from memtrain.memory.estimate.static import needed
from memtrain.memory.explain.tables import as_run, difference, largest_owners, owner_table, verdict
from memtrain.memory.plan.plan import Owned, PhasePeak, Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import GIB, MIB
from memtrain.recipes.recipe import Recipe


def phase(name, **owners):
    sizes = {key.replace("_", " "): size for key, size in owners.items()}
    owned = tuple(Owned(owner=owner, num_bytes=size) for owner, size in sizes.items())
    return PhasePeak(phase=name, num_bytes=sum(sizes.values()), owners=owned)


def prediction(*phases, budget=None):
    return Prediction(phases=phases, method="arithmetic", budget_bytes=budget)


CHOSEN = prediction(
    phase("load", weights=2 * GIB),
    phase("steady step", weights=2 * GIB, gradients=GIB, activations=GIB // 2),
    budget=8 * GIB,
)
BARE = prediction(phase("steady step", weights=2 * GIB, gradients=GIB, activations=16 * GIB))


def test_owners_are_rows_and_phases_are_columns_with_the_plain_run_last():
    headers, rows = owner_table(CHOSEN, BARE)
    assert headers == ["GiB", "load", "step", "plain"]
    assert rows == [
        ["activations", "0", "0.50", "16.00"],
        ["weights", "2.00", "2.00", "2.00"],
        ["gradients", "0", "1.00", "1.00"],
        ["total", "2.00", "3.50", "19.00"],
    ]


@pytest.mark.parametrize(("held_out", "columns"), [(0.0, ["load", "step"]), (0.1, ["load", "step", "eval"])])
def test_a_run_that_holds_out_no_rows_has_no_column_of_evaluation(held_out, columns):
    plan = prediction(*CHOSEN.phases, phase("evaluation", weights=2 * GIB))
    data = {"train": ("d.jsonl",), "eval_fraction": held_out}
    recipe = Recipe.model_validate({"method": "sft", "model": {"path": "m"}, "data": data})
    headers, _ = owner_table(as_run(plan, recipe), BARE)
    assert headers == ["GiB", *columns, "plain"]
    if not held_out:
        highest = prediction(phase("evaluation", weights=9 * GIB), *CHOSEN.phases)
        assert as_run(highest, recipe) == highest


def test_owners_of_one_size_stay_in_their_order():
    plan = prediction(phase("load", weights=GIB, optimizer=GIB, gradients=GIB, activations=GIB))
    _, rows = owner_table(plan, plan)
    assert [row[0] for row in rows[:-1]] == ["weights", "optimizer", "gradients", "activations"]


def test_a_small_plan_is_reported_in_mib():
    small = prediction(phase("load", weights=3 * MIB))
    headers, rows = owner_table(small, small)
    assert headers[0] == "MiB"
    assert rows[-1] == ["total", "3.0", "3.0"]


def test_the_verdict_adds_what_the_card_needs_and_says_what_stays_free():
    settings = Settings.model_construct(device="cuda", num_processes=1, expandable_segments=True)
    need = round(needed(CHOSEN.peak.num_bytes, settings) * 1.02) + 256 * MIB
    words = verdict(settings, CHOSEN, need + GIB)
    assert words.startswith(
        f"With the traced peak the plan's {(need + GIB) / GIB:.2f} GiB are {need / GIB:.2f} GiB: "
    )
    assert f"{(8 * GIB - need) / GIB:.2f} GiB stay free" in words
    tight = CHOSEN.model_copy(update={"budget_bytes": 3 * GIB})
    assert f"{(need - 3 * GIB) / GIB:.2f} GiB are missing" in verdict(settings, tight, need)


def test_the_difference_of_arithmetic_and_trace_is_a_share_of_the_trace():
    assert "+442.9%" in difference(BARE, CHOSEN)
    assert "-81.6%" in difference(CHOSEN, BARE)


def test_the_largest_owners_are_named():
    assert largest_owners(CHOSEN.peak, 2) == "weights 2.00 GiB, gradients 1.00 GiB"
