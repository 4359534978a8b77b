"""DoRA's product of B and A: PEFT's own to the bit, and no matrix as wide as a map's input."""

import pytest
import torch
from peft.tuners.lora.dora import DoraLinearLayer

from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.memory_meter.live_tensors import TensorPeak
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.dora_product import _plain

IDS = torch.randint(1, 128, (1, 8), generator=torch.Generator().manual_seed(0))


def trained_once(model):
    """Logits and gradients of one pass in which B is not zero."""
    model = add_adapter(model, Adapter(kind="dora", r=3)).train()
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    logits = model(input_ids=IDS).logits
    logits.float().square().mean().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_gradients_are_pefts_to_the_bit(tiny_model, monkeypatch, dtype):
    torch.manual_seed(0)
    logits, grads = trained_once(tiny_model().to(dtype))
    own = DoraLinearLayer.get_lora_weight
    monkeypatch.setattr(
        "memtrain.trainers.model.loading.adapters.multiply_without_identity",
        lambda: monkeypatch.setattr(DoraLinearLayer, "get_lora_weight", _plain),
    )
    torch.manual_seed(0)
    theirs, of_them = trained_once(tiny_model().to(dtype))
    assert DoraLinearLayer.get_lora_weight is _plain is not own
    assert torch.equal(logits, theirs)
    assert grads.keys() == of_them.keys()
    assert all(torch.equal(grads[name], of_them[name]) for name in grads)


def test_no_matrix_is_as_wide_as_the_input_both_ways(tiny_model):
    """A map of 64 inputs and 64 outputs with rank 2 holds B A (64 x 64 float32 numbers), A turned, and no
    identity of 64 x 64 numbers beside them."""
    model = add_adapter(tiny_model(), Adapter(kind="dora", target_modules=("o_proj",), r=2))
    layer = model.base_model.model.model.layers[0].self_attn.o_proj
    magnitudes, low, high = layer.lora_magnitude_vector["default"], layer.lora_A, layer.lora_B
    with TensorPeak() as counted:
        made = magnitudes.get_lora_weight(low["default"], high["default"])
    assert made.shape == (64, 64)
    assert not made.requires_grad
    assert counted.peak_bytes == 4 * (64 * 64 + 64 * 2)
