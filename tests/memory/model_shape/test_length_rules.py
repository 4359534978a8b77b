"""One list of what depends on the length of rows, and that every rule of a plan asks it."""

from typing import Any

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.hardware.devices import cpu
from memtrain.memory.model_shape.length_rules import length_rules, probe_lengths, reached
from memtrain.memory.plan.units import GIB

PHI: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 256,
    "sliding_window": None,
    "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]},
}
GRPO: dict[str, Any] = {
    "method": "grpo",
    "rewards__functions": ["length"],
    "generate__num_generations": 4,
    "train__batch_size": 16,
    "train__micro_batch_size": 4,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, []),
        (PHI, [("longrope", 256, "row")]),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            [("longrope", 64, "row")],
        ),
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 128}, [("dynamic", 128, "row")]),
        (
            {
                "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default"}},
                "max_position_embeddings": 128,
            },
            [("dynamic", 128, "row")],
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, []),
        ({"model_type": "llama4_text", "floor_scale": 64}, [("temperature", 63, "place")]),
        ({"model_type": "llama4_text", "floor_scale": 64, "attn_temperature_tuning": False}, []),
        ({"sliding_window": 32}, [("window", 32, "reach")]),
        ({"sliding_window": 32, "use_sliding_window": False}, []),
        (
            {"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]},
            [("chunk", 16, "reach")],
        ),
        ({"index_topk": 2048}, [("top_keys", 2048, "reach")]),
        ({"text_config": {"sliding_window": 32}}, [("window", 32, "reach")]),
    ],
)
def test_what_depends_on_lengths_is_read_from_a_configuration(
    config: dict[str, Any], expected: list[tuple[str, int, str]]
):
    assert [(rule.kind, rule.tokens, rule.depends) for rule in length_rules(config)] == expected


def test_a_rule_is_reached_by_rows_that_are_longer():
    rules = length_rules(PHI)
    assert reached(rules, 256, "row") is None
    assert reached(rules, 257, "row") is rules[0]
    assert reached(rules, None, "row") is rules[0]
    assert reached(rules, 4096, "place", "reach") is None


@pytest.mark.parametrize(
    ("longest", "together", "expected"),
    [(63, 63, []), (63, 64, [(59, 9)]), (64, 64, [(67, 9)]), (None, None, [(67, 9)])],
)
def test_probes_stand_at_the_length_where_something_changes(
    longest: int | None, together: int | None, expected: list[tuple[int, int]]
):
    """Llama 4 with a floor of 64: a row of 64 tokens has one that is scaled, and so have shorter rows that
    come to 64 together, which transformers counts on."""
    rules = length_rules({"model_type": "llama4_text", "floor_scale": 64})
    assert probe_lengths(rules, longest, together) == expected


def plan_of(ask, facts_of, profile_of, longest: int, **said: Any):
    facts = facts_of(cpu(64 * GIB, 4), profile_of(*[longest] * 64), PHI, method=said.get("method", "sft"))
    return ask(facts, **({"length__max_length": 4096} | said))


def reported(resolved: Any) -> dict[str, str]:
    return {one.setting: f"{one.value}: {one.reason}" for one in resolved.decisions}


def test_rows_that_stay_below_lie_end_to_end_as_ever(ask, facts_of, profile_of):
    found = plan_of(ask, facts_of, profile_of, 256)
    assert found.settings.padding_free
    assert "positions" not in reported(found)


def test_longer_rows_lie_end_to_end_each_with_its_own_positions(ask, facts_of, profile_of):
    found = plan_of(ask, facts_of, profile_of, 300)
    assert found.settings.padding_free
    assert not found.settings.positions_by_row
    assert "LongRoPE" in reported(found)["positions"]


def test_longer_rows_that_are_padded_are_taken_one_at_a_time_and_it_is_reported(ask, facts_of, profile_of):
    found = plan_of(ask, facts_of, profile_of, 300, length__padding_free=False)
    assert (found.settings.positions_by_row, found.settings.micro_batch_size) == (True, 1)
    assert "one at a time" in reported(found)["positions"]


def test_prompts_are_not_shared_where_answers_are_longer(ask, facts_of, profile_of):
    below = plan_of(ask, facts_of, profile_of, 256, method="dpo")
    above = plan_of(ask, facts_of, profile_of, 300, method="dpo")
    assert below.settings.shared_prompts
    assert not above.settings.shared_prompts
    assert "depend on each answer" in reported(above)["shared_prompts"]


def test_completions_that_would_grow_past_it_are_refused_with_a_way_out(ask, facts_of, profile_of):
    with pytest.raises(RecipeError) as caught:
        plan_of(ask, facts_of, profile_of, 300, **GRPO, generate__max_tokens=100)
    fault = next(one for one in caught.value.faults if "LongRoPE" in one.what)
    assert "generate.max_tokens to at most 56" in fault.fix
    assert plan_of(ask, facts_of, profile_of, 256, **GRPO, generate__max_tokens=56)


def test_slices_of_rows_are_refused_where_rows_may_be_longer(ask, facts_of, profile_of):
    sliced = {"cluster__context_parallel": 2, "train__batch_size": 16, "train__micro_batch_size": 4}
    with pytest.raises(RecipeError, match="each process sees only a slice of the row"):
        plan_of(ask, facts_of, profile_of, 200, **sliced)
    assert plan_of(ask, facts_of, profile_of, 200, **sliced, length__max_length=256)
