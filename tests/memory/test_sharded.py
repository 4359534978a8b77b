"""What a rank holds when weights are in shards, by hand; and when the plan takes them."""

from typing import Any

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.activations import HeaviestBatch
from memtrain.memory.budget import static_bytes
from memtrain.memory.estimate import estimate
from memtrain.memory.hardware import Hardware, cpu
from memtrain.memory.shape import shape_of
from memtrain.memory.sharded import gathered, share
from memtrain.memory.units import GIB

# Width 8, two layers: q and o 8x8, k and v 8x4, three of 8x16 for the MLP, two norms of 8.
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
LAYER = 2 * 64 + 2 * 32 + 3 * 128 + 16
WHOLE = 2 * LAYER + 800 + 800 + 8


def test_a_rank_keeps_its_part_of_weights_gradients_and_moments(make_settings):
    settings = make_settings(num_processes=4, engine="fsdp2")
    found = static_bytes(settings, shape_of(TINY))
    part = -(-4 * WHOLE // 4)
    assert (found.weights, found.gradients, found.optimizer, found.reduce) == (part, part, 2 * part, 0)
    plain = static_bytes(make_settings(num_processes=4), shape_of(TINY))
    assert (plain.weights, plain.gradients, plain.optimizer) == (4 * WHOLE, 4 * WHOLE, 8 * WHOLE)
    assert plain.reduce > 0


def test_the_stages_of_zero_share_out_more_and_more(make_settings):
    held = {
        engine: [share(100, make_settings(num_processes=3, engine=engine), of=kind) for kind in KINDS]
        for engine in ("ddp", "zero1", "zero2", "zero3")
    }
    assert held == {
        "ddp": [100, 100, 100],
        "zero1": [100, 100, 34],
        "zero2": [100, 34, 34],
        "zero3": [34, 34, 34],
    }


KINDS = ("weights", "gradients", "states")


def test_what_is_gathered_is_the_largest_group_twice(make_settings):
    """The head, 100x8 in float32, is larger than a layer of 592; flat as it arrives, and cut into weights."""
    found = gathered(make_settings(num_processes=2, engine="fsdp2"), shape_of(TINY))
    assert found == (2 * 3200 + 3200 // 2, 4 * LAYER + 2 * 3200, 2 * 3200)
    tied = gathered(
        make_settings(num_processes=2, engine="fsdp2"), shape_of(TINY | {"tie_word_embeddings": True})
    )
    assert tied == (3200 + 2 * 4 * LAYER + 2 * LAYER, 3200 + 3 * 4 * LAYER, 2 * 3200)
    assert gathered(make_settings(num_processes=2), shape_of(TINY)) == (0, 0, 0)


def test_every_rank_loads_the_whole_model_first(make_settings):
    batch = HeaviestBatch(1, 16, 16, 16)
    made = estimate(make_settings(num_processes=2, engine="fsdp2"), shape_of(TINY), batch)
    load = next(phase for phase in made.phases if phase.phase == "load")
    assert {owned.owner: owned.num_bytes for owned in load.owners}["weights"] == 4 * WHOLE


def test_a_rank_that_reads_its_own_rows_loads_its_share(make_settings):
    batch = HeaviestBatch(1, 16, 16, 16)
    settings = make_settings(num_processes=2, engine="fsdp2", loads_shards=True)
    load = next(one for one in estimate(settings, shape_of(TINY), batch).phases if one.phase == "load")
    assert {owned.owner: owned.num_bytes for owned in load.owners}["weights"] == 2 * WHOLE


def test_shards_are_taken_where_whole_weights_do_not_fit_and_the_plan_says_why(ask, facts_of, profile_of):
    """0.25 billion weights in bfloat16: 0.5 GiB each of weights and gradients, 1 GiB of moments."""
    known = facts_of(Hardware.named("h100", 8), profile_of(*[512] * 64))
    said = {"model__dtype": "bfloat16", "train__batch_rows": 16, "memory__never": "optimizer_offload"}
    roomy = ask(known, **said)
    assert roomy.settings.engine == "ddp"
    tight = ask(known, **said, memory__budget=round(2.6 * GIB))
    assert tight.settings.engine == "fsdp2"
    decided = {one.setting: one for one in tight.decisions}
    assert "without it" in decided["engine"].reason
    assert decided["checkpoint_layout"].value == "sharded"
    assert tight.prediction.peak.num_bytes < roomy.prediction.peak.num_bytes


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"cluster__engine": "zero2", "optim__kind": "muon"}, "needs whole matrices"),
        ({"cluster__engine": "zero3", "save__layout": "sharded"}, "through the middle of weights"),
        ({"cluster__engine": "zero1", "memory__optimizer_offload": "on"}, "flat parts of weights"),
        ({"cluster__engine": "fsdp2", "optim__kind": "muon"}, "needs whole matrices"),
        ({"cluster__offload": "parameters"}, "needs an engine that moves them"),
        ({"save__layout": "sharded"}, "there are no shards to write"),
    ],
)
def test_what_shards_cannot_be_is_refused_with_a_way_out(ask, facts_of, profile_of, said, words: str):
    known = facts_of(cpu(64 * GIB, 4), profile_of(*[512] * 64))
    with pytest.raises(RecipeError, match=words) as caught:
        ask(known, cluster__processes=2, **said)
    assert all(fault.fix for fault in caught.value.faults)


def test_completions_are_written_with_whole_weights_and_these_are_counted(ask, facts_of, profile_of):
    """On two ranks: half of the weights rests there, and all of them are gathered beside."""
    known = facts_of(cpu(64 * GIB, 4), profile_of(*[512] * 64), method="grpo")
    said = {"method": "grpo", "rewards__functions": ["length"], "generate__completions": 4}
    made = ask(known, **said, train__batch_rows=16, cluster__processes=2, cluster__engine="fsdp2")
    owners = {
        phase.phase: {one.owner: one.num_bytes for one in phase.owners} for phase in made.prediction.phases
    }
    assert owners["generation"]["gathered weights"] == owners["load"]["weights"]
    assert owners["generation"]["weights"] * 2 == owners["load"]["weights"]
