"""LoRA layers in few kernels: PEFT's numbers but for one rounding less, and never a stale adapter."""

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.memory_meter.live_tensors import TensorPeak
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.lora_layers import KINDS, is_few_kernels_kind, round_together
from memtrain.trainers.model.loading.lora_product import LoraProduct, is_bare
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers
from memtrain.trainers.tools.trace import bitsandbytes as bitsandbytes_played
from memtrain.trainers.tools.trace.bitsandbytes import as_beside_4bit, pack_linear_maps

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
        if is_few_kernels_kind(module):
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


def test_the_heads_adapter_is_not_rounded_with_the_layers(tiny_llama, monkeypatch):
    """The loss reads it in float32; rounded besides, its gradient waited for those of the first layer."""
    copied = []
    plain = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda a, b: copied.append(len(a)) or plain(a, b))
    adapted(tiny_llama, target_modules=("q_proj", "lm_head"))(IDS, labels=IDS).loss.backward()
    assert copied == [4, 4]


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


needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes (pip install 'memtrain[quant]')"
)


def packed_by_bitsandbytes(model: nn.Module, bits: str) -> nn.Module:
    """`model` with bitsandbytes' layers in place of the decoder's linear maps, as transformers loads them."""
    from bitsandbytes import nn as kinds

    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear:
                continue
            shape = child.in_features, child.out_features
            weight = {"weight": child.weight.detach()}
            if bits == "4bit":
                layer = kinds.Linear4bit(
                    *shape, bias=False, compute_dtype=child.weight.dtype, quant_type="nf4"
                )
            else:
                layer = kinds.Linear8bitLt(*shape, bias=False, has_fp16_weights=False)
            layer.load_state_dict(weight)
            setattr(module, name, layer.to("cpu"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == "4bit", bits == "8bit"
    return model


@needs_bitsandbytes
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_adapters_beside_bitsandbytes_layers_compute_in_few_kernels(tiny_llama, bits: str):
    """PEFT has layers of its own for them, which copy the product, scale the adapter's, and add the two."""
    base = packed_by_bitsandbytes(tiny_llama(seed=3).to(torch.bfloat16), bits)
    model = adapted(lambda seed: base)
    layers = [module for module in model.modules() if is_few_kernels_kind(module)]
    kind = {"4bit": "Linear4bit", "8bit": "Linear8bitLt"}[bits]
    assert {(type(layer).__module__, type(layer).__name__) for layer in layers} == {
        ("peft.tuners.lora.bnb", kind)
    }
    assert kind in KINDS["peft.tuners.lora.bnb"]
    assert len(layers) == 14
    ours, logits = gradients(model), model(IDS).logits
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)
    with model.disable_adapter(), torch.no_grad():
        off = model(IDS).logits
    as_pefts(model)
    assert distance(ours, gradients(model)) < 0.02
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(IDS).logits, off)


@needs_bitsandbytes
@pytest.mark.parametrize(
    "changes", [{}, {"alpha": 12.0}, {"dropout": 0.5}], ids=["plain", "scale", "dropout"]
)
def test_what_a_trace_plays_beside_4bit_makes_as_many_bytes(tiny_llama, monkeypatch, changes):
    """Bytes at the peak of a pass through one adapted layer; the map's own product is given to both."""
    packed = packed_by_bitsandbytes(tiny_llama(seed=3).to(torch.bfloat16), "4bit")
    real = adapted(lambda seed: packed, **changes)
    plain = tiny_llama(seed=3).to(torch.bfloat16)
    pack_linear_maps(plain, "4bit")
    played = adapted(lambda seed: plain, **changes)
    as_beside_4bit(played)
    product = torch.zeros(1, 512, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(bitsandbytes_played._Product4bit, "apply", lambda *given: product)
    made: list[int] = []
    for model in (real, played):
        layer = model.base_model.model.model.layers[0].mlp.up_proj
        assert layer.out_features == product.shape[-1]
        if model is real:
            layer.get_base_layer().forward = lambda x: product
        hidden = torch.randn(1, 512, layer.in_features, dtype=torch.bfloat16, requires_grad=True)
        with TensorPeak() as counted:
            layer(hidden)
        made.append(counted.peak_bytes)
    assert made[0] == made[1]


def by_hand(x: Tensor, weight: Tensor, bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ weight.t() + bias + x @ a.t() @ b.t()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_map_and_its_adapter_are_one_product_with_the_gradients_of_two(dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (37, 12), "weight": (20, 12), "bias": (20,), "a": (4, 12), "b": (20, 4)}
    wide = {name: torch.randn(size, generator=generator).to(dtype).double() for name, size in sizes.items()}
    grad = torch.randn(37, 20, generator=generator).to(dtype)
    made: list[tuple[Tensor, ...]] = []
    for form, given in ((LoraProduct.apply, {n: one.to(dtype) for n, one in wide.items()}), (by_hand, wide)):
        leaves = {name: one.clone().requires_grad_(name in "xab") for name, one in given.items()}
        out = form(*leaves.values())
        asked = [leaves[name] for name in "xab"]
        made.append((out, *torch.autograd.grad(out, asked, grad.to(out.dtype))))
    for found, expected in zip(*made, strict=True):
        off = (found.double() - expected).norm() / expected.norm()
        assert off < (1e-14 if dtype == torch.float64 else 2**-7)


def test_one_product_makes_no_tensor_beside_the_gradient_of_its_input():
    """A second one of the input's size would be as much again: tokens are many, the rank is small."""
    x = torch.randn(4096, 64).bfloat16().requires_grad_()
    weight, a, b = (torch.randn(size).bfloat16() for size in ((8, 64), (1, 64), (8, 1)))
    out = LoraProduct.apply(x, weight, None, a.requires_grad_(), b.requires_grad_())
    grad = torch.ones_like(out)
    with TensorPeak() as counted:
        out.backward(grad)
    assert counted.peak_bytes < 1.1 * x.nbytes


def test_a_map_that_a_hook_watches_is_called(tiny_llama):
    """An adapted one too: what hangs on the frozen map sees its calls, and the numbers are the same."""
    model, seen = adapted(tiny_llama), []
    expected = model(IDS).logits
    watched = next(m for m in model.modules() if is_few_kernels_kind(m)).base_layer
    assert is_bare(watched)
    watched.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    assert not is_bare(watched)
    assert torch.equal(model(IDS).logits, expected)
    assert len(seen) == 1
