"""Packed and adapted experts: the numbers of PEFT on unpacked stacks, whatever is unpacked at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.errors import LaunchError
from memtrain.memory.plan import sizes
from memtrain.recipes.sections.model import Adapter, Model
from memtrain.trainers.model.experts import grouped
from memtrain.trainers.model.experts.forward import combined, is_experts, stacks_of
from memtrain.trainers.model.experts.token_counts import token_counts
from memtrain.trainers.model.loading.adapter_targets import check_quantized, check_targets
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.load import load_model
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers
from memtrain.trainers.model.quantized.packed import layout_of, matrices_of
from memtrain.trainers.online.vllm.weight_sync import vllm_weights
from memtrain.trainers.tools.merge import fold
from tests.trainers.model.loading.test_load import SETTINGS

IDS = torch.tensor([[3, 5, 9, 2, 11, 40, 7, 1, 8, 8, 30, 12]])
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 6},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {
        "num_local_experts": 4,
        "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmoe": {"num_experts": 4},
}


def plain_model(kind: str) -> Any:
    torch.manual_seed(4)
    config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind]}, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 3 or "bias" in name:
                weight.normal_(std=0.1)
    return model.train()


def adapted(model: Any, **changes: Any) -> Any:
    torch.manual_seed(5)
    made = add_adapter(model, Adapter.model_validate({"r": 4, "alpha": 8.0} | changes))
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    return made


def as_pefts(model: nn.Module) -> None:
    """PEFT's and transformers' own forward passes again."""
    for module in model.modules():
        if isinstance(module, ParamWrapper) or is_experts(module):
            vars(module).pop("forward", None)


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0 or "lora" not in name, name
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-5, atol=4e-6 * float(gradient.abs().max())
        )


def saved(kind: str, folder: Path) -> Any:
    model = plain_model(kind)
    model.save_pretrained(folder)
    return model


def quantized(folder: Path, bits: str, dtype: str = "float32") -> Any:
    settings = SETTINGS.model_copy(update={"quantize": bits, "dtype": dtype})
    return load_model(Model(path=str(folder), adapter=Adapter()), settings, seed=0, vocab_size=64)


def with_unpacked(plain: Any, packed_model: Any, *, adapted: bool = False) -> Any:
    """The plain model with the numbers that the packed weights stand for."""
    with torch.no_grad():
        for name, module in packed_model.named_modules():
            name = name.replace(".base_layer", "") if adapted else name
            for own in list(module._parameters):
                if layout_of(module, own) is not None:
                    plain.get_submodule(name)._parameters[own].copy_(matrices_of(module, own).whole())
    return plain


@pytest.mark.parametrize("kind", list(KINDS))
def test_adapters_beside_the_stacks_are_pefts(kind: str) -> None:
    model = adapted(plain_model(kind))
    found = step(model)
    as_pefts(model)
    assert_same(found, step(model))


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_an_adapter_of_any_rank_computes(rank: int) -> None:
    """Of ranks that are not whole 16 bytes torch's product for all experts takes none, on a CPU either."""
    model = adapted(plain_model("qwen3_moe"), r=rank)
    found = step(model)
    as_pefts(model)
    assert_same(found, step(model))
    half = adapted(plain_model("qwen3_moe").bfloat16(), r=rank)
    assert torch.isfinite(step(half)[0])


@pytest.mark.parametrize(("kind", "bits"), [("qwen3_moe", "4bit"), ("gpt_oss", "4bit"), ("mixtral", "8bit")])
def test_packed_weights_train_as_the_numbers_that_they_stand_for(
    kind: str, bits: str, tmp_path: Path
) -> None:
    plain = saved(kind, tmp_path)
    model = quantized(tmp_path, bits)
    experts = next(module for module in model.modules() if is_experts(module))
    assert all(layout_of(experts, name) is not None for name in stacks_of(experts))
    unpacked = with_unpacked(plain, model)
    expected = adapted(unpacked)
    assert_same(step(adapted(model)), step(expected))


def test_a_few_experts_at_a_time_are_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("qwen3_moe", tmp_path)
    model = adapted(quantized(tmp_path, "4bit"))
    expected = step(model)
    monkeypatch.setattr(sizes, "UNPACKED_BYTES", 2 * 4 * 48 * 32)
    experts = next(module for module in model.modules() if is_experts(module))
    assert matrices_of(experts, "gate_up_proj").num_at_once == 2
    assert_same(step(model), expected)


@pytest.mark.parametrize("num_tokens", [24, 700])
def test_weights_that_a_router_leaves_in_float32_are_not_rounded(num_tokens: int) -> None:
    """Mixtral's, DeepSeek-V3's and GLM-4's: transformers sums in float32, and rounds once."""
    torch.manual_seed(3)
    out = torch.randn(num_tokens * 4, 32).bfloat16().requires_grad_()
    weight = torch.rand(num_tokens, 4).requires_grad_()
    order = torch.randperm(num_tokens * 4)
    grad = torch.randn(num_tokens, 32).bfloat16()
    found = combined(out, weight, order)
    found.backward(grad)
    back = torch.argsort(order)
    exact_out, exact_weight = (one.detach().double().requires_grad_() for one in (out, weight))
    exact = (exact_out[back].view(num_tokens, 4, 32) * exact_weight[:, :, None]).sum(1)
    exact.backward(grad.double())
    assert found.dtype == torch.bfloat16
    for rounded, wanted in ((found, exact), (out.grad, exact_out.grad)):
        torch.testing.assert_close(rounded.double(), wanted, rtol=1.001 / 256, atol=1e-6)
    torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-5, atol=1e-5)  # pyright: ignore[reportOptionalMemberAccess]


def test_routers_of_these_families_leave_their_weights_in_float32() -> None:
    """What the sums of experts rely on, in bfloat16 models of transformers."""
    found: dict[str, torch.dtype] = {}
    for kind in ("mixtral", "qwen3_moe", "olmoe"):
        model = plain_model(kind).bfloat16()
        experts = next(module for module in model.modules() if is_experts(module))
        experts.register_forward_pre_hook(lambda _, given, kind=kind: found.update({kind: given[2].dtype}))
        model(IDS, use_cache=False)
    assert found == {"mixtral": torch.float32, "qwen3_moe": torch.bfloat16, "olmoe": torch.bfloat16}


def test_the_kernel_for_all_experts_is_the_loop() -> None:
    """Forward and backward, an expert without tokens among them."""
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 10, 16], dtype=torch.int32)
    results: list[list[Tensor]] = []
    for product in (grouped.grouped_product, grouped.looped_product):
        torch.manual_seed(1)
        x, weight = torch.randn(16, 8, requires_grad=True), torch.randn(4, 8, 16, requires_grad=True)
        out = product(x, weight, ends)
        out.square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        results.append([out.detach(), x.grad, weight.grad])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not results[0][2][1].any()


def test_an_adapter_of_named_stacks_loads_in_peft_and_merges_to_the_sum(tmp_path: Path) -> None:
    """`target_parameters`: PEFT reads the saved adapter onto the plain model, and the merged stack is the
    sum."""
    plain = saved("qwen3_moe", tmp_path / "base")
    bare = quantized(tmp_path / "base", "4bit")
    base = with_unpacked(plain, bare)
    model = adapted(bare, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    model.save_pretrained(tmp_path / "adapter")
    loss = step(model)[0]
    before = {name: weight.detach().clone() for name, weight in base.named_parameters() if weight.dim() == 3}
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(theirs(IDS, labels=IDS, use_cache=False).loss, loss, rtol=1e-6, atol=0)
    wrapper = next(module for module in theirs.modules() if isinstance(module, ParamWrapper))
    delta = wrapper.get_delta_weight("default").detach()
    merged, _ = fold(theirs, torch.float32)
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(merged.get_parameter(name), before[name] + delta)
    other = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(merged.get_parameter(other), before[other])
    torch.testing.assert_close(merged(IDS, labels=IDS, use_cache=False).loss, loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_parameters": ["experts.dwn_proj"]}, "no stack of experts experts.dwn_proj"),
        ({"target_parameters": ["experts.dwn_proj"]}, "such as experts.down_proj"),
        ({"target_modules": ["gate_proj"]}, "named in model.adapter.target_parameters"),
        (
            {"target_modules": ["all-linear"], "dropout": 0.1},
            "experts among its targets, for which PEFT has no dropout",
        ),
        ({"target_parameters": ["down_proj"], "kind": "dora"}, "leave the experts out"),
    ],
)
def test_a_wrong_target_is_one_error(changes: dict[str, Any], said: str) -> None:
    asked = Adapter.model_validate({"target_modules": ["q_proj"]} | changes)
    with pytest.raises(LaunchError) as error:
        check_targets(plain_model("qwen3_moe"), asked)
    assert said in str(error.value)


def test_stacks_that_cannot_be_packed_are_reported_before_anything_loads() -> None:
    config = AutoConfig.for_model("llama4_text", **SMALL, num_local_experts=4, intermediate_size_mlp=48)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(LaunchError, match="Llama4TextExperts cannot be quantized"):
        check_quantized(model, "4bit")


def test_tokens_of_a_step_are_counted_once_a_layer(tmp_path: Path) -> None:
    """Ten of twelve tokens with two experts each in two layers, whatever is recomputed or asked beside."""
    saved("qwen3_moe", tmp_path)
    model = adapted(quantized(tmp_path, "4bit"))
    checkpoint_layers(model, 1)
    counts = token_counts(model)
    assert counts is not None
    is_token = torch.arange(12) < 10
    step(model)
    with counts.counting(is_token):
        with torch.no_grad():
            model(input_ids=torch.arange(12)[None], use_cache=False)
        step(model)
    taken = counts.take()
    assert taken is not None
    assert taken.shape == (2, 6)
    assert taken.sum(1).tolist() == [20, 20]
    assert counts.take() is None


def test_vllm_gets_experts_unpacked_and_merged(tmp_path: Path) -> None:
    """Names and numbers of the checkpoint of the merged model."""
    plain = saved("qwen3_moe", tmp_path)
    model = adapted(quantized(tmp_path, "4bit"))
    expected = adapted(with_unpacked(plain, model.get_base_model(), adapted=True))
    merged, _ = fold(expected, torch.float32)
    found, wanted = dict(vllm_weights(model)), dict(vllm_weights(merged))
    experts = [name for name in wanted if ".experts." in name]
    assert found.keys() == wanted.keys()
    assert len(experts) == 2 * 6 * 3
    for name in experts:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-7)
