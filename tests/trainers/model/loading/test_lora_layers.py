"""LoRA layers in few kernels: PEFT's numbers but for one rounding less, and never a stale adapter."""

import copy

import pytest
import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.lora_layers import round_together
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers

IDS = torch.tensor([[3, 5, 9, 2, 11, 40, 7, 1]])


def adapted(tiny, dtype=torch.bfloat16, **changes) -> nn.Module:
    """A model with an adapter whose B is not zero."""
    base = tiny(seed=3).to(dtype)
    torch.manual_seed(0)
    model = add_adapter(base, Adapter.model_validate({"r": 8, "alpha": 16.0} | changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def as_pefts(model: nn.Module) -> None:
    """PEFT's own forward of every layer again."""
    for module in model.modules():
        if type(module) is LoraLinear:
            del module.forward


def norm(tensors: list[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([one.flatten().double() for one in tensors])))


def distance(made: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    off = [made[name].double() - expected[name].double() for name in expected]
    return norm(off) / norm(list(expected.values()))


def test_one_rounding_less_is_nearer_to_the_exact_numbers(tiny_llama):
    """Gradients of the same bfloat16 weights computed in float32 are the yardstick."""
    model = adapted(tiny_llama)
    ours = gradients(model)
    as_pefts(model)
    pefts = gradients(model)
    exact = gradients(model.float())
    assert distance(ours, pefts) < 0.02
    assert distance(ours, exact) < 1.02 * distance(pefts, exact)


def test_each_adapter_is_rounded_once_a_pass(tiny_llama, monkeypatch):
    """2 layers of 7 maps: one copy of 28 weights, and none inside a layer."""
    copied, rounded = [], []
    plain = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda a, b: copied.append(len(a)) or plain(a, b))
    to = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda t, *a, **k: rounded.append(t.shape) or to(t, *a, **k))
    model = adapted(tiny_llama)
    rounded.clear()
    model(IDS, labels=IDS).loss.backward()
    assert copied == [28, 28]
    assert not [shape for shape in rounded if len(shape) == 2 and 8 in shape]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_checkpointed_pass_has_the_same_bits(tiny_llama, dtype):
    model = adapted(tiny_llama, dtype).train()
    expected = gradients(model)
    checkpoint_layers(model, 1)
    made = gradients(model)
    assert all(torch.equal(made[name], expected[name]) for name in expected)


def test_adapters_rounded_where_they_are_used_give_the_same_bits(tiny_llama):
    """Loss and gradients; and a pass without gradients gives the same logits as one with them."""
    model = adapted(tiny_llama)
    expected, logits = gradients(model), model(IDS).logits
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)
    round_together(model, False)
    made = gradients(model)
    assert all(torch.equal(made[name], expected[name]) for name in expected)


def test_a_step_is_seen_by_the_next_pass_with_and_without_gradients(tiny_llama):
    model = adapted(tiny_llama)
    with torch.no_grad():
        before = model(IDS).logits
        again = model(IDS).logits
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.add_(1.0)
        after = model(IDS).logits
        as_pefts(model)
        expected = model(IDS).logits
    assert torch.equal(before, again)
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, expected, rtol=0.05, atol=0.5)


def test_a_copy_of_a_model_rounds_for_itself(tiny_llama):
    model = adapted(tiny_llama)
    gradients(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if "lora_B" in name:
                weight.mul_(3.0)
        changed, plain = other(IDS).logits, model(IDS).logits
        as_pefts(other)
        torch.testing.assert_close(changed, other(IDS).logits, rtol=0.05, atol=0.1)
    assert not torch.equal(changed, plain)


def test_an_adapter_that_is_off_is_off(tiny_llama):
    model = adapted(tiny_llama)
    with torch.no_grad():
        on = model(IDS).logits
        with model.disable_adapter():
            off = model(IDS).logits
            base = model.get_base_model()(IDS).logits
    assert torch.equal(off, base)
    assert not torch.equal(on, off)


@pytest.mark.parametrize(
    "changes", [{"alpha": 12.0}, {"dropout": 0.5}, {"kind": "dora"}], ids=["scale", "dropout", "dora"]
)
def test_what_is_no_plain_adapter_stays_pefts(tiny_llama, changes):
    model = adapted(tiny_llama, **changes)
    torch.manual_seed(1)
    ours = gradients(model)
    as_pefts(model)
    torch.manual_seed(1)
    pefts = gradients(model)
    assert all(torch.equal(ours[name], pefts[name]) for name in pefts)


def test_float32_models_keep_every_bit(tiny_llama):
    model = adapted(tiny_llama, torch.float32)
    ours = gradients(model)
    as_pefts(model)
    pefts = gradients(model)
    assert all(torch.equal(ours[name], pefts[name]) for name in pefts)


def test_a_map_that_a_pass_uses_twice_sums_its_gradients_in_float32(tiny_llama):
    """The second use rounds for itself: its gradient is widened before it is added."""
    model = adapted(tiny_llama)
    layers = model.get_base_model().model.layers
    layers[1] = layers[0]
    ours = gradients(model)
    as_pefts(model)
    assert distance(ours, gradients(model)) < 0.02
