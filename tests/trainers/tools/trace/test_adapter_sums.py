"""The arithmetic where PEFT's own layers add an adapter's product to their map's, held against traces."""

import pytest
from trace_cases import EVERY, HALF, LLAMA, LORA, SMALL, sft

from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.tools.trace.trace import trace

CUDA = {"device": "cuda", "attention": "torch_varlen"}
DROPS = Adapter(r=8, dropout=0.1)
DROPS_OF_QUERIES = Adapter(r=8, dropout=0.1, target_modules=("q_proj", "v_proj"))
NO_POWER_OF_TWO = Adapter(r=8, alpha=12)
PHI = SMALL | {"model_type": "phi3", "sliding_window": None}
GRANITE = SMALL | {"model_type": "granite"}


def error_of(case, phase=None):
    """Share by which the arithmetic, without a batch's own numbers, is above a traced peak."""
    found, predicted = trace(case.job).recorder, case.estimated()
    at = predicted.peak if phase is None else next(p for p in predicted.phases if p.phase == phase)
    batch = sum(one.num_bytes for one in at.owners if one.owner == "batch")
    return (at.num_bytes - batch) / (found.phase_peaks[phase] if phase else found.peak_bytes) - 1


@pytest.mark.parametrize("changes", [{}, HALF, EVERY, HALF | EVERY])
@pytest.mark.parametrize(
    ("config", "adapter"),
    [
        (LLAMA, DROPS),
        (LLAMA, DROPS_OF_QUERIES),
        (LLAMA | {"intermediate_size": 128}, DROPS),
        (GRANITE, DROPS),
        (PHI, DROPS),
        (PHI, NO_POWER_OF_TWO),
    ],
)
def test_sums_of_a_recomputation_and_of_the_last_layer_are_counted(config, adapter, changes):
    """Checkpointed 2 to 7 % too low; and of what is dropped in the first layer no mask is kept (not
    checkpointed 2 to 5 % too high)."""
    assert error_of(sft(config, changes | {"adapter": adapter})) == pytest.approx(0.0, abs=0.004)


@pytest.mark.parametrize("changes", [{}, HALF, EVERY, HALF | EVERY])
def test_a_mask_is_gone_when_the_factors_have_their_gradients(changes):
    """On a GPU, in a wide MLP, 2 to 5 % too high with it."""
    case = sft(LLAMA | {"intermediate_size": 1408}, CUDA | changes | {"adapter": DROPS})
    assert error_of(case) == pytest.approx(0.0, abs=0.003)


def test_one_map_of_both_factors_has_three_outputs_in_an_evaluation():
    """Phi-3 in float32: 17 % too low."""
    assert error_of(sft(PHI, EVERY | {"adapter": LORA}), "evaluation") == pytest.approx(0.0, abs=0.003)
