"""Predicted times: orders that must hold, and operations counted by hand."""

from dataclasses import replace

import pytest

from memtrain.memory.estimate.adapters import adapter_traffic
from memtrain.memory.estimate.step_time import _head_operations, _head_traffic, _layer_operations, step_time
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.calibration import Measured
from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import GIB
from memtrain.recipes.sections.model import Adapter

LLAMA = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA8 = shape_of(LLAMA | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8})
BASE = {
    "device": "cuda",
    "num_processes": 1,
    "threads": 1,
    "dtype": "bfloat16",
    "attention": "torch_varlen",
    "liger": False,
    "adapter": None,
    "quantize": "none",
    "max_length": 2048,
    "truncation": "keep_start",
    "packing": "none",
    "cross_document_attention": False,
    "padding_free": True,
    "pad_to_multiple_of": None,
    "group_by_length": False,
    "batch_size": 1,
    "batch_tokens": None,
    "micro_batch_size": 1,
    "micro_tokens": None,
    "max_steps": 1,
    "checkpoint_every": 0,
    "offload": "none",
    "loss": "chunked",
    "loss_tile_bytes": 64 << 20,
    "optimizer": "adamw",
    "master_weights": False,
    "expandable_segments": True,
}
H100 = Hardware.named("h100")
BATCH = HeaviestBatch(rows=8, tokens=16384, scored_tokens=16384, longest=2048)


def seconds(hardware=H100, batch=BATCH, num_micro_batches=1, **changes):
    return step_time(
        Settings(**(BASE | changes)), LLAMA8, batch, hardware, num_micro_batches=num_micro_batches
    ).seconds


def test_paged_states_cross_the_bus_in_every_step():
    """8B of float32 states are 64 GB: there and back over 25.6 GB/s they take 5 s, which AdamW on the device
    does not."""
    card = Hardware.named("4090")
    one = HeaviestBatch(rows=1, tokens=512, scored_tokens=512, longest=512)
    on_device, paged = (
        seconds(card, one, optimizer=kind, in_backward=True) for kind in ("adamw", "paged_adamw")
    )
    assert paged - on_device == pytest.approx(2 * 8 * LLAMA8.num_parameters / 25.6e9, rel=0.1)
    eight_bit = seconds(card, one, optimizer="paged_adamw_8bit", in_backward=True)
    assert eight_bit - on_device == pytest.approx(2 * 2 * LLAMA8.num_parameters / 25.6e9, rel=0.2)


def test_full_offloading_is_taken_to_be_slow_until_the_machine_was_measured():
    unmeasured = seconds(offload="all")
    rates = H100.rates
    found = Measured(
        device="H100",
        made="2026-11-22",
        versions={},
        beside_bytes=0,
        half_matmul_per_s=rates.half_matmul_per_s,
        single_matmul_per_s=rates.single_matmul_per_s,
        bytes_per_s=rates.bytes_per_s,
        host_bytes_per_s=rates.host_bytes_per_s,
        launch_s=rates.launch_s,
        granularity_bytes=512,
    )
    measured = seconds(replace(H100, measured=found), offload="all")
    assert measured < unmeasured
    assert unmeasured - seconds() == pytest.approx(2 * (measured - seconds()), rel=0.35)


def test_operations_of_a_plain_step_are_six_a_weight_and_token():
    load = Workload(Settings(**BASE), LLAMA8, BATCH)
    weights = LLAMA8.num_linear_weights
    assert _layer_operations(load) == pytest.approx(6 * weights * 16384)
    # Logits twice (tiles are formed again for a trained half-precision head), d_hidden, d_weight.
    assert _head_operations(load) == 4 * 2 * (16384 - 8) * 128256 * 4096


def test_tritons_kernels_pass_over_logits_two_and_a_half_times():
    """Read for the scores, read for the gradient, which is written in half precision: 10 bytes a logit. Torch
    passes 12 times where a tile is formed twice."""
    triton, torch = (
        Workload(Settings(**(BASE | {"loss_kernel": kernel})), LLAMA8, BATCH)
        for kernel in ("triton", "torch")
    )
    logits = (16384 - 8) * 128256
    assert _head_traffic(triton) == 10 * logits
    assert _head_traffic(torch) == 48 * logits
    single = BASE | {"loss_kernel": "triton", "dtype": "float32"}
    assert _head_traffic(Workload(Settings(**single), LLAMA8, BATCH)) == 12 * logits


def test_what_saves_memory_by_computing_again_takes_longer():
    assert seconds() < seconds(checkpoint_every=2) < seconds(checkpoint_every=1)
    assert 1.1 < seconds(checkpoint_every=1) / seconds() < 1.4


def test_an_adapter_is_faster_than_all_weights_and_four_bits_cost_time():
    lora, qlora = seconds(adapter=Adapter(r=16)), seconds(adapter=Adapter(r=16), quantize="4bit")
    assert lora < seconds()
    assert lora < qlora


def test_compiled_layers_move_what_fused_kernels_move():
    compiled, plain = seconds(compiled=True), seconds()
    assert compiled < plain
    assert compiled == seconds(kernels="fused")


def test_an_adapter_reads_its_inputs_and_moves_the_outputs_it_is_added_to():
    """Forward x, and the output read and written; backward the gradient twice, x, and its gradient there and
    back. With dropout layers are PEFT's, whose product is written, scaled and added besides, and whose part
    of x's gradient is a tensor of its own, there and back."""
    one, two = (Adapter(r=8, alpha=16, target_modules=["q_proj", "v_proj"], dropout=d) for d in (0.0, 0.1))
    plain, peft = (Workload(Settings(**(BASE | {"adapter": it})), LLAMA8, BATCH) for it in (one, two))
    inputs, outputs = 2 * 4096, 4096 + 1024
    assert adapter_traffic(plain, 2) == 2 * 16384 * (2 * (inputs + 2 * outputs) + 2 * outputs + 3 * inputs)
    more = 2 * 16384 * (2 * 4 * outputs + 2 * inputs)
    assert adapter_traffic(peft, 2) - adapter_traffic(plain, 2) == more


def test_offloading_boundaries_hides_behind_computing_and_offloading_everything_does_not():
    checkpointed = seconds(checkpoint_every=1)
    assert seconds(checkpoint_every=1, offload="boundaries") < 1.12 * checkpointed
    assert seconds(offload="all") > 1.4 * seconds()


def test_padding_costs_what_it_computes():
    uneven = HeaviestBatch(rows=8, tokens=4096, scored_tokens=4096, longest=2048)
    assert seconds(batch=uneven, padding_free=False) > 2 * seconds(batch=uneven)


def test_twice_the_micro_batches_take_nearly_twice_as_long():
    assert 1.8 < seconds(num_micro_batches=2) / seconds() <= 2.0


def test_the_host_takes_13_microseconds_for_an_operator_of_a_step_beside_a_gpu():
    """A row of 64 tokens waits for the host: 32 layers of 122 operators, 6 for each of 7 adapters in three
    passes, 40 of the loss's tile, and 14 tensors a layer whose step is a fifth of one."""
    short = HeaviestBatch(rows=1, tokens=64, scored_tokens=64, longest=64)
    settings = Settings(**(BASE | {"adapter": Adapter(r=16), "optimizer": "sgd"}))
    found = step_time(settings, LLAMA8, short, H100)
    adapters = 32 * 6 * 7 * 3
    assert found.launch_s == pytest.approx(13.2e-6 * (32 * 122 + adapters + 40 + 32 * 14 * 0.2))
    assert found.seconds > found.launch_s
    on_host = step_time(Settings(**(BASE | {"device": "cpu"})), LLAMA8, short, cpu(64 * GIB, 16))
    assert on_host.launch_s == pytest.approx(8e-6 * (32 * 122 + 40 + 32 * 9 * 0.2))


PUBLISHED = {
    "8B LoRA, 4,022 tokens of a row of 4,096": ("qwen3-8b", Adapter(r=16, alpha=32), 4022, 467, 0.261),
    "0.6B LoRA, 16,381 of 16,384": ("qwen3-0.6b", Adapter(r=16, alpha=32), 16381, 1870, 0.208),
    "0.6B, all weights, 16,381": ("qwen3-0.6b", None, 16381, 1870, 0.205),
}
"""Seconds of a captured micro-batch of packed rows (forward, loss, backward) on an H100 80GB HBM3,
2026-11-28, memtrain da82c74f, torch 2.11: (model, adapter, tokens, length of the document that a token is in,
mean over tokens, seconds). Documents are an eighth of the row at most."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_captured_micro_batches_take_what_was_measured(name):
    """Within 5 %; their kernels alone were busy for 256, 207 and 205 ms."""
    model, adapter, tokens, document, measured = PUBLISHED[name]
    shape = shape_of(known_config(model))
    changes = {"kernels": "fused", "loss_kernel": "triton", "adapter": adapter, "step_graphs": True}
    batch = HeaviestBatch(1, tokens, tokens, document, segments=8, attended_tokens=document)
    found = step_time(Settings(**(BASE | changes)), shape, batch, H100)
    assert found.seconds - found.optimizer_s == pytest.approx(measured, rel=0.05)
    eager = step_time(Settings(**(BASE | changes | {"step_graphs": False})), shape, batch, H100)
    assert eager.seconds > 1.03 * found.seconds


def test_a_captured_step_has_no_host_term_and_an_eager_one_has():
    """On a host a hundred times as slow only the launches of the update, and of one graph, are late."""
    slow = replace(H100, rates=replace(H100.rates, launch_s=100 * H100.rates.launch_s))
    captured = [seconds(one, adapter=Adapter(r=16), step_graphs=True) for one in (H100, slow)]
    eager = [seconds(one, adapter=Adapter(r=16)) for one in (H100, slow)]
    assert captured[1] < 1.05 * captured[0]
    assert eager[1] > 5 * eager[0]


def test_the_share_of_a_step_that_waits_for_the_host():
    """A row of 64 tokens: all but what the device needs is waiting. A long row waits for nothing, nor does a
    CPU, whose operators run as they are asked for."""
    short = HeaviestBatch(rows=1, tokens=64, scored_tokens=64, longest=64)
    settings = Settings(**(BASE | {"adapter": Adapter(r=16)}))
    found = step_time(settings, LLAMA8, short, H100)
    assert 0.5 < found.waits_s / found.seconds < 1
    assert found.waits_s + (found.launch_s - found.waits_s) * 1.1 == pytest.approx(found.seconds, rel=1e-6)
    assert step_time(settings, LLAMA8, BATCH, H100).waits_s == 0
    on_host = Settings(**(BASE | {"device": "cpu"}))
    assert step_time(on_host, LLAMA8, short, cpu(64 * GIB, 16)).waits_s == 0


def test_a_faster_card_is_faster_and_a_cpu_is_not():
    cards = [seconds(Hardware.named(name)) for name in ("b200", "h100", "a100", "l4")]
    assert cards == sorted(cards)
    assert seconds(cpu(64 * GIB, 16), dtype="float32", device="cpu") > 100 * cards[1]


@pytest.mark.parametrize("processes", [1, 2])
def test_threads_and_not_visible_cores_make_time_and_plan(ask, facts_of, processes: int):
    """A job with as many cores as it has threads, beside a machine with sixteen."""
    said = {"cluster__threads": 1, "cluster__processes": processes, "train__batch_size": 8}
    few, many = (ask(facts_of(cpu(64 * GIB, cores)), **said) for cores in (processes, 16))
    assert few.settings == many.settings
    assert few.chosen.step_s == many.chosen.step_s
    assert [one.token_s for one in few.tried] == [one.token_s for one in many.tried]


def test_a_process_computes_with_its_threads_as_far_as_there_are_cores():
    machine = cpu(64 * GIB, 8)
    alone = machine.rates_of(8, 1)
    assert alone == machine.rates
    assert machine.rates_of(2, 1).single_matmul_per_s == pytest.approx(alone.single_matmul_per_s / 4)
    # Four processes with four threads each on eight cores have two cores each.
    assert machine.rates_of(4, 4) == machine.rates_of(2, 4)
    assert Hardware.named("h100").rates_of(1, 8) == Hardware.named("h100").rates
