"""Learning rates by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.optim.step import lr_at, warmup_steps


def rates(max_steps: int, **optim: object) -> list[float]:
    recipe = Optim.model_validate({"lr": 1.0, **optim})
    return [lr_at(step, optim=recipe, max_steps=max_steps) for step in range(max_steps)]


def test_warm_up_reaches_the_full_rate_on_its_last_step():
    assert rates(5, schedule="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_by_the_same_amount_every_step():
    """Two warm-up steps, then p = 0, 1/4, 2/4, 3/4."""
    assert rates(6, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_linear_ends_at_the_least_rate():
    """0.2 + 0.8 * (1 - p)."""
    assert rates(4, schedule="linear", warmup_steps=0, min_lr_ratio=0.2) == pytest.approx(
        [1.0, 0.8, 0.6, 0.4]
    )


def test_cosine_is_a_half_wave():
    """cos 0, 60, 120 degrees: 1, 1/2, -1/2."""
    assert rates(3, schedule="cosine", warmup_steps=0) == pytest.approx([1.0, 0.75, 0.25])


def test_wsd_falls_in_the_last_fifth():
    assert rates(10, schedule="wsd", warmup_steps=1) == [1.0] * 9 + [0.5]
    assert rates(10, schedule="wsd", warmup_steps=1, min_lr_ratio=0.5)[-1] == 0.75


def test_the_warm_up_is_three_percent_unless_said():
    assert warmup_steps(Optim(), 1000) == 30
    assert warmup_steps(Optim(), 10) == 1
    assert warmup_steps(Optim(warmup_ratio=0.5), 7) == 4
    assert warmup_steps(Optim(warmup_steps=50), 7) == 7


def test_without_warm_up_linear_and_cosine_are_those_of_transformers():
    import torch
    from transformers import get_scheduler

    for name in ("linear", "cosine"):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        theirs = get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=7)
        seen: list[float] = []
        for _ in range(7):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            theirs.step()
        assert rates(7, schedule=name, warmup_steps=0) == pytest.approx(seen)


@settings(max_examples=50)
@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(1, 60),
    st.integers(0, 70),
    st.floats(0, 1),
)
def test_a_rate_is_never_above_the_peak_nor_below_the_least(name: str, steps: int, warmup: int, least: float):
    for rate in rates(steps, schedule=name, warmup_steps=warmup, min_lr_ratio=least):
        assert 0.0 < rate <= 1.0 + 1e-12 or math.isclose(rate, least, abs_tol=1e-12)
