"""Words about completions."""

from memtrain.trainers.run_folder.report.rollout_words import counted_words, resampled_words, turn_words


def test_a_run_that_trained_on_no_completion_says_so():
    assert counted_words(1200, 300, [5.0]) == "1,200 tokens of prompts and completions, 300 loss tokens"
    assert "no loss tokens: every completion was left out" in counted_words(1200, 0, [5.0])
    twice = "300 tokens of prompts and completions, 400 loss tokens, counted in each update of a rollout"
    assert counted_words(300, 400, [5.0]) == twice
    assert counted_words(1200, 0, []) == "1,200 tokens, 0 loss tokens"


def test_turns_of_environments_are_means_over_the_run():
    words = turn_words([(2.0, 10.0), (1.5, 5.0)])
    assert words == "1.8 in a completion (and 7.5 tokens of the environment, which are not trained)"
    assert turn_words([]) == ""


def test_groups_that_dynamic_sampling_replaced_are_summed_over_the_run():
    assert resampled_words([3.0, 4.0]).startswith("7 in 2 rollouts (of rewards that were all alike")
    assert resampled_words([0.0]).startswith("0 in 1 rollout (")
    assert resampled_words([]) == ""
