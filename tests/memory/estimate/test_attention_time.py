"""Seconds of attention: operations counted by hand, over the rates that its kernels were published with."""

import pytest

from memtrain.memory.estimate.attention_time import attention_time, slowness, sum_of_squares
from memtrain.memory.estimate.pricing import typical_micro_batch
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings
from tests.memory.estimate.test_step_time import BASE, LLAMA8

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""Qwen3-0.6B."""
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
        ("h100", "torch_varlen", 335, 322),
        ("h200", "flash", 335, 322),
        ("h100", "flash3", 616, 561),
        ("b200", "flash", 335, 322),
        ("a100", "flex", 0.9 * 0.73 * 312, 0.85 * 0.63 * 312),
        ("t4", "torch_efficient", 0.40 * 65, 0.30 * 65),
    ],
)
def test_attention_of_long_rows_reaches_what_its_kernels_were_published_with(
    card, attention, forward, backward
):
    assert tflops(card, attention) == pytest.approx(mean(forward, backward), rel=0.05)


@pytest.mark.parametrize(
    ("attention", "figures"),
    [
        ("flash", {512: 191, 1024: 260, 2048: 298, 4096: 319, 8192: 333, 16384: 335}),
        ("flash3", {512: 292, 1024: 423, 2048: 521, 4096: 579, 8192: 602, 16384: 616}),
    ],
)
def test_attention_of_short_rows_is_as_slow_as_published(attention, figures):
    """Causal forward passes on an H100 by length of the row (arXiv:2407.08608, figure 5)."""
    h100 = Hardware.named("h100")
    for tokens, published in figures.items():
        row = HeaviestBatch(rows=16384 // tokens, tokens=16384, scored_tokens=16384, longest=tokens)
        load = Workload(Settings(**(BASE | {"attention": attention})), LLAMA8, row)
        off = 0.03 if tokens > 512 else 0.11
        assert 0.8 * 989 / slowness(load, h100).forward == pytest.approx(published, rel=off)


def test_rows_of_unequal_lengths_take_what_the_profile_of_an_h100_shows():
    """Kernels of 28 layers of Qwen3-0.6B for 32,557 tokens, of rows of 1,870 in the mean over tokens: 32.4 ms
    forward; backward 81.6 + 5.5 + 4.4, and 8.6 for the sums over query heads (H100 80GB HBM3,
    benchmarks/gpu_short.sh, 1eaa8187)."""
    packed = HeaviestBatch(1, 32557, 32557, 32557, attended_tokens=1870)
    load, h100 = Workload(Settings(**BASE), shape_of(QWEN3), packed), Hardware.named("h100")
    once, twice = (attention_time(load, h100, h100.rates.half_matmul_per_s, of) for of in (1, 2))
    assert twice - once == pytest.approx(0.0324, rel=0.05)
    assert once == pytest.approx(0.0324 + 0.1001, rel=0.05)


def test_a_second_forward_pass_is_at_the_forward_rate():
    hardware = Hardware.named("h100")
    load = Workload(Settings(**BASE), LLAMA8, ROW)
    once, twice = (attention_time(load, hardware, hardware.rates.half_matmul_per_s, of) for of in (1, 2))
    assert twice - once == pytest.approx(OPERATIONS / 335e12, rel=0.03)


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
