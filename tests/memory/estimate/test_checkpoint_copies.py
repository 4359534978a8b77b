"""What a save in the background copies into host memory: bytes of a weight by hand, times the weights."""

import pytest

from memtrain.memory.estimate.checkpoint_copies import copied_bytes
from memtrain.memory.estimate.host_memory import host_bytes, host_shortage
from memtrain.memory.estimate.peaks import estimate
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.plan import COPY, Prediction
from memtrain.recipes.sections.model import Adapter

SHAPE = shape_of(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
    }
    | {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
)
WHOLE = SHAPE.num_parameters
BATCH = HeaviestBatch(1, 16, 16, 16)
HALF = {"dtype": "bfloat16", "master_weights": True}
CASES = {
    "float32 with two moments": ({}, 12 * WHOLE),
    "bfloat16 with copies and float32 moments": (HALF, 14 * WHOLE),
    "no states": ({"optimizer": "sgd"}, 4 * WHOLE),
    "each process its part": ({"num_processes": 2, "engine": "fsdp2"}, 6 * WHOLE),
    "DeepSpeed's parts": ({"num_processes": 2, "engine": "zero2"}, 6 * WHOLE),
    "the main process all": (
        {"num_processes": 2, "engine": "fsdp2", "checkpoint_layout": "full"},
        12 * WHOLE,
    ),
    "one of many that hold all": ({"num_processes": 2, "checkpoint_layout": "full"}, 12 * WHOLE),
    "with a reference that follows": ({"reference": "synced"}, 16 * WHOLE),
}


def phase(made: Prediction, name: str) -> dict[str, int]:
    (found,) = (one for one in made.phases if one.phase == name)
    return {owned.owner: owned.num_bytes for owned in found.owners}


@pytest.mark.parametrize("case", CASES)
def test_weights_and_states_are_copied_once(make_settings, case: str):
    given, expected = CASES[case]
    settings = make_settings(**({"checkpoint_layout": "sharded"} | given), background_save=True)
    assert copied_bytes(settings, SHAPE) == expected
    waits = settings.model_copy(update={"background_save": False})
    assert copied_bytes(waits, SHAPE) == 0


def test_of_a_model_with_an_adapter_the_adapter_is_copied(make_settings):
    """Rank 2 on two maps of 8 x 8 in each of two layers: 2 * 2 * (2 * 8 + 8 * 2) weights in float32."""
    adapter = Adapter(r=2, target_modules=("q_proj", "v_proj"))
    settings = make_settings(adapter=adapter, background_save=True)
    assert copied_bytes(settings, SHAPE) == 12 * 128


@pytest.mark.parametrize("name", ["steady step", "evaluation", "saving"])
def test_on_a_cpu_the_copy_is_in_every_phase_after_the_first_save(make_settings, name: str):
    plain, copied = (estimate(make_settings(background_save=is_on), SHAPE, BATCH) for is_on in (False, True))
    assert phase(copied, name) == phase(plain, name) | {COPY: 12 * WHOLE}
    assert COPY not in phase(copied, "first step")


def test_what_deepspeed_gathers_is_copied_and_not_held_twice(make_settings):
    settings = make_settings(num_processes=2, engine="zero2", background_save=True)
    made = phase(estimate(settings, SHAPE, BATCH), "saving")
    assert made[COPY] == 12 * WHOLE
    assert "states to save" not in made


@pytest.mark.parametrize("layout", ["full", "sharded"])
def test_beside_a_gpu_the_copies_are_in_the_hosts_memory(make_settings, layout: str):
    """Of the process that writes all; or of each, half."""
    settings = make_settings(
        device="cuda", num_processes=2, engine="fsdp2", background_save=True, checkpoint_layout=layout
    )
    prediction = estimate(settings, SHAPE, BATCH)
    assert COPY not in phase(prediction, "saving")
    assert host_bytes(settings, SHAPE, BATCH, 10, prediction)[COPY] == 12 * WHOLE


def test_a_host_that_the_copy_exhausts_is_reported_with_the_way_out():
    hardware: Hardware = cpu(2**30, 1)
    refused = host_shortage({COPY: 2**31}, hardware)
    assert refused is not None
    assert "save.async_save: false" in refused.text()
