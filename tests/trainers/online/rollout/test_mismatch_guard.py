"""The alarm for a sampler with other weights: its limit, its jump, what it does not take for either."""

from dataclasses import dataclass, field

import pytest
import torch

from memtrain.errors import MemtrainError
from memtrain.trainers.online.rollout.mismatch_guard import MismatchAlarm
from memtrain.trainers.online.rollout.scoring_passes import MismatchSeen
from memtrain.trainers.runtime.ranks import Ranks


@dataclass
class Method:
    seen: MismatchSeen = field(default_factory=MismatchSeen)


def heed(alarm: MismatchAlarm, *differences: float) -> None:
    method = Method()
    method.seen.pairs.append((torch.tensor(differences), torch.zeros(len(differences))))
    alarm.heed(method, Ranks())
    assert not method.seen.pairs


def alarm(limit: float | None = 0.3) -> tuple[MismatchAlarm, list[str]]:
    reported: list[str] = []
    return MismatchAlarm(limit, reported.append, "runs/a"), reported


def test_a_mean_above_the_limit_ends_the_run():
    """|-0.5| and 0.3: 0.4 on average."""
    with pytest.raises(MemtrainError, match=r"0\.40 nats from the trainer's"):
        heed(alarm()[0], -0.5, 0.3)


def test_no_limit_ends_no_run():
    heed(alarm(None)[0], 5.0)


def test_a_token_without_a_log_prob_is_not_counted():
    heed(alarm()[0], float("nan"), 0.1)


def test_a_step_without_tokens_says_nothing():
    one, reported = alarm()
    one.heed(Method(), Ranks())
    one.heed(object(), Ranks())
    assert not reported
    assert not one.past


def test_a_jump_is_reported_and_a_slow_rise_is_not():
    one, reported = alarm()
    for difference in (0.01, 0.012, 0.014, 0.016, 0.018, 0.02):
        heed(one, difference)
    assert not reported
    heed(one, 0.2)
    assert "0.200 nats from the trainer's, against 0.015 before" in reported[0]


def test_rounding_of_exact_samplers_is_no_jump():
    one, reported = alarm()
    for difference in (1e-7, 1e-7, 1e-7, 1e-7, 1e-7, 1e-4):
        heed(one, difference)
    assert not reported


@pytest.mark.parametrize(("difference", "is_reported"), [(0.004, True), (0.00005, False)])
def test_a_steady_difference_beyond_rounding_is_reported_once_with_advice(
    difference: float, is_reported: bool
):
    """Before, a difference that was there from the first step on was never reported below 0.05 nats."""
    reported: list[str] = []
    one = MismatchAlarm(0.3, reported.append, "runs/a", "transformers", 1e-4)
    for _ in range(20):
        heed(one, difference)
    assert len(reported) == int(is_reported)
    if is_reported:
        assert "0.004 nats from the trainer's in every step so far" in reported[0]
        assert "generate.backend: native" in reported[0]


def test_nothing_is_said_of_a_steady_difference_where_dropout_makes_it():
    one, reported = alarm()
    for _ in range(20):
        heed(one, 0.01)
    assert not reported
