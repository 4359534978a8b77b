"""Words about completions."""

from memtrain.trainers.run_folder.report.rollout_words import counted_words


def test_a_run_that_trained_on_no_completion_says_so():
    assert counted_words(1200, 300, [5.0]) == "1,200 tokens of prompts and completions, 300 loss tokens"
    assert "no loss tokens: every completion was left out" in counted_words(1200, 0, [5.0])
    assert counted_words(1200, 0, []) == "1,200 tokens, 0 loss tokens"
