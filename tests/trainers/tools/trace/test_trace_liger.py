"""A trace of Liger's own code: against the CPU allocator, and what its kernels keep on a GPU."""

import sys
from dataclasses import replace

import pytest
from trace_cases import HALF, LIGER, LLAMA, has_liger, on_a_cpu, random_states, real_peak, sft

from memtrain.trainers.tools.trace import client as traced
from memtrain.trainers.tools.trace.client import can_trace
from memtrain.trainers.tools.trace.trace import trace

needs_liger = pytest.mark.skipif(not has_liger(), reason="needs Liger (pip install 'memtrain[liger]')")
CUDA = {"device": "cuda", "attention": "torch_varlen"}


def on_a_gpu(case):
    is_stock = case.settings.attention == "transformers"
    return replace(case, changes=case.changes | ({} if is_stock else CUDA))


@needs_liger
@pytest.mark.parametrize("name", LIGER)
def test_a_trace_of_ligers_wrappers_finds_the_peak_of_the_real_allocator(name):
    job = LIGER[name].job
    with on_a_cpu(job):
        found, real = trace(job).recorder.peak_bytes, real_peak(job)
    assert found == pytest.approx(real, rel=0, abs=random_states(job) + 0.001 * real)


@needs_liger
def test_the_arithmetic_follows_liger():
    for name, case in LIGER.items():
        case = on_a_gpu(case)
        reported = case.estimated().peak.num_bytes
        assert reported == pytest.approx(trace(case.job).recorder.peak_bytes, rel=0.12), name


@needs_liger
def test_ligers_kernels_keep_less():
    """Two layers of 512 tokens in bfloat16, width 128: five norms keep their input in place of a copy in
    float32 and their normalized form (4 + 2 - 2 bytes a number; 4 + 2 where the input is there anyway), two
    MLPs of 352 no activated gate."""
    stock, fused = (trace(sft(LLAMA, HALF | CUDA | {"liger": use}).job).recorder for use in (False, True))
    part = "steady step.head"
    less = stock.phase_peaks[part] - fused.phase_peaks[part]
    assert 512 * (5 * 4 * 128 + 2 * 2 * 352) <= less <= 512 * (5 * 6 * 128 + 2 * 2 * 352)


@needs_liger
def test_tracing_liger_leaves_the_family_as_it_was():
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    trace(on_a_gpu(LIGER["Liger"]).job)
    assert vars(modeling_llama) == before


def test_without_liger_a_trace_says_what_to_install(monkeypatch):
    monkeypatch.setattr(traced, "find_spec", lambda name: None)
    job = LIGER["Liger"].job
    why = can_trace(job.recipe, job.settings)
    assert why is not None
    assert "memtrain[liger]" in why
    assert "liger_kernel" not in sys.modules or has_liger()
