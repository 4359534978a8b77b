"""The trace against torch's own CPU allocator, the arithmetic against the trace, and shallow against deep."""

import gc
import subprocess
import sys
from functools import cache

import pytest
import torch

import memtrain.memory.traced
from memtrain.memory.activations import HeaviestBatch
from memtrain.memory.allocator import replay
from memtrain.memory.estimate import estimate
from memtrain.memory.settings import Settings
from memtrain.memory.shape import shape_of
from memtrain.memory.traced import Traced, TraceJob, can_trace, job_of, traced
from memtrain.recipes.model import Adapter
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.trace.extrapolate import named_owners, phases_of, predict_by_trace
from memtrain.trainers.trace.fake import bare_model, dummy_micro
from memtrain.trainers.trace.measure import allocator_peak
from memtrain.trainers.trace.recorder import Recorder
from memtrain.trainers.trace.run import Job, play, trace

LLAMA = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 352}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True}
BATCH = HeaviestBatch(rows=4, tokens=512, scored_tokens=400, longest=200)
LORA = Adapter(r=8)
RANDOM_STATE_BYTES = 5056
"""torch's CPU random state, which each checkpointed layer keeps to draw again: no operator makes it. On a GPU
run it lies in host memory."""

BASE = {
    "device": "cpu",
    "num_processes": 1,
    "threads": 1,
    "dtype": "float32",
    "attention": "cpu",
    "liger": False,
    "adapter": None,
    "quantize": "none",
    "max_length": 200,
    "truncation": "keep_start",
    "packing": "none",
    "documents_see_each_other": False,
    "padding_free": True,
    "pad_to_multiple_of": None,
    "group_by_length": False,
    "batch_rows": 4,
    "batch_tokens": None,
    "micro_rows": 4,
    "micro_tokens": None,
    "max_steps": 2,
    "checkpoint_every": 0,
    "offload": "none",
    "loss": "chunked",
    "loss_tile_bytes": 1 << 19,
    "optimizer": "adamw",
    "master_weights": False,
    "expandable_segments": True,
}
PADDED = {"attention": "stock", "padding_free": False}
HALF = {"dtype": "bfloat16"}
RECIPES = {
    "plain": (LLAMA, {"loss": "full"} | PADDED, 1),
    "padding-free": (LLAMA, {"loss": "full"}, 1),
    "chunked": (LLAMA, {}, 1),
    "checkpointed": (LLAMA, {"checkpoint_every": 1}, 1),
    "checkpointed, accumulating": (LLAMA, {"checkpoint_every": 1}, 2),
    "every other layer": (LLAMA, {"checkpoint_every": 2}, 1),
    "bfloat16": (LLAMA, HALF, 1),
    "bfloat16, tied, checkpointed, accumulating": (QWEN, HALF | {"checkpoint_every": 1}, 2),
    "master weights": (QWEN, HALF | {"master_weights": True}, 1),
    "LoRA": (LLAMA, {"adapter": LORA} | HALF, 1),
    "LoRA, checkpointed": (QWEN, {"adapter": LORA, "checkpoint_every": 1}, 1),
    "norms on queries, padded": (QWEN, PADDED, 1),
    "dense attention": (LLAMA, {"attention": "dense"}, 1),
    "adafactor": (LLAMA, {"optimizer": "adafactor"} | HALF, 1),
    "muon": (LLAMA, {"optimizer": "muon", "checkpoint_every": 1}, 1),
}


def job_for(config, changes, num_micros, batch=BATCH):
    settings = Settings(**(BASE | changes))
    recipe = Recipe.model_validate(
        {
            "method": "sft",
            "model": {"config": {"model_type": "llama"}, "tokenizer": "builtin:tiny"},
            "data": {"train": ("rows.jsonl",)},
            "optim": {"kind": settings.optimizer, "master_weights": settings.master_weights},
        }
    )
    return Job(recipe, settings, config, batch, num_micros, want_stats=True)


class _Nobody(Recorder):
    """Runs the steps and counts nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *details):
        return None

    def own(self, tensors, owner):
        return None


def real_peak(job):
    model = bare_model(job.config, job.settings, device="cpu")
    micros = [dummy_micro(job.settings, job.batch) for _ in range(job.num_micros)]
    gc.collect()
    return allocator_peak(model, lambda: play(model, job, micros, _Nobody(), is_marked=False))


SCRATCH = {"dense attention": 0.08}
"""Share that CPU kernels take inside themselves where no operator returns it: batched products copy operands
that are not contiguous (inferred: the trace has no such tensor, and on CUDA no such copy is made)."""


@pytest.mark.parametrize("name", RECIPES)
def test_a_trace_finds_the_peak_of_the_real_allocator(name):
    job, found = job_for(*RECIPES[name]), traced_here(name)
    every = job.settings.checkpoint_every
    states = RANDOM_STATE_BYTES * -(-job.config["num_hidden_layers"] // every) if every else 0
    allowed = max(states, SCRATCH.get(name, 0.001) * found.peak_bytes)
    assert found.peak_bytes == pytest.approx(real_peak(job) - states, rel=0, abs=allowed)
    assert found.live_bytes == 0, "the trace keeps tensors alive"


@cache
def traced_here(name):
    return trace(job_for(*RECIPES[name]))


def test_the_arithmetic_follows_the_trace():
    errors = {}
    for name, (config, changes, num_micros) in RECIPES.items():
        settings = Settings(**(BASE | changes))
        predicted = estimate(settings, shape_of(config), BATCH, accumulates=num_micros > 1)
        errors[name] = predicted.peak.num_bytes / traced_here(name).peak_bytes - 1
    assert max(map(abs, errors.values())) < 0.12, errors
    assert sum(map(abs, errors.values())) / len(errors) < 0.02, errors


@pytest.mark.parametrize("name", ["every other layer", "master weights"])
def test_two_shallow_models_stand_for_a_deep_one(name):
    config, changes, num_micros = RECIPES[name]
    job = job_for(config | {"num_hidden_layers": 7}, changes, num_micros)
    guessed, _ = predict_by_trace(job)
    whole, recorder = predict_by_trace(job, is_whole=True)
    for guess, truth in zip(guessed, whole, strict=True):
        assert guess.phase == truth.phase
        assert guess.num_bytes == sum(owned.num_bytes for owned in guess.owners)
        # With master copies the first update's highest moment moves with depth; what is told is above it.
        room = 0.25 if (name, guess.phase) == ("master weights", "first step") else 0.0005
        assert truth.num_bytes * 0.9995 <= guess.num_bytes <= truth.num_bytes * (1 + room)
    assert recorder is not None
    assert max(p.num_bytes for p in whole) == recorder.peak_bytes


def test_owners_of_a_trace_are_known_and_sum_to_each_peak():
    recorder = traced_here("master weights")
    phases = {phase.phase: phase for phase in phases_of(named_owners(recorder))}
    steady = {owned.owner: owned.num_bytes for owned in phases["steady step"].owners}
    weights = sum(p.numel() * 2 for p in bare_model(QWEN, Settings(**(BASE | HALF))).parameters())
    assert {"weights", "master copies", "optimizer"} <= steady.keys()
    assert (steady["master copies"], steady["weights"]) == (2 * weights, pytest.approx(weights, rel=0.001))
    assert steady["optimizer"] == pytest.approx(4 * weights, rel=0.001)


def test_a_trace_feeds_the_model_of_the_cuda_allocator():
    recorder = trace(job_for(LLAMA, HALF | {"device": "cuda", "attention": "cuda"}, 1))
    replayed = replay(recorder.events)
    assert recorder.peak_bytes <= replayed.peak_allocated <= 1.02 * recorder.peak_bytes
    assert replayed.peak_allocated <= replayed.peak_reserved


def test_tracing_leaves_torch_and_transformers_as_they_were():
    from transformers import masking_utils

    from memtrain.trainers.losses import products, tiles

    before = masking_utils.is_tracing, products._multiply_, tiles.sums_half_in_fp32
    trace(job_for(LLAMA, HALF | {"device": "cuda", "attention": "cuda"}, 1))
    assert (masking_utils.is_tracing, products._multiply_, tiles.sums_half_in_fp32) == before
    assert type(torch.zeros(1)) is torch.Tensor


@pytest.mark.slow
def test_a_process_of_its_own_traces_and_remembers(tmp_path, monkeypatch):
    monkeypatch.setattr(memtrain.memory.traced, "_newest_source", lambda: "now")
    job = job_for(*RECIPES["chunked"])
    asked = job_of(job.recipe, job.settings, job.config, job.batch, accumulates=False)
    assert TraceJob.model_validate_json(asked.model_dump_json()) == asked
    first = traced(asked, cache=tmp_path)
    assert first.prediction.method == "trace"
    assert first.prediction.peak.num_bytes == trace(job).peak_bytes
    [file] = tmp_path.glob("*.json")
    file.write_text(Traced(prediction=first.prediction, reserved_bytes=7, seconds=0.0).model_dump_json())
    assert traced(asked, cache=tmp_path).reserved_bytes == 7


def test_what_cannot_be_traced_says_why():
    job = job_for(LLAMA, {}, 1)
    assert can_trace(job.recipe, job.settings) is None
    why = can_trace(job.recipe, job.settings.model_copy(update={"quantize": "4bit", "adapter": LORA}))
    assert why is not None
    assert "bitsandbytes" in why


def test_asking_for_a_trace_loads_no_torch():
    code = "import sys; import memtrain.memory.traced; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
