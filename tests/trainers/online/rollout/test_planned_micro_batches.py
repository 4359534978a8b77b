"""Micro-batches of a rollout: none has more tokens than the plan counts, prompts once for each group."""

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.memory.plan.length_profile import LengthProfile, LengthReport, longest_first
from memtrain.memory.plan.prompt_groups import PromptGroups
from memtrain.trainers.losses.policy.registry import Norms
from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.online.rollout.pair_batches import PairFeed
from memtrain.trainers.online.rollout.rollout_batches import PolicyFeed, new_window

NORMS = Norms(num_answers=1.0, num_tokens=1.0, rollout_tokens=1.0, max_tokens=1, kept_tokens=None)
OWN = 6
"""Most tokens of a completion."""


def profile_of(prompts: list[int], groups: PromptGroups) -> LengthProfile:
    counts = dict.fromkeys(LengthReport.model_fields, 0)
    count = len(prompts) * groups.written
    report = LengthReport.model_validate(
        counts | {"num_sequences": count, "fill": 1.0, "loss_tokens_cut_by_answer": ()}
    )
    each = [prompt + groups.own_tokens for prompt in prompts for _ in range(groups.written)]
    return LengthProfile(
        report=report,
        total_tokens=sum(each),
        longest=longest_first(each),
        longest_piece=max(each),
        groups=groups,
    )


def feed_of(kind: type[PolicyFeed], prompts: list[int], groups: PromptGroups) -> PolicyFeed:
    """A feed of a rollout of all the prompts, in an order of their own, without rows or model."""
    draw = random.Random(sum(prompts))
    order = draw.sample(range(len(prompts)), len(prompts))
    lengths = [[draw.randint(1, OWN) for _ in range(groups.written)] for _ in order]
    samples = [[Sample((1,) * n, (0.0,) * n, "stop") for n in group] for group in lengths]
    asked = cast(Any, SimpleNamespace(tokens=np.array(prompts)))
    form = cast(Any, SimpleNamespace(shared_prompts=groups.is_shared))
    feed = kind(asked, form, NORMS, groups)
    rows = [[2] * prompts[one] for one in order]
    feed.window = new_window(0, order, [0] * len(order), rows, samples, 1)
    return feed


@settings(max_examples=300, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    written=st.integers(1, 6),
    rows=st.integers(1, 20),
    limit=st.none() | st.integers(36, 120),
    share=st.sampled_from([1.0, 0.6, 0.2]),
    is_shared=st.booleans(),
)
def test_no_micro_batch_of_groups_has_more_tokens_than_the_plan_counts(
    prompts: list[int], written: int, rows: int, limit: int | None, share: float, is_shared: bool
):
    """Some completions are left out, so that groups are of any size; every other one is dealt out once."""
    groups = PromptGroups(written=written, learned=written, own_tokens=OWN, is_shared=is_shared)
    feed = feed_of(PolicyFeed, prompts, groups)
    draw = random.Random(rows)
    kept = np.array([one for one in range(len(prompts) * written) if draw.random() < share], np.int64)
    made = feed.deal(kept, micro_batch_size=rows, micro_tokens=limit)
    assert [one for micro_batch in made for one in micro_batch.tolist()] == kept.tolist()
    most = profile_of(prompts, groups).heaviest(rows, limit)[1]
    assert all(len(micro_batch) <= rows for micro_batch in made)
    assert all(int(feed.tokens[micro_batch].sum()) <= most for micro_batch in made)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(2, 6), st.integers(1, 20))
def test_no_micro_batch_of_pairs_has_more_tokens_than_the_plan_counts(
    prompts: list[int], written: int, rows: int
):
    groups = PromptGroups(written=written, learned=2, own_tokens=OWN, is_shared=True)
    feed = feed_of(PairFeed, prompts, groups)
    assert feed.window is not None
    feed.window.advantage_A = np.tile([1.0, -1.0] + [0.0] * (written - 2), len(prompts)).astype(np.float32)
    made = feed.deal(np.flatnonzero(feed.window.advantage_A), micro_batch_size=rows, micro_tokens=None)
    most = profile_of(prompts, groups).heaviest(max(2, rows // 2 * 2), None)[1]
    assert all(int(feed.tokens[micro_batch].sum()) <= most for micro_batch in made)


@pytest.mark.parametrize(
    ("rows", "most"),
    [
        (8, 20 + 10 + 8 * OWN),
        (4, 20 + 4 * OWN),
        (2, 20 + 2 * OWN),
        # The last two of a group and the first of the next.
        (3, 20 + 10 + 3 * OWN),
        # The last of a group, a whole one, the first of a third.
        (6, 20 + 10 + 5 + 6 * OWN),
    ],
)
def test_the_heaviest_micro_batch_has_each_prompt_once(rows: int, most: int):
    groups = PromptGroups(written=4, learned=4, own_tokens=OWN, is_shared=True)
    assert profile_of([5, 20, 10], groups).heaviest(rows, None) == (rows, most)


def test_prompts_apart_count_for_each_completion():
    groups = PromptGroups(written=4, learned=4, own_tokens=OWN, is_shared=False)
    assert profile_of([5, 20, 10], groups).heaviest(6, None) == (6, 4 * 20 + 2 * 10 + 6 * OWN)


def test_a_step_has_as_many_pairs_as_groups():
    """Sixteen completions of four prompts: eight of them are learned from."""
    groups = PromptGroups(written=4, learned=2, own_tokens=OWN, is_shared=True)
    assert groups.most_rows(16) == 8
