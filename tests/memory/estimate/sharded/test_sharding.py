"""What a rank holds when weights are in shards, by hand; and when the plan takes them."""

import pytest
from narrow import NARROW

from memtrain.errors import RecipeError
from memtrain.memory.estimate.kept import Kept
from memtrain.memory.estimate.optimizer_scratch import offload_bucket, optimizer_scratch
from memtrain.memory.estimate.peaks import estimate
from memtrain.memory.estimate.sharded.fsdp2 import fsdp_moments
from memtrain.memory.estimate.sharded.sharding import gathered, groups, share
from memtrain.memory.estimate.static import static_bytes
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.units import GIB
from memtrain.recipes.sections.model import Adapter

# Width 8, two layers: q and o 8x8, k and v 8x4, three of 8x16 for the MLP, two norms of 8.
TINY = NARROW | {"num_key_value_heads": 1, "head_dim": 4}
LAYER = 2 * 64 + 2 * 32 + 3 * 128 + 16
WHOLE = 2 * LAYER + 800 + 800 + 8


def test_a_rank_keeps_its_part_of_weights_gradients_and_moments(make_settings):
    settings = make_settings(num_processes=4, engine="fsdp2")
    found = static_bytes(settings, shape_of(TINY))
    part = -(-4 * WHOLE // 4)
    assert (found.weights, found.gradients, found.optimizer, found.reduce) == (part, part, 2 * part, 0)
    plain = static_bytes(make_settings(num_processes=4), shape_of(TINY))
    assert (plain.weights, plain.gradients, plain.optimizer) == (4 * WHOLE, 4 * WHOLE, 8 * WHOLE)
    assert plain.reduce == 4 * WHOLE


def test_only_gradients_below_a_mebibyte_travel_end_to_end(make_settings):
    """Embedding and head of 32,768 x 8 in float32 have one each: they are summed where they are."""
    wide = shape_of(TINY | {"vocab_size": 32_768})
    assert static_bytes(make_settings(num_processes=4), wide).reduce == 4 * (2 * LAYER + 8)
    adapter = Adapter(r=2, target_modules=("q_proj",))
    assert static_bytes(make_settings(num_processes=4, adapter=adapter), wide).reduce == 2 * 128


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


def test_groups_are_layers_the_embedding_and_the_head(make_settings):
    """Float32: 4 bytes a number. A tied embedding is in the backbone's group, which is whole all the time."""
    settings = make_settings(num_processes=2, engine="fsdp2")
    layer, outer = (4 * LAYER,) * 3, (3200,) * 3
    assert groups(settings, shape_of(TINY)) == (layer, outer, outer, (0, 0, 0))
    tied = shape_of(TINY | {"tie_word_embeddings": True})
    assert groups(settings, tied) == (layer, (0, 0, 0), (0, 0, 0), outer)
    # The head arrives flat and is cut into weights; so is a layer, beside a tied embedding.
    assert gathered(settings, shape_of(TINY)) == 2 * 3200
    assert gathered(settings, tied) == 3200 + 2 * 4 * LAYER


def test_gradients_of_half_weights_travel_in_float32_and_frozen_ones_not_at_all(make_settings):
    """An adapter of rank 2 on q: 2x8 and 8x2 numbers a layer, in float32."""
    half = make_settings(num_processes=2, engine="fsdp2", dtype="bfloat16")
    assert groups(half, shape_of(TINY)).layer == (2 * LAYER, 2 * LAYER, 4 * LAYER)
    adapter = Adapter(r=2, target_modules=("q_proj",))
    found = groups(half.model_copy(update={"adapter": adapter}), shape_of(TINY))
    assert found.layer == (2 * LAYER + 128, 128, 128)
    assert found.head == (1600, 0, 0)


def test_the_gradients_of_one_layer_at_a_time_are_whole(make_settings):
    """While the first layer goes back, of all others a rank keeps half; no moment has all gradients whole."""
    settings = make_settings(num_processes=2, engine="fsdp2", checkpoint_every=1)
    shape, batch = shape_of(TINY), HeaviestBatch(1, 16, 16, 16)
    nothing = Kept(0, 0, 0, 0)
    moments = fsdp_moments(
        Workload(settings, shape, batch), {"weights": 0}, nothing, {}, holds=False, asked=0
    )
    last, first = 3200 // 2, (4 * LAYER + 3200 + 32) // 2
    found = [moment["gradients"] for moment in moments if "recomputation" in moment]
    largest = 4 * 128
    assert found == [last + largest, first + largest]
    assert max(moment["gradients"] for moment in moments) < 4 * WHOLE
    holding = fsdp_moments(Workload(settings, shape, batch), {"weights": 0}, nothing, {}, holds=True, asked=0)
    part = -(-4 * WHOLE // 2)
    assert {moment["gradients"] for moment in holding if "recomputation" in moment} == {part + largest}


def test_a_rank_that_reads_its_own_rows_loads_its_share(make_settings):
    batch = HeaviestBatch(1, 16, 16, 16)
    settings = make_settings(num_processes=2, engine="fsdp2", loads_shards=True)
    load = next(one for one in estimate(settings, shape_of(TINY), batch).phases if one.phase == "load")
    assert {owned.owner: owned.num_bytes for owned in load.owners}["weights"] == 2 * WHOLE


def test_shards_are_taken_where_whole_weights_do_not_fit_and_the_plan_says_why(ask, facts_of, profile_of):
    """0.25 billion weights in bfloat16: 0.5 GiB each of weights and gradients, 1 GiB of moments."""
    known = facts_of(Hardware.named("h100", 8), profile_of(*[512] * 64))
    said = {"model__dtype": "bfloat16", "train__batch_size": 16, "memory__never": "optimizer_offload"}
    said |= {"optim__master_weights": False}
    roomy = ask(known, **said)
    assert roomy.settings.engine == "ddp"
    tight = ask(known, **said, memory__budget=round(2.6 * GIB))
    assert tight.settings.engine == "fsdp2"
    decided = {one.setting: one for one in tight.decisions}
    assert " without" in decided["engine"].reason
    assert decided["checkpoint_layout"].value == "sharded"
    assert decided["loading"].value == "parts"
    assert tight.prediction.peak.num_bytes < roomy.prediction.peak.num_bytes


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"cluster__engine": "zero2", "optim__kind": "muon"}, "needs whole matrices"),
        ({"cluster__engine": "zero1", "memory__optimizer_offload": "on"}, "flat parts of weights"),
        ({"cluster__engine": "fsdp2", "optim__kind": "muon"}, "needs whole matrices"),
        (
            {"cluster__engine": "ddp", "cluster__cpu_offload": "parameters"},
            "needs an engine that offloads them",
        ),
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
    said = {"method": "grpo", "rewards__functions": ["length"], "generate__num_generations": 4}
    made = ask(known, **said, train__batch_size=16, cluster__processes=2, cluster__engine="fsdp2")
    owners = {
        phase.phase: {one.owner: one.num_bytes for one in phase.owners} for phase in made.prediction.phases
    }
    assert owners["generation"]["gathered weights"] == 2 * owners["generation"]["weights"]
    # Each rank reads its own rows.
    assert owners["generation"]["weights"] == owners["load"]["weights"]


def test_a_tiny_policy_is_not_cut_into_shards_for_every_layer_waits_for_the_others(ask, facts_of, profile_of):
    """Two processes that write completions: a collective takes milliseconds, a layer of it much less."""
    known = facts_of(cpu(64 * GIB, 4), profile_of(*[128] * 64), TINY, method="grpo")
    said = {"method": "grpo", "rewards__functions": ["length"], "generate__num_generations": 4}
    made = ask(known, **said, train__batch_size=16, cluster__processes=2)
    assert made.settings.engine == "ddp"
    reason = next(one.reason for one in made.decisions if one.setting == "engine")
    assert "slower" in reason


def test_offloaded_states_of_a_rank_come_in_buckets_of_its_own_rows(make_settings):
    """Qwen2.5-14B under FSDP2 on 4 cards: its trace holds 3.34 GiB in the optimizer's step (6 and 12 layers
    alike), and 12.39 were predicted, of whole tensors. Found with DeepSpeed#7482, which fits in less."""
    config = NARROW | {
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "num_hidden_layers": 12,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "model_type": "qwen2",
    }
    changes = {"dtype": "bfloat16", "master_weights": True, "optimizer_offload": True, "device": "cuda"}
    settings = make_settings(num_processes=4, engine="fsdp2", **changes)
    load = Workload(settings, shape_of(config), HeaviestBatch(2, 1024, 1022, 512))
    scratch = optimizer_scratch(load, accumulates=False)
    assert scratch + offload_bucket(load) == pytest.approx(3.34 * GIB, rel=0.02)
