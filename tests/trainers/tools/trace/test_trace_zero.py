"""DeepSpeed's engine without data: against the CPU allocator, one played rank and two that are there."""

import os
import socket
from dataclasses import replace
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from trace_cases import BASE, HALF, LLAMA, TEACHER, ZERO, Nobody, random_states, real_peak, sft, zero

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.memory_meter.cpu_allocator_peak import allocator_peak
from memtrain.trainers.tools.trace import client as traced
from memtrain.trainers.tools.trace import fake_ranks
from memtrain.trainers.tools.trace.client import can_trace
from memtrain.trainers.tools.trace.fake_model import bare_model
from memtrain.trainers.tools.trace.trace import bare_models, run_steps, trace

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
CUDA = {"device": "cuda", "attention": "torch_varlen"}
FAST = ("ZeRO-1",)
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ZERO]
NOTES = 80_000
"""Bytes of lists and tables that DeepSpeed makes where nothing is traced: 19 KB in stages 1 and 2, up to
77 KB in stage 3 in half precision (seen)."""


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_of_deepspeeds_engine_finds_the_peak_of_the_real_allocator(name):
    case = ZERO[name]
    found, real = trace(case.job).recorder.peak_bytes, real_peak(case.job)
    assert real - NOTES - random_states(case.job) <= found <= real + random_states(case.job)


ASKED = (
    "ZeRO-1, dpo, adapter off",
    "ZeRO-2, bfloat16",
    "ZeRO-2, bfloat16, tied",
    "ZeRO-2, bfloat16, three ranks, accumulating",
    "ZeRO-2, four ranks, accumulating",
    "ZeRO-2, reward",
    "ZeRO-3, dpo, a copy, layers kept",
    "ZeRO-3, LoRA",
    "ZeRO-3, LoRA, checkpointed",
    "ZeRO-3, reward",
)


@pytest.mark.parametrize(
    "name", [name if name in ASKED else pytest.param(name, marks=pytest.mark.slow) for name in ZERO]
)
def test_the_arithmetic_follows_the_trace_of_the_rank_that_needs_the_most(name, monkeypatch):
    """Passes of references and teachers amid the step were not counted: up to 10 % too low. Gradients in
    bfloat16 were counted twice where stage 2 adds them in one buffer, and before any is summed: 14 % too
    high. Of four ranks that share a tied embedding the second needs the most, and the last is played."""
    case = ZERO[name]
    if name == "ZeRO-2, four ranks, accumulating":
        monkeypatch.setattr(fake_ranks, "played_rank", lambda settings: 1)
    peak, found = case.estimated().peak, trace(case.job).recorder.peak_bytes
    batch = sum(one.num_bytes for one in peak.owners if one.owner == "batch")
    assert found * 0.999 <= peak.num_bytes - batch <= found * 1.022


@pytest.mark.parametrize(
    "name", ["ZeRO-3", "ZeRO-3, LoRA, checkpointed", pytest.param("ZeRO-3, reward", marks=pytest.mark.slow)]
)
def test_an_evaluation_in_stage_3_gathers_one_map_at_a_time(name):
    """With the largest weight of all beside every layer: 8 to 12 % too high."""
    case = ZERO[name]
    found = trace(case.job).recorder.phase_peaks["evaluation"]
    [phase] = [one for one in case.estimated().phases if one.phase == "evaluation"]
    batch = sum(one.num_bytes for one in phase.owners if one.owner == "batch")
    assert found * 0.999 <= phase.num_bytes - batch <= found * 1.025


LARGE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704}
"""A vocabulary whose embedding is more than a layer."""


@pytest.mark.parametrize("is_tied", [False, True])
def test_stage_3_sends_an_embeddings_gradient_beside_what_waits(is_tied):
    """Of eight ranks, in bfloat16: up to 7 % too low without the copies that it is sent in and added by."""
    config = LLAMA | LARGE | {"tie_word_embeddings": is_tied}
    changes = zero(3, config) | HALF | {"num_processes": 8, "checkpoint_every": 1, "master_weights": True}
    case = sft(config, changes, 2)
    peak = case.estimated().peak
    batch = sum(one.num_bytes for one in peak.owners if one.owner == "batch")
    found = trace(case.job).recorder
    assert max(found.phase_peaks, key=found.phase_peaks.__getitem__) == "steady step.backward.embedding"
    assert peak.num_bytes - batch == pytest.approx(found.peak_bytes, rel=0.002)


LOADED = (
    "ZeRO-1, dpo, adapter off",
    "ZeRO-2, bfloat16",
    "ZeRO-3, bfloat16, checkpointed",
    "ZeRO-3, distill, a model",
)


@pytest.mark.parametrize(
    "name", [name if name in LOADED else pytest.param(name, marks=pytest.mark.slow) for name in ZERO]
)
def test_what_an_engine_makes_before_the_first_step_is_counted(name):
    """Parts of gradients, states and buffers: 10 to 50 % too low without. What a model with an adapter in
    half precision is cut with is taken 3 % too high; a teacher's head was counted whole, 7 %."""
    case = ZERO[name]
    found = trace(case.job).recorder.phase_peaks["load"]
    predicted = next(one for one in case.estimated().phases if one.phase == "load")
    assert found * 0.999 <= predicted.num_bytes <= found * (1.031 if name == OF_ADAPTER else 1.002)


OF_ADAPTER = "ZeRO-3, dpo, adapter off"


def test_traces_in_one_process_are_alike_and_leave_torchs_product_as_it_was():
    """The first counted tensors by which torch learns the shapes of cut ones (4 % of what a teacher's load
    needs), and stage 3 left a product of its own for all that came after."""
    before = torch.nn.functional.linear
    # Of a teacher as wide as no other, so that torch has not learnt its shapes.
    wide = TEACHER | {"hidden_size": 384, "intermediate_size": 1056}
    job = replace(ZERO["ZeRO-3, distill, a model"].job, teacher=wide)
    first, second = (trace(job).recorder.phase_peaks for _ in range(2))
    assert first == second
    assert torch.nn.functional.linear is before


@pytest.mark.slow
def test_a_stage_shares_out_what_it_says():
    """Between steps stage 1 has all weights, half of its own copies and of two moments; stage 2 in bfloat16
    all weights, half of the float32 copies and of two moments; stage 3 half of the weights too, its part of
    float32 gradients, and a bucket."""
    weights = sum(one.numel() for one in bare_model(LLAMA, Settings(**(BASE | HALF))).parameters())
    of_half = weights // 2
    first = trace(ZERO["ZeRO-1"].job).recorder
    assert first.phase_peaks["saving"] == pytest.approx(4 * weights + 3 * 4 * of_half, rel=0.001)
    second = trace(ZERO["ZeRO-2, bfloat16, checkpointed"].job).recorder
    assert second.phase_peaks["saving"] == pytest.approx(2 * weights + 3 * 4 * of_half, rel=0.001)
    third = trace(ZERO["ZeRO-3"].job).recorder
    bucket = ZERO["ZeRO-3"].settings.zero_bucket * 4
    assert third.phase_peaks["saving"] == pytest.approx(4 * of_half * 5 + bucket, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-2", "ZeRO-3"])
def test_a_gpu_that_overlaps_its_sums_has_a_second_bucket(name):
    here = ZERO[name]
    there = replace(here, changes=here.changes | CUDA)
    found = trace(there.job).recorder.peak_bytes
    assert there.estimated().peak.num_bytes == pytest.approx(found, rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ZeRO-1", "ZeRO-2", "ZeRO-3"])
def test_two_ranks_that_are_there_need_what_a_played_one_does(name):
    """Stage 3 needs 6 % more with gloo, which gathers and sums by buffers of its own (inferred), and more
    while a rank waits for the other on a busy machine: the lowest of three runs counts."""
    peaks = [peaks_of_ranks(name) for _ in range(3 if name == "ZeRO-3" else 1)]
    found = trace(ZERO[name].job).recorder.peak_bytes
    assert found == pytest.approx(min(map(max, peaks)), rel=0.07 if name == "ZeRO-3" else 0.01)


def peaks_of_ranks(name):
    """Peaks of two gloo ranks that are there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as pool:
        return pool.starmap(peak_of_rank, [(name, rank, port) for rank in range(2)])


def peak_of_rank(name, rank, port):
    """Peak of the CPU allocator in one of two gloo ranks."""
    torch.set_num_threads(1)
    place = {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    with patch.dict(os.environ, place):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        job = ZERO[name].job
        peak = allocator_peak([], lambda: run_steps(bare_models(job, "cpu"), job, Nobody(), is_marked=False))
        dist.destroy_process_group()
    return peak


def test_without_deepspeed_a_trace_says_what_to_install(monkeypatch):
    monkeypatch.setattr(traced, "find_spec", lambda name: None)
    job = ZERO["ZeRO-3"].job
    why = can_trace(job.recipe, job.settings)
    assert why is not None
    assert "memtrain[deepspeed]" in why
    away = job.settings.model_copy(update={"shard_offload": "parameters"})
    assert "host" in str(can_trace(job.recipe, away))
