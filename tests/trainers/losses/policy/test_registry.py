"""Policy losses by hand: two answers of two and one tokens, ratios of round numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.trainers.losses.policy.registry import (
    CLIPPED,
    NORMALISERS,
    Clip,
    GammaShape,
    Norms,
    PolicyBatch,
    PolicyKnobs,
    clipped_loss,
    entropy_threshold,
    gamma_weight,
    keep_near_policy,
    kl_estimate,
    log_ratio,
    mismatch,
    mismatch_facts,
    policy_loss,
    sapo_loss,
)
from memtrain.trainers.losses.policy.sequence_level import answer_log_ratio, sequence_clipped_loss
from memtrain.trainers.losses.policy.value import clipped_value_loss

LENGTHS = torch.tensor([2, 1])
OLD = torch.tensor([-1.0, -2.0, -1.0])
RATIO = torch.tensor([1.5, 0.5, 2.0])
LOGP = OLD + RATIO.log()
ADVANTAGE = torch.tensor([1.0, -1.0])
NORMS = Norms(num_answers=2, num_tokens=3, rollout_tokens=3, max_tokens=4)


def batch(**changes) -> PolicyBatch:
    given = {"logp_N": LOGP, "lengths_A": LENGTHS, "advantage_A": ADVANTAGE, "old_logp_N": OLD}
    return PolicyBatch(**(given | changes))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        # -min(1.5, 1.2), -min(0.5, 0.8), +max(2, 1.2) = -1.2, -0.5, 2: their sum 0.3, by the answers -0.85, 2
        ("dapo", 0.3 / 3),
        ("bnpo", 0.3 / 3),
        ("grpo", (-0.85 + 2) / 2),
        ("dr_grpo", 0.3 / (2 * 4)),
        ("luspo", 0.3 / 2),
    ],
)
def test_clipped_losses_differ_by_what_they_divide_by(loss, expected):
    assert policy_loss(batch(), PolicyKnobs(loss=loss), NORMS).value.item() == pytest.approx(expected)


def gradient(loss: str, **knobs: object) -> list[float]:
    """Of the loss, summed over tokens, by each token's log-prob."""
    logp = LOGP.clone().requires_grad_()
    made = policy_loss(batch(logp_N=logp), PolicyKnobs(loss=loss, **knobs), NORMS)
    made.value.backward()
    assert logp.grad is not None
    return (3 * logp.grad).tolist()


def test_gradients_of_surrogates_by_hand():
    """Ratios 1.5, 0.5, 2; advantages 1, 1, -1.

    dapo: -A r where the bound does not hold (the first is stopped at 1.2). cispo: -A min(r, bound), a
    constant, times the slope 1 of log p.
    """
    assert gradient("dapo") == pytest.approx([0.0, -0.5, 2.0])
    assert gradient("cispo", cispo_max_weight=1.25) == pytest.approx([-1.25, -0.5, 1.25])
    assert gradient("cispo", cispo_max_weight=5.0) == pytest.approx([-1.5, -0.5, 2.0])


def test_clipping_stops_a_gain_and_not_a_loss():
    """r = 1.5: A = 1 gives the bound 1.2; A = -1 the whole 1.5. delta bounds that one."""
    ratio = torch.tensor([1.5, 1.5])
    advantage = torch.tensor([1.0, -1.0])
    assert clipped_loss(ratio, advantage, Clip()).tolist() == pytest.approx([-1.2, 1.5])
    assert clipped_loss(ratio, advantage, Clip(0.2, 0.4)).tolist() == pytest.approx([-1.4, 1.5])
    assert clipped_loss(ratio, advantage, Clip(delta=1.3)).tolist() == pytest.approx([-1.2, 1.3])


def test_the_sequence_ratio_is_the_geometric_mean_of_an_answer():
    made = log_ratio(LOGP, OLD, LENGTHS, "sequence").exp()
    assert made.tolist() == pytest.approx([math.sqrt(0.75), math.sqrt(0.75), 2.0])


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)])
def test_kl_estimates_of_a_token_half_a_nat_likelier_than_under_the_reference(kind, expected):
    made = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), kind)
    assert made.item() == pytest.approx(expected)
    halved = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), kind, ratio_N=torch.tensor([0.5]))
    assert halved.item() == pytest.approx(expected / 2)


def test_kl_of_a_policy_that_is_the_reference_is_nothing():
    made = policy_loss(batch(reference_N=LOGP), PolicyKnobs(beta=10.0), NORMS)
    assert made.value.item() == pytest.approx(0.1)
    assert made.sums["kl"].item() == pytest.approx(0.0)


def test_sapo_closes_softly_on_both_sides():
    """At r = 1: (4 / t) / 2 = 2 / t; for r far above it the gate is at most 4 / t."""
    made = sapo_loss(
        torch.tensor([1.0, 1.0, 99.0]),
        torch.tensor([1.0, -1.0, 1.0]),
        temperature_pos=1.0,
        temperature_neg=2.0,
    )
    assert made.tolist() == pytest.approx([-2.0, 1.0, -4.0])


def test_vespo_weighs_an_answer_at_ratio_one_fully():
    """phi(1) = 1; with w = 2, k = 3 and lambda = 2 (a bad answer): 8 exp(-2)."""
    made = gamma_weight(RATIO.log() * torch.tensor([0, 0, 1]), LENGTHS, ADVANTAGE, GammaShape())
    assert made.tolist() == pytest.approx([1.0, 1.0, 8 * math.exp(-2)], rel=1e-5)


def test_gamma_weight_is_clamped_where_its_answer_leaves_the_range():
    """A token's log ratio of 3 counts whole; of -50 it is -20, and an answer's product is no less than 1e-8.

    Good answers: w^2 exp(3 (1 - w)). Bad: w^3 exp(2 (1 - w)).
    """
    w = math.exp(3.0 - 2.5)
    made = gamma_weight(torch.tensor([3.0, -2.5, -50.0]), LENGTHS, ADVANTAGE, GammaShape())
    good, lowest = w**2 * math.exp(3 * (1 - w)), 1e-8
    assert made.tolist() == pytest.approx([good, good, lowest**3 * math.exp(2)], rel=1e-4, abs=1e-30)
    far = gamma_weight(torch.tensor([-50.0, 21.0, 0.0]), LENGTHS, ADVANTAGE, GammaShape())
    assert far.tolist() == pytest.approx([1.0, 1.0, 1.0], rel=1e-4), "-20 and 20: the answer's product is 1"


def test_an_answer_far_from_the_policy_is_kept_only_when_it_is_good():
    """Mean log old - log policy: (-log 1.5 - log 0.5) / 2 = 0.144 and -0.69."""
    bad = torch.tensor([-1.0, -1.0])
    assert keep_near_policy(LOGP, OLD, LENGTHS, bad, limit=0.1).tolist() == [False, True]
    assert keep_near_policy(LOGP, OLD, LENGTHS, -bad, limit=0.1).tolist() == [True, True]
    unknown = torch.tensor([math.nan, math.nan, -1.0])
    assert keep_near_policy(LOGP, unknown, LENGTHS, bad, limit=0.1).tolist() == [True, True]


def test_the_top_entropy_mask_keeps_the_share_that_is_asked_for():
    entropy = torch.arange(10.0)
    assert (entropy >= entropy_threshold(entropy, 0.2)).sum() == 2
    assert entropy_threshold(torch.zeros(0), 0.2) == math.inf
    kept = torch.tensor([True, False, False])
    made = policy_loss(batch(is_kept_N=kept), PolicyKnobs(), NORMS)
    assert made.value.item() == pytest.approx(-1.2 / 3)


def test_the_entropy_bonus_is_the_mean_entropy_whatever_the_loss_divides_by():
    entropy = torch.tensor([1.0, 2.0, 3.0])
    for loss in ("dapo", "luspo", "dr_grpo"):
        plain = policy_loss(batch(), PolicyKnobs(loss=loss), NORMS).value
        made = policy_loss(batch(entropy_N=entropy), PolicyKnobs(loss=loss, entropy_coef=0.1), NORMS).value
        assert (plain - made).item() == pytest.approx(0.2)


def test_clipped_tokens_are_counted_by_side():
    """Ratios 1.5 and 0.5 at A = 1, 2.0 at A = -1: one is stopped above, none below."""
    sums = policy_loss(batch(), PolicyKnobs(), NORMS).sums
    assert sums["clip_high"].item() == 1
    assert sums["clip_low"].item() == 0
    assert sums["ratio"].item() == pytest.approx(4.0)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_mismatch_is_bounded_on_both_sides(mode):
    """Raw ratios: tokens 1.5, 0.5, 2; answers 0.75, 2. Bounds 0.6 and 1.6."""
    made = mismatch(LOGP, OLD, LENGTHS, mode, lowest=0.6, highest=1.6)
    expected = {
        "token_truncate": [1.5, 0.6, 1.6],
        "token_mask": [1.5, 0.0, 0.0],
        "sequence_truncate": [0.75, 0.75, 1.6],
        "sequence_mask": [0.75, 0.75, 0.0],
    }[mode]
    assert made.weight_N.tolist() == pytest.approx(expected)
    outside = [False, True, True] if mode.startswith("token") else [False, False, True]
    assert made.is_outside_N.tolist() == outside


def test_a_token_without_a_sampler_log_prob_is_not_corrected():
    sampler = torch.tensor([math.nan, -2.0, -1.0])
    made = mismatch(OLD, sampler, LENGTHS, "token_mask", lowest=None, highest=2.0)
    assert made.weight_N.tolist() == [1.0, 1.0, 1.0]
    assert mismatch_facts(OLD, sampler) == pytest.approx(
        {
            "mismatch/mean": 0.0,
            "mismatch/max": 0.0,
            "mismatch/ratio_p1": 1.0,
            "mismatch/ratio_p50": 1.0,
            "mismatch/ratio_p99": 1.0,
        }
    )


def test_the_answers_objective_has_reinforces_gradient_where_it_starts():
    """loss = -(1/2) sum A log p: each token's gradient is -A / 2."""
    logp = OLD.clone().requires_grad_()
    ratio = answer_log_ratio(logp, OLD, LENGTHS)
    sequence_clipped_loss(ratio, ADVANTAGE, Clip(), num_answers=2).backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-0.5, -0.5, 0.5])


def test_the_answers_objective_by_hand():
    """Ratios of answers 0.75 and 2: -min(0.75, 0.8) = -0.75, and max(2, 1.2) = 2; halved when corrected."""
    ratio = answer_log_ratio(LOGP, OLD, LENGTHS)
    made = sequence_clipped_loss(ratio, ADVANTAGE, Clip(), num_answers=2)
    assert made.item() == pytest.approx((-0.75 + 2) / 2)
    halves = torch.tensor([0.5, 0.5])
    made = sequence_clipped_loss(ratio, ADVANTAGE, Clip(), num_answers=2, mismatch_A=halves)
    assert made.item() == pytest.approx((-0.75 + 2) / 4)


def test_the_value_loss_by_hand():
    """Old 0, return 1, clip 0.2. v = 0.5: clipped 0.2 is worse (0.64 > 0.25). v = -1: itself is worse (4)."""
    value, zero, one = torch.tensor([0.5, -1.0]), torch.zeros(2), torch.ones(2)
    made = clipped_value_loss(value, zero, one, clip=0.2, num_tokens=2)
    assert made.item() == pytest.approx(0.5 * (0.64 + 4.0) / 2)
    plain = clipped_value_loss(value, zero, one, clip=None, num_tokens=2)
    assert plain.item() == pytest.approx(0.5 * (0.25 + 4.0) / 2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(1, 5), st.integers(0, 2**31 - 1))
def test_micro_batches_add_up_to_the_whole(lengths, cut, seed):
    """Any split of a step's answers gives the loss and the gradient of all of them at once."""
    cut = min(cut, len(lengths) - 1)
    g = torch.Generator().manual_seed(seed)
    N = sum(lengths)
    old, noise = -torch.rand(N, generator=g), 0.4 * torch.randn(N, generator=g)
    reference, advantage = -torch.rand(N, generator=g), torch.randn(len(lengths), generator=g)
    norms = Norms(num_answers=len(lengths), num_tokens=N, rollout_tokens=N, max_tokens=8)
    for loss in NORMALISERS:
        knobs = PolicyKnobs(loss=loss, beta=0.1)
        logp = (old + noise).requires_grad_()

        def part(tokens: slice, answers: slice, knobs=knobs, logp=logp):
            given = PolicyBatch(
                logp_N=logp[tokens],
                lengths_A=torch.tensor(lengths[answers]),
                advantage_A=advantage[answers],
                old_logp_N=old[tokens],
                reference_N=reference[tokens],
            )
            return policy_loss(given, knobs, norms).value

        first = sum(lengths[:cut])
        whole = part(slice(None), slice(None))
        parts = part(slice(first), slice(cut)) + part(slice(first, None), slice(cut, None))
        (of_whole,) = torch.autograd.grad(whole, logp)
        (of_parts,) = torch.autograd.grad(parts, logp)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(of_parts, of_whole, rtol=1e-4, atol=1e-5)


def test_every_clipped_loss_is_known():
    assert set(CLIPPED) < set(NORMALISERS)
