"""Fused kernels give transformers' losses to the bit, and its gradients to rounding, in every treatment."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.kernels.apply import apply_kernels
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.offload import activations as activations_module
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.offload.copy_engines import LazyEngine
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.model.quantized.linear import PackedLinear, pack_linear_maps

LENGTHS = (5, 9, 2, 8)
TREATMENTS: dict[str, tuple[dict[str, Any], Adapter | None]] = {
    "plain": ({}, None),
    "checkpointed": ({"checkpoint_every": 1}, None),
    "offloading all": ({"offload": "all"}, None),
    "offloading boundaries, LoRA": ({"checkpoint_every": 1, "offload": "boundaries"}, Adapter(r=4)),
    "LoRA with dropout": ({}, Adapter(r=4, dropout=0.1)),
    "DoRA, checkpointed": ({"checkpoint_every": 2}, Adapter(r=4, kind="dora")),
    "streamed": ({"slice_tokens": 8}, None),
    "streamed, LoRA": ({"slice_tokens": 8}, Adapter(r=4)),
    "weights on the host": ({"weights_offload": True, "checkpoint_every": 1}, None),
    "QLoRA": ({"quantize": "4bit"}, Adapter(r=4)),
    "QLoRA, checkpointed": ({"quantize": "4bit", "checkpoint_every": 1}, Adapter(r=4)),
    "QLoRA, streamed": ({"quantize": "4bit", "slice_tokens": 8}, Adapter(r=4)),
    "LoRA on 8 bits, checkpointed": ({"quantize": "8bit", "checkpoint_every": 1}, Adapter(r=4)),
}


def step(model: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a packed row."""
    layout = packed_layout(LENGTHS)
    torch.manual_seed(0)
    ids = torch.randint(1, 128, (1, sum(LENGTHS)))
    logits = model(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[layout.predicting_rows], ids[0, layout.predicted_rows])
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", TREATMENTS)
def test_the_step_is_that_of_transformers(
    name: str,
    tiny_model: Callable[..., Any],
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(activations_module, "Offloader", partial(Offloader, min_bytes=512))
    changes, adapter = TREATMENTS[name]
    base = tiny_model(num_hidden_layers=3)
    set_attention(base, AttentionBackend.TORCH_CPU)
    found = []
    for kernels in ("transformers", "fused"):
        model = copy.deepcopy(base)
        settings = make_settings(**({"checkpoint_every": 0} | changes | {"kernels": kernels}))
        if settings.quantize != "none":
            pack_linear_maps(model, settings.quantize, {"lm_head"})
            for module in model.modules():
                if isinstance(module, PackedLinear):
                    module.pack()
        apply_kernels(model, settings)
        if adapter is not None:
            torch.manual_seed(1)
            model = add_adapter(model, adapter, quantize=settings.quantize)
            for parameter in model.parameters():
                # B begins at zero, where A has no gradient.
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.1)
        apply_checkpointing_and_offload(model.train(), settings, LazyEngine())
        found.append(step(model))
    (loss, expected), (fused, gradients) = found
    assert fused == loss
    assert gradients.keys() == expected.keys() != set()
    for key, gradient in expected.items():
        assert (gradients[key] - gradient).norm() <= 3e-6 * gradient.norm() + 1e-9, key


def test_a_copy_of_a_model_has_kernels_of_its_own(
    tiny_model: Callable[..., Any], make_settings: Callable[..., Settings]
):
    model = tiny_model(num_hidden_layers=1)
    apply_kernels(model, make_settings(kernels="fused"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2.0)
    ids = torch.arange(1, 9)[None]
    plain = tiny_model(num_hidden_layers=1)
    plain.load_state_dict(twin.state_dict())
    assert torch.equal(twin(input_ids=ids).logits, plain(input_ids=ids).logits)
