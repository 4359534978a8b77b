"""Seconds of attention: operations counted by hand, over the rates that its kernels were published with."""

import pytest

from memtrain.memory.estimate.attention_time import attention_time, sum_of_squares
from memtrain.memory.estimate.pricing import typical_micro_batch
from memtrain.memory.estimate.workload import HeaviestBatch, Workload
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.plan.settings import Settings
from tests.memory.estimate.test_step_time import BASE, LLAMA8

ROW = HeaviestBatch(rows=1, tokens=16384, scored_tokens=16384, longest=16384)
OPERATIONS = 32 * 2 * 4096 * 16384**2
"""Of all layers in one forward pass; 2.5 times as many backward."""


def tflops(card: str, attention: str, num_forward: int = 1) -> float:
    """Operations a second of the attention of a step, in 10^12."""
    hardware = Hardware.named(card)
    load = Workload(Settings(**(BASE | {"attention": attention})), LLAMA8, ROW)
    seconds = attention_time(load, hardware, hardware.rates.half_matmul_per_s, num_forward)
    return OPERATIONS * (num_forward + 2.5) / seconds / 1e12


def mean(forward: float, backward: float) -> float:
    """Rate of one pass forward and one backward, of those of both."""
    return 3.5 / (1 / forward + 2.5 / backward)


@pytest.mark.parametrize(
    ("card", "attention", "forward", "backward"),
    [
        ("a100", "torch_varlen", 0.73 * 312, 0.63 * 312),
        ("h100", "torch_varlen", 370, 320),
        ("h200", "flash", 370, 320),
        ("h100", "flash3", 640, 550),
        ("b200", "flash", 370, 320),
        ("a100", "flex", 0.9 * 0.73 * 312, 0.85 * 0.63 * 312),
        ("t4", "torch_efficient", 0.40 * 65, 0.30 * 65),
    ],
)
def test_attention_reaches_what_its_kernels_were_published_with(card, attention, forward, backward):
    assert tflops(card, attention) == pytest.approx(mean(forward, backward), rel=1e-6)


def test_a_second_forward_pass_is_at_the_forward_rate():
    hardware = Hardware.named("h100")
    load = Workload(Settings(**BASE), LLAMA8, ROW)
    once, twice = (attention_time(load, hardware, hardware.rates.half_matmul_per_s, of) for of in (1, 2))
    assert twice - once == pytest.approx(OPERATIONS / 370e12)


def test_documents_of_packed_rows_are_priced_by_their_own_lengths(facts_of, profile_of):
    """Rows of 16,384 tokens out of documents of 2,048: attention of an eighth of what whole rows take."""
    packed = profile_of(*[16384] * 4).model_copy(update={"attended_tokens": 2048.0})
    settings = Settings(**(BASE | {"packing": "bfd", "max_length": 16384}))
    of_documents, whole = (
        sum_of_squares(Workload(settings, LLAMA8, typical_micro_batch(settings, facts_of(lengths=it))[0]))
        for it in (packed, profile_of(*[16384] * 4))
    )
    assert of_documents == 16384 * 2048
    assert whole == 16384**2


def test_in_float32_and_on_a_cpu_attention_is_as_fast_as_products():
    hardware = Hardware.named("h100")
    load = Workload(Settings(**(BASE | {"dtype": "float32", "attention": "torch_efficient"})), LLAMA8, ROW)
    assert attention_time(load, hardware, 1e12, 1) == pytest.approx(3.5 * OPERATIONS / 1e12)
