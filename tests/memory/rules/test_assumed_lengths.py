"""Lengths of rows that nobody read."""

from memtrain.memory.rules.assumed_lengths import assumed_length
from memtrain.recipes.reading.load import load_text

GRPO = """
method: grpo
model: {path: builtin:tiny}
data: {train: builtin:arithmetic}
rewards: {functions: exact_answer}
generate: {max_tokens: 256}
"""


def test_a_prompt_that_nothing_cuts_is_taken_to_be_as_long_as_other_tools_let_it_be():
    for length, ours in [("{max_length: null}", 768), ("{max_length: null, max_prompt: 100}", 356)]:
        assert assumed_length(load_text(f"{GRPO}length: {length}\n", "r.yaml").recipe) == ours
    sft = "method: sft\nmodel: {path: builtin:tiny}\ndata: {train: a.jsonl}\nlength: {max_length: null}\n"
    assert assumed_length(load_text(sft, "r.yaml").recipe) is None
