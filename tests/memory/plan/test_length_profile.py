"""The heaviest micro-batch, and the most loss tokens in one: bounds on every real one."""

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from memtrain.memory.estimate.pricing import heaviest
from memtrain.memory.hardware.devices import cpu
from memtrain.memory.plan.length_profile import longest_first
from memtrain.memory.plan.units import GIB
from memtrain.memory.rules.assumed_lengths import assumed_profile
from memtrain.memory.rules.ledger import SourcedRecipe

Rows = list[tuple[int, int]]


def test_the_loss_tokens_of_a_micro_batch_are_at_most_those_that_have_most(profile_of):
    """Of (10, 2), (8, 8) and (6, 1) the two longest hold 18 tokens, no two more than 10 loss tokens."""
    profile = profile_of(10, 8, 6).model_copy(update={"most_loss_tokens": (8, 2, 1), "loss_token_share": 1.0})
    assert profile.heaviest(2, None) == (2, 18)
    assert profile.most_scored(2, 18) == 10
    assert profile.most_scored(1, 10) == 8


def test_every_token_counts_where_the_loss_tokens_are_not_known(profile_of):
    assert profile_of(10, 8, 6).most_scored(2, 18) == 18


def test_many_short_rows_within_a_limit_of_tokens_are_bounded_by_their_share(profile_of):
    profile = profile_of(10, 10).model_copy(update={"most_loss_tokens": (5, 5), "loss_token_share": 0.5})
    assert profile.most_scored(2, 9) == 5


@examples(max_examples=50, deadline=None)
@given(
    st.lists(
        st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_no_micro_batch_has_more_loss_tokens_than_the_bound(profile_of, rows: Rows, size: int, draw):
    lengths, loss_tokens = [row[0] for row in rows], [row[1] for row in rows]
    update = {"most_loss_tokens": longest_first(loss_tokens), "loss_token_share": max(b / a for a, b in rows)}
    profile = profile_of(*lengths).model_copy(update=update)
    sequences, tokens = profile.heaviest(size, None)
    some = draw.sample(rows, min(size, len(rows)))
    assert sum(row[1] for row in some) <= profile.most_scored(sequences, tokens)


def test_only_completions_are_scored_where_they_are_written_here(recipe_of):
    """Four completions of at most 8 tokens: 32, however long their prompts are."""
    said = {"method": "grpo", "rewards.functions": ["length"], "generate.max_tokens": 8}
    recipe = recipe_of(said | {"length.max_length": 100})
    profile = assumed_profile(SourcedRecipe(recipe, lambda dotted: "default"), shares_prompts=True)
    assert profile.heaviest(4, None) == (4, 92 + 32)
    assert profile.most_scored(4, 400) == 32
    assert profile.most_scored(4, 20) == 20


def test_segments_of_the_heaviest_micro_batch_are_those_of_flat_rows(ask, facts_of, profile_of):
    """Packed rows of 9 and 4 documents: 13 segments end to end; padded rows are one each."""
    profile = profile_of(512, 500).model_copy(update={"most_pieces": (9, 4)})
    facts = facts_of(cpu(64 * GIB, 4), profile)
    made = ask(facts, train__batch_size=2, train__micro_batch_size=2).settings
    for flat, count in ((True, 13), (False, 2)):
        settings = made.model_copy(update={"padding_free": flat})
        assert heaviest(settings, facts).num_segments == count


def test_segments_of_completions_are_theirs_and_those_of_their_shared_prompts(recipe_of):
    """Eight completions of groups of four: two prompts; three of such a group may lie in two."""
    said = {"method": "grpo", "rewards.functions": ["length"], "generate.num_generations": 4}
    asked = SourcedRecipe(recipe_of(said | {"length.max_length": 900}), lambda dotted: "default")
    for shared, expected in ((True, [10, 5]), (False, [8, 3])):
        profile = assumed_profile(asked, shares_prompts=shared)
        assert [profile.most_segments(count, None) for count in (8, 3)] == expected


def test_segments_of_answers_that_were_not_read_are_two_and_a_shared_prompt(recipe_of):
    asked = SourcedRecipe(recipe_of({"method": "dpo", "length.max_length": 100}), lambda dotted: "default")
    for shared, expected in ((True, 6), (False, 4)):
        assert assumed_profile(asked, shares_prompts=shared).most_segments(2, None) == expected
