"""What is proposed where memory runs out, and plans that would exhaust the host."""

from collections.abc import Callable
from functools import partial

import pytest

from memtrain.memory.estimate.host_memory import host_bytes, host_shortage
from memtrain.memory.estimate.peaks import estimate
from memtrain.memory.explain.suggestions import suggestions
from memtrain.memory.hardware.devices import cpu
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.model_shape.shape import ModelShape, shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import GIB, MIB
from memtrain.recipes.sections.model import Adapter

BATCH = HeaviestBatch(4, 8192, 8192, 2048)


@pytest.fixture
def shape() -> ModelShape:
    """Llama-3.1-8B."""
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    return shape_of(config)


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings(device="cuda", dtype="bfloat16", attention="torch_varlen", loss_tile_bytes=64 * MIB)


def test_ways_out_fit_and_none_contains_another(settings: Settings, shape: ModelShape):
    ways = suggestions(settings, shape, BATCH, 24 * GIB)
    assert ways
    assert all(way.peak_bytes <= 24 * GIB for way in ways)
    assert len(ways[0].changes) == min(len(way.changes) for way in ways)
    for one in ways:
        assert not any(set(one.changes) < set(other.changes) for other in ways)


def test_where_nothing_fits_the_lowest_peak_is_reported(settings: Settings, shape: ModelShape):
    (way,) = suggestions(settings, shape, BATCH, 1 * GIB)
    assert way.peak_bytes > 1 * GIB
    assert way.peak_bytes < estimate(settings, shape, BATCH).peak.num_bytes


def test_processes_may_hold_rows_together_where_nothing_forbids_it(settings: Settings, shape: ModelShape):
    """LoRA on four GPUs, one row of 65,536 tokens: its activations are what does not fit."""
    row = HeaviestBatch(1, 65536, 65536, 65536)
    four = settings.model_copy(
        update={"num_processes": 4, "adapter": Adapter(), "quantize": "4bit", "optimizer": "adafactor"}
    )
    words = [way.words() for way in suggestions(four, shape, row, 24 * GIB, can_slice=True)]
    assert any("cluster.context_parallel: " in one for one in words)
    assert not any("context" in way.words() for way in suggestions(four, shape, row, 24 * GIB))


def test_adapters_on_all_experts_may_be_left_out(settings: Settings):
    """Rank 16 on 128 experts of 48 layers: 16 * (2 * (2048 + 1536) + 768 + 2048) * 128 * 48 weights.

    By hand: of each of them 4 bytes and 4 of its gradient are on the device, wherever the experts live.
    """
    shape = shape_of(known_config("Qwen/Qwen3-30B-A3B") or {})
    changes = {"adapter": Adapter(), "quantize": "4bit", "weights_offload": True, "optimizer_offload": True}
    away = settings.model_copy(update=changes | {"loss": "chunked", "offload": "boundaries"})
    row = HeaviestBatch(1, 4096, 4096, 4096)
    (way,) = [one for one in suggestions(away, shape, row, 8 * GIB, most=9) if len(one.changes) == 1][:1]
    assert "[q_proj, k_proj, v_proj, o_proj], without the experts" in way.words()
    weights = 16 * (2 * (2048 + 1536) + 768 + 2048) * 128 * 48
    assert estimate(away, shape, row).peak.num_bytes - way.peak_bytes > 8 * weights


def test_states_on_the_host_leave_the_device_and_are_counted_there(settings: Settings, shape: ModelShape):
    """16.06 billion bytes of bfloat16 weights: two moments are twice that."""
    moved = settings.model_copy(update={"optimizer_offload": True})
    saved = estimate(settings, shape, BATCH).peak.num_bytes - estimate(moved, shape, BATCH).peak.num_bytes
    moments = 2 * 2 * shape.num_parameters
    owners = host_bytes(moved, shape, BATCH, 1000, estimate(moved, shape, BATCH))
    assert owners["optimizer states"] == moments
    assert 0.9 * moments < saved <= moments


def test_a_plan_that_exhausts_the_host_is_refused_with_numbers(settings: Settings, shape: ModelShape):
    """8 processes of 16.06 GB of moments each: 2 * 2 bytes * 8.03 billion."""
    moved = settings.model_copy(update={"optimizer_offload": True, "num_processes": 8})
    owners = host_bytes(moved, shape, BATCH, 1000, estimate(moved, shape, BATCH))
    assert host_shortage(owners, cpu(512 * GIB, 8)) is None
    fault = host_shortage(owners, cpu(64 * GIB, 8))
    assert fault is not None
    assert fault.exit_code == 3
    assert "but only 64.00 GiB are there (optimizer states 239.3 GiB" in str(fault)
    assert "memory.optimizer_offload: off" in str(fault)


def test_boundaries_of_every_layer_are_counted(settings: Settings, shape: ModelShape):
    """32 layers of 8,192 tokens x 4,096 numbers x 2 bytes."""
    moved = settings.model_copy(update={"offload": "boundaries"})
    owners = host_bytes(moved, shape, BATCH, 0, estimate(moved, shape, BATCH))
    assert owners["offloaded activations"] == 32 * 8192 * 4096 * 2


def test_the_processes_of_a_cpu_run_share_its_memory(
    make_settings: Callable[..., Settings], shape: ModelShape
):
    one, four = make_settings(), make_settings(num_processes=4)
    prediction = estimate(one, shape, BATCH)
    alone = sum(host_bytes(one, shape, BATCH, 0, prediction).values())
    assert sum(host_bytes(four, shape, BATCH, 0, prediction).values()) == 4 * alone


def test_a_step_inside_the_backward_pass_is_predicted_without_the_gradients(
    settings: Settings, shape: ModelShape
):
    """Gradients of 16 GB are there otherwise; inside, the largest tensor's 1.05 GB."""
    inside = settings.model_copy(update={"in_backward": True})
    saved = estimate(settings, shape, BATCH).peak.num_bytes - estimate(inside, shape, BATCH).peak.num_bytes
    assert saved > 2 * shape.num_parameters - 2 * 2 * 128256 * 4096


def test_the_host_holds_pinned_rings_offloaded_states_and_the_dataset_index(
    settings: Settings, shape: ModelShape
):
    """Two processes: 16 layers of 4,097 tokens x 4,096 numbers x 2 bytes, in blocks of whole 2 MiB; two
    moments of 2 bytes a weight; 64 bytes a row of a million."""
    moved = settings.model_copy(
        update={"offload": "boundaries", "checkpoint_every": 2, "optimizer_offload": True, "num_processes": 2}
    )
    row = HeaviestBatch(1, 4097, 4097, 4097)
    owners = host_bytes(moved, shape, row, 1_000_000, estimate(moved, shape, row))
    assert owners["offloaded activations"] == 2 * 16 * 34 * MIB
    assert owners["optimizer states"] == 2 * 2 * 2 * shape.num_parameters
    assert owners["dataset index"] == 2 * 64 * 1_000_000
    fewer = moved.model_copy(update={"offload_keep": 4})
    owners_of = partial(
        host_bytes, shape=shape, heaviest=row, num_rows=1, prediction=estimate(moved, shape, row)
    )
    assert owners_of(fewer)["offloaded activations"] == 2 * 12 * 34 * MIB
    on_disk = moved.model_copy(update={"offload_disk": "/scratch", "offload_host_bytes": 100 * MIB})
    assert owners_of(on_disk)["offloaded activations"] == 2 * 100 * MIB
    fault = host_shortage(owners, cpu(32 * GIB, 8))
    assert fault is not None
    assert "of host memory, but only 32.00 GiB" in str(fault)
