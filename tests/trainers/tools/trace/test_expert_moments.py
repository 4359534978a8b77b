"""The arithmetic of adapted models with experts, at moments of forward passes, against traces."""

from dataclasses import replace

import pytest
from trace_cases import EVERY, EXPERTS, HALF, LORA, MIXTRAL, OF_STACKS, SMALL, sft

from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.tools.trace.trace import trace

QWEN_MOE = SMALL | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 96}
OF_ATTENTION = Adapter(r=8, target_modules=("q_proj", "v_proj"))
UP_ALONE = Adapter(r=8, target_modules=("q_proj",), target_parameters=("experts.gate_up_proj",))


def error_of(case):
    """Share by which the arithmetic, without a batch's own numbers, is above the traced peak."""
    peak = case.estimated().peak
    batch = sum(one.num_bytes for one in peak.owners if one.owner == "batch")
    return (peak.num_bytes - batch) / trace(case.job).recorder.peak_bytes - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", [OF_ATTENTION, UP_ALONE])
def test_outputs_are_weighted_beside_the_gradient_that_is_copied_for_each_expert(adapter, dtype):
    """Where a layer is computed again: 2.5 to 4.9 % too low without that moment."""
    case = sft(QWEN_MOE, EVERY | {"adapter": adapter, "dtype": dtype})
    assert -0.011 <= error_of(case) <= 0.011


@pytest.mark.parametrize("adapter", [OF_STACKS, LORA])
def test_adapted_stacks_add_two_products_and_lay_out_their_adapters_in_float32(adapter):
    """The sum of gate and up is made of two products as large, and adapters that meet the experts' width are
    kept as the kernel wants them: 2.3 to 2.6 % too low without."""
    assert error_of(sft(MIXTRAL, {"adapter": adapter})) == pytest.approx(0.0, abs=0.002)
    assert error_of(sft(MIXTRAL, EVERY | {"adapter": adapter})) == pytest.approx(0.0, abs=0.002)


def test_experts_of_a_forward_pass_hold_more_than_is_kept():
    """In half precision, where adapters are rounded: 2.3 % too low without the last layer's forward pass."""
    assert error_of(sft(MIXTRAL, HALF | {"adapter": UP_ALONE})) == pytest.approx(0.0, abs=0.003)


STACKS_ALONE = OF_STACKS.model_copy(update={"target_modules": ()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", [Adapter(r=8, target_modules=("o_proj",)), STACKS_ALONE])
@pytest.mark.parametrize("config", [QWEN_MOE, MIXTRAL])
def test_the_first_layer_of_a_mixture_keeps_no_attention_before_its_first_adapter(config, adapter, dtype):
    """6 to 16 % too high with it, of two layers."""
    case = sft(config, {"adapter": adapter, "dtype": dtype})
    assert -0.005 <= error_of(case) <= 0.03


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
@pytest.mark.parametrize("config", [QWEN_MOE, MIXTRAL])
def test_outputs_make_room_for_their_gradient_before_packed_experts_are_unpacked(config, quantize, dtype):
    """4 to 5 % too high with both (128 experts of 768 under 8,192 tokens: 5.5 to 6.6)."""
    case = sft(config, EVERY | {"adapter": LORA, "dtype": dtype, "quantize": quantize})
    assert -0.006 <= error_of(case) <= 0.016


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_gradients_of_adapters_lie_beside_experts_that_are_unpacked(quantize, dtype):
    """Where rows are few and ranks not small beside the experts: 2.7 to 2.9 % too low without."""
    case = sft(QWEN_MOE, EVERY | {"adapter": LORA, "dtype": dtype, "quantize": quantize})
    short = HeaviestBatch(rows=1, tokens=64, scored_tokens=64, longest=64)
    assert -0.013 <= error_of(replace(case, batch=short)) <= 0.003
