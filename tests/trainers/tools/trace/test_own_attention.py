"""The arithmetic of transformers' own attention on padded rows: masks and scores, against traces."""

from dataclasses import replace

import pytest
from trace_cases import EVERY, HALF, LLAMA, LORA, PADDED, SMALL, sft

from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.trainers.tools.trace.trace import trace

ROWS = HeaviestBatch(rows=4, tokens=1500, scored_tokens=1000, longest=512)
ON_GPU = PADDED | {"max_length": 512, "device": "cuda"}
OF_128 = {"sliding_window": 128}
MISTRAL = SMALL | OF_128 | {"model_type": "mistral"}
GEMMA = SMALL | OF_128 | {"head_dim": 32, "tie_word_embeddings": True, "query_pre_attn_scalar": 32}
GEMMA2, GEMMA3 = (GEMMA | {"model_type": name} for name in ("gemma2", "gemma3_text"))
FORMS = {
    "half": HALF,
    "checkpointed": EVERY,
    "half, checkpointed": HALF | EVERY,
    "LoRA": HALF | EVERY | {"adapter": LORA},
}


def errors(config, changes):
    """Shares by which the arithmetic, without a batch's own numbers, is above a trace: of the peak and of the
    evaluation."""
    case = replace(sft(config, ON_GPU | changes), batch=ROWS)
    found, predicted = trace(case.job).recorder, case.estimated()
    evaluation = next(phase for phase in predicted.phases if phase.phase == "evaluation")
    pairs = (predicted.peak, found.peak_bytes), (evaluation, found.phase_peaks["evaluation"])
    batch = sum(one.num_bytes for one in evaluation.owners if one.owner == "batch")
    return [(one.num_bytes - batch) / peak - 1 for one, peak in pairs]


@pytest.mark.parametrize("form", FORMS)
def test_causality_alone_is_no_mask_to_sdpa(form):
    """Three bytes for each pair of tokens in a row, counted on GPUs, were 9 to 18 % of the peak too much."""
    assert errors(LLAMA, FORMS[form]) == pytest.approx([0.0, 0.0], abs=0.004)


@pytest.mark.parametrize("form", FORMS)
def test_a_window_is_a_mask_of_each_layer_and_gives_keys_to_every_head(form):
    """5 % (of a GPU) to 13 % too low without."""
    assert errors(MISTRAL, FORMS[form]) == pytest.approx([0.0, 0.0], abs=0.004)


@pytest.mark.parametrize("form", FORMS)
def test_capped_scores_have_masks_and_a_softmax_in_float32(form):
    """In half precision 8 to 11 % too high, checkpointed in float32 6 % too low, and an evaluation 16 to 30 %
    too high."""
    peak, evaluation = errors(GEMMA2, FORMS[form])
    assert peak == pytest.approx(0.0, abs=0.002)
    assert 0.0 <= evaluation <= 0.01


def test_layers_without_a_window_have_no_mask():
    """One of six: with a mask in each the peak would be 3 % too high."""
    peak, evaluation = errors(GEMMA3 | {"num_hidden_layers": 6}, HALF)
    assert -0.001 <= peak <= 0.005
    assert evaluation == pytest.approx(0.0, abs=0.002)


DROPPED = {"attention_dropout": 0.1}
ON_CPU = {"device": "cpu"}
NARROW = LLAMA | {"intermediate_size": 64}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("config", [LLAMA, MISTRAL])
def test_scores_that_are_dropped_on_a_cpu_are_float32_three_times_a_layer(config, form):
    """And queries, keys and values for every head: 6 to 21 % too low by one softmax and its rounded copy."""
    peak, _ = errors(config | DROPPED, FORMS[form] | ON_CPU)
    assert peak == pytest.approx(0.0, abs=0.003)


@pytest.mark.parametrize(("form", "most"), [("half", 0.02), ("half, checkpointed", 0.003), ("LoRA", 0.003)])
def test_scores_that_are_dropped_have_their_peak_in_a_forward_pass_where_the_mlp_is_narrow(form, most):
    """3 to 5 % too low without it. A layer that keeps all holds less then than at its end."""
    peak, _ = errors(NARROW | DROPPED, FORMS[form] | ON_CPU)
    assert -0.003 <= peak <= most


@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_drops_scores_as_it_makes_them(form):
    """Its kernels keep a seed: what a CPU keeps was counted there, and traced."""
    dropped, plain = (
        replace(sft(config, ON_GPU | FORMS[form]), batch=ROWS) for config in (LLAMA | DROPPED, LLAMA)
    )
    assert dropped.estimated() == plain.estimated()
    assert trace(dropped.job).recorder.peak_bytes == trace(plain.job).recorder.peak_bytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_capped_scores_that_are_dropped_keep_the_product_and_its_mask(form, device):
    """Without these 2 to 20 % too low."""
    peak, _ = errors(GEMMA2 | DROPPED, FORMS[form] | {"device": device})
    assert -0.002 <= peak <= 0.02
