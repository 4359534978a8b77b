"""Preference losses by hand, on one pair whose numbers are round, and what makes them sums over pairs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.recipes.sections.methods.pair_losses import PAIR_LOSSES
from memtrain.trainers.losses.preference.pairs import Divergence, PairKnobs, PairLogps
from memtrain.trainers.losses.preference.pointwise import updated_mean
from memtrain.trainers.losses.preference.registry import FORMULAS, preference_loss, preference_sums


def one_pair() -> PairLogps:
    """Chosen: log p -2, reference -4, 2 tokens (r_w = 2). Rejected: -5, reference -3, 4 tokens (r_l = -2)."""
    return PairLogps(*(torch.tensor([x]) for x in (-2.0, -5.0, -4.0, -3.0, 2.0, 4.0)))


def loss_of(name: str, logps: PairLogps | None = None, **knobs: object) -> float:
    knobs = {"beta": 0.5} | knobs
    logps = logps or one_pair()
    loss = preference_loss(logps, {name: 1.0}, PairKnobs(**knobs), num_pairs=1, num_chosen_tokens=2)
    return loss.item()


# l(x) = -log sigmoid(x) = log(1 + e^-x): l(2) = 0.126928, l(1) = 0.313262, l(-1) = 1.313262,
# l(0.5) = 0.474077, l(1.5) = 0.201413, l(0.75) = 0.386871, l(-0.375) = 0.898123; sigmoid(2) = 0.880797,
# sigmoid(1) = 0.731059.
BY_HAND = [
    ("sigmoid", {}, 0.126928, "l(0.5 * 4)"),
    ("sigmoid", {"label_smoothing": 0.1}, 0.326928, "0.9 l(2) + 0.1 (l(2) + 2)"),
    ("hinge", {}, 0.0, "max(0, 1 - 2)"),
    ("hinge", {"beta": 0.1}, 0.6, "1 - 0.4"),
    ("ipo", {}, 0.25, "(2/2 - -2/4 - 1/(2 * 0.5))^2 = 0.5^2"),
    ("sigmoid_norm", {}, 0.386871, "l(0.5 * (2/2 + 2/4)) = l(0.75)"),
    (
        "exo_pair",
        {"label_smoothing": 0.1},
        0.001943,
        "0.880797 (-l(2) - log 0.9) + 0.119203 (-2.126928 - log 0.1)",
    ),
    ("robust", {"label_smoothing": 0.1}, -0.123072, "(0.9 * 0.126928 - 0.1 * 2.126928) / 0.8"),
    ("discopop", {"discopop_tau": 1.0}, 0.134333, "0.119203 l(2) + 0.880797 e^-2"),
    ("nca_pair", {}, 1.126523, "l(1) + 0.5 l(-1) + 0.5 l(1)"),
    ("bco_pair", {}, 0.626523, "l(1) + l(1)"),
    ("bco_pair", {"bco_shift": 0.5}, 0.675490, "l(1 - 0.5) + l(0.5 + 1)"),
    ("sppo_hard", {}, 2.0, "(2 - 1)^2 + (-2 + 1)^2"),
    ("apo_zero", {}, 0.537883, "1 - sigmoid(1) + sigmoid(-1)"),
    ("apo_down", {}, 0.850262, "sigmoid(1) + 1 - sigmoid(2)"),
    ("simpo", {}, 0.898123, "l(0.5 * (-1 - -1.25) - 0.5) = l(-0.375)"),
    ("cpo", {}, 0.201413, "l(0.5 * 3)"),
    ("orpo", {}, 0.524716, "odds e^-1 / (1 - e^-1) = 0.581977 against 0.401551: l(log 1.449322)"),
    ("sft", {}, 1.0, "2 / 2 chosen tokens"),
]


@pytest.mark.parametrize(("name", "knobs", "expected", "how"), BY_HAND, ids=lambda x: str(x)[:24])
def test_loss_of_one_pair_by_hand(name, knobs, expected, how):
    """beta 0.5, r_w = 2, r_l = -2, so beta * margin = 2; `how` is the arithmetic of each line above."""
    assert loss_of(name, **knobs) == pytest.approx(expected, abs=2e-6), how


@pytest.mark.parametrize(
    ("divergence", "margin"),
    [
        (Divergence.REVERSE_KL, 4.0),
        (Divergence.FORWARD_KL, (1 - math.exp(-2)) - (1 - math.exp(2))),
        (Divergence.JS, 2.0),
        (Divergence.ALPHA, 2 * (1 - math.exp(-1)) - 2 * (1 - math.exp(1))),
    ],
)
def test_divergences_by_hand(divergence, margin):
    """Scores at r = 2 and -2: r; 1 - e^-r; log 2 + log sigmoid(r), 2 apart; 2 (1 - e^-r/2)."""
    assert loss_of("sigmoid", divergence=divergence) == pytest.approx(
        math.log1p(math.exp(-0.5 * margin)), rel=1e-5
    )


def test_alpha_divergence_runs_from_reverse_to_forward_kl():
    """(1 - u^-alpha) / alpha is log u as alpha falls to 0, and 1 - 1/u at 1."""
    alpha = Divergence.ALPHA
    near_zero = loss_of("sigmoid", divergence=alpha, divergence_alpha=1e-4)
    assert near_zero == pytest.approx(loss_of("sigmoid"), rel=1e-3)
    one = loss_of("sigmoid", divergence=alpha, divergence_alpha=1.0)
    assert one == pytest.approx(loss_of("sigmoid", divergence=Divergence.FORWARD_KL))


def test_transport_losses_compare_sorted_batches():
    """Policy w - l: (3, 1), reference (-1, 5). Sorted (1, 3) and (-1, 5): l(1) + l(-1) = 1.626523.

    r_w = (1, -3), r_l = (-3, 1): sorted alike, so the unpaired form is 2 l(0) = 1.386294.
    """
    logps = PairLogps(
        torch.tensor([0.0, -2.0]),
        torch.tensor([-3.0, -3.0]),
        torch.tensor([-1.0, 1.0]),
        torch.tensor([0.0, -4.0]),
        torch.ones(2),
        torch.ones(2),
    )
    assert loss_of("aot", logps) == pytest.approx(1.626523, abs=2e-6)
    assert loss_of("aot_unpaired", logps) == pytest.approx(2 * math.log(2), abs=2e-6)


def test_combinations_are_weighted_sums():
    """0.8 * l(2) + 0.2 * 2 l(1) + 1 * (2 / 2) = 0.101542 + 0.125305 + 1."""
    parts = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
    loss = preference_loss(one_pair(), parts, PairKnobs(beta=0.5), num_pairs=1, num_chosen_tokens=2)
    assert loss.item() == pytest.approx(1.226847, abs=2e-6)


def test_pair_weights_scale_preferences_and_leave_likelihood_alone():
    """Weight 0.25 on l(2) = 0.126928, none on 2 / 2."""
    quarter = torch.tensor([0.25])
    loss = preference_loss(
        one_pair(),
        {"sigmoid": 1.0, "sft": 1.0},
        PairKnobs(beta=0.5),
        num_pairs=1,
        num_chosen_tokens=2,
        pair_weights_B=quarter,
    )
    assert loss.item() == pytest.approx(0.25 * 0.126928 + 1.0, abs=2e-6)
    with pytest.raises(AssertionError, match="ranks the batch"):
        preference_loss(one_pair(), {"aot": 1.0}, PairKnobs(), num_pairs=1, pair_weights_B=quarter)


def test_reported_sums_by_hand():
    """Rewards 0.5 * 2 and 0.5 * -2, margin 2, one win; two equal answers are half a win."""
    sums = preference_sums(one_pair(), PairKnobs(beta=0.5))
    values = {name: value.item() for name, value in sums.items()}
    assert values == {
        "rewards/chosen": 1.0,
        "rewards/rejected": -1.0,
        "rewards/margins": 2.0,
        "rewards/accuracies": 1.0,
        "logps/chosen": -2.0,
        "logps/rejected": -5.0,
    }
    tie = replace(one_pair(), rejected_B=torch.tensor([-1.0]))
    assert preference_sums(tie, PairKnobs())["rewards/accuracies"].item() == 0.5


def random_pairs(num_pairs: int, seed: int) -> PairLogps:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (2, num_pairs), generator=g).float()
    logps = -20 * torch.rand(4, num_pairs, generator=g)
    return PairLogps(*(x.clone().requires_grad_() for x in logps[:2]), *logps[2:], *lengths)


def part_of(logps: PairLogps, rows: slice) -> PairLogps:
    values = [getattr(logps, name) for name in PairLogps.__slots__]
    return PairLogps(*(None if v is None else v[rows] for v in values))


@given(
    num_pairs=st.integers(2, 9),
    cut=st.integers(0, 9),
    name=st.sampled_from(sorted(PAIR_LOSSES)),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_micro_batches_add_up_to_one_batch_unless_the_loss_ranks_it(num_pairs, cut, name, seed):
    logps = random_pairs(num_pairs, seed)
    knobs = PairKnobs(label_smoothing=0.1)
    counts = {"num_pairs": num_pairs, "num_chosen_tokens": logps.chosen_tokens_B.sum().item()}
    whole = preference_loss(logps, {name: 1.0}, knobs, **counts)
    parts = [part_of(logps, slice(None, cut)), part_of(logps, slice(cut, None))]
    summed = sum(preference_loss(part, {name: 1.0}, knobs, **counts) for part in parts)
    if not PAIR_LOSSES[name].ranks_the_batch:
        torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(whole, logps.chosen_B)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(PAIR_LOSSES) - {"aot", "aot_unpaired"}))
def test_every_loss_lowers_a_rejected_answer_that_the_policy_prefers(name):
    """A rejected answer that the policy prefers (r_w = -2, r_l = 2) has a positive gradient."""
    logps = PairLogps(*(torch.tensor([x]) for x in (-5.0, -2.0, -3.0, -4.0, 2.0, 2.0)))
    rejected = logps.rejected_B.clone().requires_grad_()
    logps = replace(logps, rejected_B=rejected)
    knobs = PairKnobs(label_smoothing=0.1)
    loss = preference_loss(logps, {name: 1.0}, knobs, num_pairs=1, num_chosen_tokens=2)
    if name == "sft":
        assert not loss.requires_grad
        return
    loss.backward()
    assert rejected.grad.item() > 0


@pytest.mark.parametrize("name", sorted(PAIR_LOSSES))
@pytest.mark.parametrize("divergence", list(Divergence))
def test_far_apart_answers_give_finite_losses_and_gradients(name, divergence):
    """Log-ratios of +-500: no overflow in any branch, and no 0 * infinity in DiscoPOP's mixture."""
    logps = PairLogps(
        *(torch.tensor([x, y]) for x, y in [(-1e-9, -500), (-500, -1e-9), (-500, 0), (0, -500)]),
        torch.ones(2),
        torch.ones(2),
    )
    leaf = logps.chosen_B.clone().requires_grad_()
    knobs = PairKnobs(beta=0.1, label_smoothing=0.1, divergence=divergence)
    loss = preference_loss(
        replace(logps, chosen_B=leaf), {name: 1.0}, knobs, num_pairs=2, num_chosen_tokens=2
    )
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad.isfinite().all()


def test_reference_free_losses_need_no_reference():
    logps = replace(one_pair(), chosen_reference_B=None, rejected_reference_B=None)
    for name, loss in PAIR_LOSSES.items():
        if not loss.needs_reference:
            assert loss_of(name, logps, label_smoothing=0.1) == loss_of(name, label_smoothing=0.1)
        else:
            with pytest.raises(AssertionError, match="reference"):
                loss_of(name, logps, label_smoothing=0.1)


def test_every_loss_has_a_formula_that_reads_the_knobs_of_its_facts_and_no_others():
    assert set(FORMULAS) == set(PAIR_LOSSES)
    others = {
        "beta": 0.7,
        "label_smoothing": 0.3,
        "divergence": Divergence.FORWARD_KL,
        "discopop_tau": 0.9,
        "simpo_gamma": 2.0,
    }
    logps = random_pairs(5, seed=1)
    start = PairKnobs(label_smoothing=0.1)
    for name, facts in PAIR_LOSSES.items():
        loss = FORMULAS[name](logps, start)
        read = {
            knob
            for knob, value in others.items()
            if not torch.equal(FORMULAS[name](logps, replace(start, **{knob: value})), loss)
        }
        assert read == set(facts.reads), name


def test_running_mean_of_rewards():
    """Mean 2 of 3 values, then 6 and 8: (6 + 14) / 5 = 4."""
    mean, count = updated_mean(torch.tensor(2.0), 3, torch.tensor([6.0, 8.0]))
    assert (mean.item(), count) == (4.0, 5)
