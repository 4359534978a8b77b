"""The arithmetic against traces of several layers whose weights, and gradients, travel to the host."""

from dataclasses import replace

import pytest
from trace_cases import EVERY, EXPERTS, HALF, LLAMA, NO_CLIP, SMALL, sft

from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.tools.trace.trace import trace

AWAY = HALF | EVERY | {"device": "cuda", "attention": "torch_varlen", "weights_offload": True}
FULL = AWAY | {"master_weights": True, "in_backward": True}
ATTENTION = {"adapter": Adapter(r=8, target_modules=("q_proj", "v_proj"))}
MIXTURE = SMALL | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 32, "moe_intermediate_size": 96}
MIXTURE |= {"num_experts": 256, "num_local_experts": 256}
DEEP = {"num_hidden_layers": 24, "vocab_size": 512}
BATCH = HeaviestBatch(rows=8, tokens=4096, scored_tokens=512, longest=512)
"""Tokens enough for layers to need more than the head."""


@pytest.mark.parametrize(
    ("config", "changes", "names"),
    [
        (MIXTURE, FULL, NO_CLIP),
        (MIXTURE, FULL | {"offload": "boundaries", "offload_keep": 12}, NO_CLIP),
        (LLAMA, FULL, NO_CLIP),
        (LLAMA, AWAY | ATTENTION, {}),
        (LLAMA, AWAY | {"adapter": Adapter(r=8)}, {}),
    ],
    ids=["experts", "half of the inputs away", "all weights", "LoRA of attention", "LoRA"],
)
def test_a_layer_between_others_is_counted(config, changes, names):
    """Its gradients, those of the layer before on their way to the host, and the inputs of all others."""
    case = replace(sft(config | DEEP, changes, **names), batch=BATCH)
    found = trace(case.job).recorder
    assert case.estimated().peak.num_bytes == pytest.approx(found.peak_bytes, rel=0.02)
