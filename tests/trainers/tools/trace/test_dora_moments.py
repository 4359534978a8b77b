"""The arithmetic of DoRA, and of layers whose MLP is narrow, each moment against a trace."""

from dataclasses import replace

import pytest
from trace_cases import DORA, EVERY, HALF, LLAMA, LORA, QWEN, SMALL, sft

from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.tools.trace.trace import trace

CUDA = {"device": "cuda", "attention": "torch_varlen"}
NARROW = {"intermediate_size": 128}
FACTORS = ("gate_proj", "up_proj")
SHORT = HeaviestBatch(rows=1, tokens=64, scored_tokens=64, longest=64)
"""Rows that are short beside the width of an MLP."""


def of(*names):
    return Adapter(r=8, kind="dora", target_modules=names)


def error_of(case, phase=None):
    """Share by which the arithmetic, without a batch's own numbers, is above a traced peak."""
    found, predicted = trace(case.job).recorder, case.estimated()
    at = predicted.peak if phase is None else next(p for p in predicted.phases if p.phase == phase)
    batch = sum(one.num_bytes for one in at.owners if one.owner == "batch")
    return (at.num_bytes - batch) / (found.phase_peaks[phase] if phase else found.peak_bytes) - 1


@pytest.mark.parametrize("adapter", [None, LORA, DORA, of("q_proj", "v_proj")])
def test_an_mlp_as_narrow_as_the_model_has_the_peak_at_the_norm_before_it(adapter):
    """Float32 copies of the norm between attention and MLP: 4 to 11 % too low without."""
    case = sft(LLAMA | NARROW, HALF | EVERY | CUDA | {"adapter": adapter})
    assert -0.009 <= error_of(case) <= 0.002


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [128, 352, 1408])
def test_every_moment_of_a_last_map_that_is_scaled_is_counted(dtype, width):
    """Its float32 products, where the MLP is narrow (8 % too low); and that its outputs are gone where
    factors have their gradients (3 % too high in float32)."""
    case = sft(QWEN | {"intermediate_size": width}, EVERY | {"adapter": DORA, "dtype": dtype})
    assert error_of(case) == pytest.approx(0.0, abs=0.002)


def test_a_last_map_alone_scales_no_factor():
    """Counted as its factors' it was 52 % too high."""
    case = sft(LLAMA | {"intermediate_size": 1408}, HALF | EVERY | {"adapter": of("down_proj")})
    assert -0.001 <= error_of(case) <= 0.003


@pytest.mark.parametrize(
    ("adapter", "quantize"), [(DORA, "none"), (DORA, "4bit"), (of("gate_proj", "up_proj"), "none")]
)
def test_norms_of_adapted_rows_are_the_peak_of_short_rows(adapter, quantize):
    """Of B A in float32, its rounded form and the sum with the weight, which were not counted."""
    case = sft(LLAMA | {"intermediate_size": 2816}, HALF | EVERY | CUDA | {"adapter": adapter})
    case = replace(case, changes=case.changes | {"quantize": quantize}, batch=SHORT)
    assert -0.001 <= error_of(case) <= 0.018
    assert error_of(case, "evaluation") == pytest.approx(0.0, abs=0.005)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_evaluation_holds_three_products_of_a_scaled_factor(dtype):
    case = sft(LLAMA, EVERY | {"adapter": DORA, "dtype": dtype})
    assert error_of(case, "evaluation") == pytest.approx(0.0, abs=0.008)


@pytest.mark.parametrize("changes", [{}, EVERY])
def test_a_packed_factor_is_scaled_beside_its_unpacked_weight(changes):
    """Gate and up alone, of short rows: three float32 products, the weight and B A, 2.6 to 6 % too low
    without."""
    case = sft(LLAMA | {"intermediate_size": 1408}, HALF | CUDA | changes | {"adapter": of(*FACTORS)})
    case = replace(case, changes=case.changes | {"quantize": "4bit"}, batch=SHORT)
    assert -0.004 <= error_of(case) <= 0.035


@pytest.mark.parametrize("changes", [{}, EVERY])
@pytest.mark.parametrize("width", [352, 1024])
def test_a_gate_alone_is_scaled_when_the_other_factor_is_through(width, changes):
    """7 to 12 % too high with both factors' gradients there."""
    case = sft(LLAMA | {"intermediate_size": width}, HALF | changes | {"adapter": of("gate_proj")})
    assert error_of(case) == pytest.approx(0.0, abs=0.002)


@pytest.mark.parametrize("changes", [{}, EVERY, HALF, HALF | EVERY])
@pytest.mark.parametrize("adapter", [DORA, of("gate_up_proj")])
def test_a_map_of_both_factors_is_scaled_in_both_widths(adapter, changes):
    """Phi-3's: 21 % too low in bfloat16 by the width of one, then 3 % too high with a gate of its own; in
    float32 9 % too low, without three products of them."""
    phi = SMALL | {"model_type": "phi3", "sliding_window": None}
    assert error_of(sft(phi, changes | {"adapter": adapter})) == pytest.approx(0.0, abs=0.002)


@pytest.mark.parametrize("width", [128, 352])
def test_a_norm_after_the_mlp_has_the_gradient_of_the_residual_stream_beside(width):
    """OLMo 2 in float32: 1.7 % too low without it."""
    olmo = SMALL | {"model_type": "olmo2", "intermediate_size": width}
    assert error_of(sft(olmo, EVERY | {"adapter": DORA})) == pytest.approx(0.0, abs=0.002)
