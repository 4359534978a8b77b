"""In half precision a weight's gradient over many slices is rounded once, as that of the plain run.

`memtrain verify` computes in float32, where a sum that is rounded too early is not seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.model.streamed.weight_sums import WeightSums

ROW_TOKENS = 40
NUM_ROWS = 8
AT_MOST = 1e-3
"""Relative, of a linear map: the sum over slices is the plain run's. Rounded by slices: 5e-3 to 6."""
OF_NORMS = 0.2
"""Of a norm, whose plain gradient is rounded token by token; rounded by slices it is off by 1.7."""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "olmo2": {},
    "phi3": {},
}
"""Biases, norms of queries and keys, norms after the parts, joint maps."""


def made(family: str, kind: str) -> nn.Module:
    """A model in bfloat16, whose norms and adapters are no longer as they begin."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family]))
    for weight in model.parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, mean=1.0, std=0.2)
    if kind != "full":
        model = add_adapter(model, Adapter(r=4, kind=kind))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    return model.to(torch.bfloat16)


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of rows that nearly cancel: each pulls up what the next, one token apart, pulls down."""
    model.train().zero_grad()
    row = torch.randint(0, 128, (1, ROW_TOKENS), generator=torch.Generator().manual_seed(1))
    ids, layout = row.repeat(1, NUM_ROWS), packed_layout([ROW_TOKENS] * NUM_ROWS)
    ids[0, 10::ROW_TOKENS][1:] = torch.arange(NUM_ROWS - 1) + 3
    signs = torch.tensor([1.0, -1.0] * (NUM_ROWS // 2)).repeat_interleave(ROW_TOKENS)[:, None]
    inputs = {"input_ids": ids, "position_ids": layout.position_ids, "layout": layout, "use_cache": False}
    body = model.get_base_model().model if hasattr(model, "get_base_model") else model.model
    hidden = body(**inputs)[0][0]
    (hidden.float().square() * signs).sum().backward()
    return {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize(
    ("family", "kind"), [*((family, "full") for family in FAMILIES), ("qwen3", "lora"), ("qwen3", "dora")]
)
def test_a_gradient_over_slices_is_rounded_once(family: str, kind: str):
    model: Any = made(family, kind)
    set_attention(model.get_base_model() if kind != "full" else model, "torch_cpu")
    plain = gradients(model)
    stream_layers(model, ROW_TOKENS)
    sliced = gradients(model)
    assert sliced.keys() == plain.keys()
    off = {
        name: float((sliced[name] - one).norm() / one.norm())
        for name, one in plain.items()
        if ".layers." in name
    }
    maps = {name: value for name, value in off.items() if "norm" not in name and "magnitude" not in name}
    assert len(maps) >= 8
    assert {name: value for name, value in maps.items() if value > AT_MOST} == {}
    assert {name: value for name, value in off.items() if value > OF_NORMS} == {}


def test_gradients_that_no_product_adds_are_summed_in_float32():
    """As those of stacked experts: 256 + 1 is 256 in bfloat16."""
    layer = nn.Module()
    layer.stack = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    with WeightSums(layer) as sums:
        for slope in (256.0, 1.0, 1.0, -256.0):
            (layer.stack * slope).sum().backward()
        (taken,) = sums.taken()
    assert taken is not None
    assert taken.dtype == torch.bfloat16
    assert taken.tolist() == [[2.0, 2.0]] * 3
