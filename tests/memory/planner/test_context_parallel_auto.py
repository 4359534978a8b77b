"""How many processes hold a row together is chosen by bytes and time, and reported."""

import pytest

from memtrain.errors import DoesNotFit
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.plan.units import GIB

LONG = {"cluster__context_parallel": "auto", "train__batch_size": 8, "model__dtype": "bfloat16"}


def decided(made, setting: str) -> tuple[str, str]:
    found = next(one for one in made.decisions if one.setting == setting)
    return found.value, found.reason


def test_rows_that_fit_stay_whole(ask, facts_of, profile_of):
    made = ask(facts_of(Hardware.named("h100", 4), profile_of(*[512] * 64)), **LONG)
    assert made.settings.context_parallel == 1
    value, reason = decided(made, "context_parallel")
    assert (value, reason.startswith("whole rows fit")) == ("1", True)


def test_rows_too_long_for_one_device_are_cut_and_the_plan_says_why(ask, facts_of, profile_of):
    """One row of 400,000 tokens, with a budget that only slices of it fit."""
    known = facts_of(Hardware.named("h100", 4), profile_of(*[400_000] * 8))
    never = {"memory__never": "streamed_layers"}  # slices in time would do with less than slices on devices
    whole = ask(known, **LONG | {"cluster__context_parallel": 1} | never)
    halved = ask(known, **LONG | {"cluster__context_parallel": 2} | never)
    least, less = (min(one.need_bytes for one in made.tried) for made in (whole, halved))
    assert less < least
    budget = (least + less) // 2
    made = ask(known, **LONG, **never, memory__budget=budget)
    assert made.settings.context_parallel in (2, 4)
    assert "with fewer processes a row" in decided(made, "context_parallel")[1]


def test_where_no_size_fits_the_fault_is_that_of_whole_rows(ask, facts_of, profile_of):
    known = facts_of(Hardware.named("h100", 4), profile_of(*[400_000] * 8))
    with pytest.raises(DoesNotFit):
        ask(known, **LONG, memory__budget=1 * GIB)


def test_one_process_has_nobody_to_share_with(ask, facts_of, profile_of):
    made = ask(facts_of(cpu(64 * GIB, 4), profile_of(*[512] * 64)), cluster__context_parallel="auto")
    assert (made.settings.context_parallel, decided(made, "context_parallel")[1]) == (1, "whole rows fit")
