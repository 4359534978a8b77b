"""Passes of online methods are decided once: by the section, for the planner, the trace and the run."""

import pytest

from memtrain.recipes.sections.methods.grpo_rloo import Grpo, Rloo
from memtrain.recipes.sections.methods.online_base import Needs
from memtrain.recipes.sections.methods.online_dpo import OnlineDpo
from memtrain.recipes.sections.methods.ppo import Ppo


@pytest.mark.parametrize(
    ("section", "passes"),
    [
        (Grpo(), ()),
        (Grpo(steps_per_rollout=2), ("old",)),
        (Grpo(beta=0.1), ("reference",)),
        (Grpo(top_entropy_fraction=0.2), ("entropy",)),
        (Rloo(), ("old", "reference")),
        (Rloo(beta=0), ()),
        (OnlineDpo(steps_per_rollout=2), ("reference",)),
        (Ppo(), ("old", "reference", "values")),
        (Ppo(beta=0, updates_per_rollout=1), ("values",)),
    ],
)
def test_a_section_names_the_numbers_that_its_loss_needs(section, passes):
    assert section.needs.passes == passes
    assert section.needs.asks_policy == bool(set(passes) - {"reference"})


@pytest.mark.parametrize(
    ("section", "skips"),
    [
        (Grpo(), True),
        (Grpo(beta=0.1), False),
        (Grpo(entropy_coef=0.01), False),
        (Grpo(top_entropy_fraction=0.5), False),
        (Rloo(), True),
        (OnlineDpo(), True),
        (Ppo(), False),
    ],
)
def test_answers_of_advantage_zero_are_left_out_where_no_term_looks_at_them(section, skips):
    assert section.needs.skip_zero_advantage is skips


def test_rewards_wait_for_the_passes_where_they_are_penalised():
    assert [one.needs.is_for_rewards for one in (Grpo(beta=1), Rloo(), Rloo(beta=0), Ppo(beta=0))] == [
        False,
        True,
        False,
        True,
    ]
    assert Needs(old=False, reference=False).passes == ()
