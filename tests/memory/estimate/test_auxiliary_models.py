"""A value model beside the policy, by hand: what it adds to which moment of a step."""

from memtrain.memory.estimate.auxiliary_models import OF_VALUE, STEPS, headless, value_model, with_beside
from memtrain.memory.estimate.kept import kept_bytes
from memtrain.memory.estimate.peaks import estimate
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch

TINY = {"model_type": "llama", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
BATCH = HeaviestBatch(1, 16, 16, 16)
PASSES = {"activations": 1}
"""A moment at which the policy holds activations."""


def load_of(make_settings, **changes) -> Workload:
    return Workload(make_settings(**changes), shape_of(TINY), BATCH)


def test_a_value_model_of_its_own_has_states_from_the_first_update_on(make_settings):
    """Float32 weights W, gradients W, moments 2 W; 16 rows of 8 numbers and their norm are its head's."""
    load = load_of(make_settings, value="own")
    weights = 4 * headless(load.shape).num_parameters
    norm = 16 * 8 * (4 + 4) + 4 * 16
    picked = 4 * load.S * 8
    assert value_model(load, 1000, "load", {}) == {"value model": weights}
    assert value_model(load, 1000, STEPS[0], PASSES) == {
        "value model": weights,
        "value model's step": weights + 1000 + norm + picked,
    }
    updated = {"value model": 3 * weights, "value model's step": weights}
    assert value_model(load, 1000, STEPS[0], {}) == updated
    # Its backward pass comes after the policy's.
    alone = value_model(load, 1000, STEPS[0], PASSES, accumulates=False)["value model's step"]
    several = value_model(load, 1000, STEPS[0], PASSES)["value model's step"]
    assert several - alone == updated["value model's step"]
    assert value_model(load, 1000, STEPS[0], {}, accumulates=False) == updated
    assert value_model(load, 1000, "saving", {}) == {"value model": 3 * weights}
    # A moment of its own pass has counted what that holds, and comes before the first update.
    assert value_model(load, 1000, STEPS[0], {OF_VALUE: 7}) == {"value model": weights}
    assert value_model(load_of(make_settings, value="shared"), 1000, STEPS[0], PASSES) == {}


def test_a_value_model_is_loaded_whole_where_the_policy_is(make_settings):
    """Two ranks: half of it where each reads its part, all of it until DeepSpeed cuts it."""
    whole = 4 * headless(shape_of(TINY)).num_parameters
    cut = {"value": "own", "num_processes": 2}
    parts = load_of(make_settings, **cut, engine="fsdp2", loads_shards=True)
    assert value_model(parts, 0, "load", {}) == {"value model": whole / 2}
    zero = load_of(make_settings, **cut, engine="zero3")
    assert value_model(zero, 0, "load", {}) == {"value model": whole}


def test_the_peak_of_a_step_is_that_of_both_models_together(make_settings):
    """Each moment of the policy with what the value model holds then, and the highest sum."""
    load = load_of(make_settings, value="own")
    kept = kept_bytes(load)
    made = with_beside(estimate(load.settings, load.shape, BATCH), load, kept, ())
    weights = 4 * headless(load.shape).num_parameters
    alone = estimate(load.settings.model_copy(update={"value": "none"}), load.shape, BATCH)
    for both, one in zip(made.phases, alone.phases, strict=True):
        most = value_model(load, kept, both.phase, PASSES)
        assert one.num_bytes + weights <= both.num_bytes <= one.num_bytes + sum(most.values()) + 3 * weights
