"""The arithmetic of what is trained beside the layers with an adapter, each step against a trace."""

import pytest
from trace_cases import EVERY, HALF, LLAMA, LORA, LORA_OFF, QWEN, SHARED, SMALL, Case, sft

from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.tools.trace.trace import trace

BOTH = ("embed_tokens", "lm_head")
OF_HEAD = Adapter(r=8, target_modules=("q_proj", "lm_head"))
WIDE_OF_HEAD = Adapter(r=64, target_modules=("q_proj", "down_proj", "lm_head"))
OF_EMBEDDINGS = Adapter(r=8, target_modules=("q_proj", "embed_tokens"))


def error_of(case):
    """Share by which the arithmetic, without a batch's own numbers, is above the traced peak."""
    peak = case.estimated().peak
    batch = sum(one.num_bytes for one in peak.owners if one.owner == "batch")
    return (peak.num_bytes - batch) / trace(case.job).recorder.peak_bytes - 1


@pytest.mark.parametrize("changes", [{}, HALF, EVERY, HALF | EVERY])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("config", "modules"), [(LLAMA, ("embed_tokens",)), (LLAMA, ("lm_head",)), (LLAMA, BOTH), (QWEN, BOTH)]
)
def test_modules_that_are_trained_in_whole_have_their_gradients_in_turn(
    config, modules, changes, num_micro_batches
):
    """Embeddings that are trained let the first norm keep its input (1.2 to 2.7 % too low), and their
    gradient comes last (3 to 5 % too high); beside an adapter a tied head is another weight (3 to 9 %)."""
    adapter = Adapter(r=8, modules_to_save=modules)
    case = sft(config, changes | {"adapter": adapter}, num_micro_batches)
    assert error_of(case) == pytest.approx(0.0, abs=0.004)


@pytest.mark.parametrize("changes", [{}, HALF, EVERY, HALF | EVERY])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("adapter", [OF_HEAD, WIDE_OF_HEAD, OF_EMBEDDINGS])
def test_adapters_on_head_and_embeddings_are_counted(adapter, changes, num_micro_batches):
    """Gradients of the head's come before all others, and rows that are widened for it wait for them: up to
    2.9 % too low. Those on embeddings were not counted: up to 6.9 %."""
    case = sft(LLAMA, changes | {"adapter": adapter}, num_micro_batches)
    assert -0.004 <= error_of(case) <= 0.035


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize(("method", "said"), [("sft", {}), ("dpo", {}), ("grpo", {"beta": 0.0})])
def test_an_adapter_on_the_head_makes_no_more_whole_logits(method, said, loss, dtype):
    """They were 18 to 35 % of a step more than its plan, before the products were summed in place."""
    changes = {"dtype": dtype, "loss": loss} | EVERY | SHARED | (LORA_OFF if method == "dpo" else {})
    case = Case(method, LLAMA, changes | {"adapter": WIDE_OF_HEAD}, said={method: said} if said else {})
    assert -0.002 <= error_of(case) <= 0.055


@pytest.mark.parametrize("changes", [{}, HALF])
def test_a_model_that_begins_with_maps_keeps_their_input(changes):
    """OLMo 2 has no norm before its attention, which was left out of the first layer: 2.6 % too low."""
    case = sft(SMALL | {"model_type": "olmo2"}, changes | {"adapter": LORA})
    assert -0.001 <= error_of(case) <= 0.01
