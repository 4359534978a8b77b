"""A packed row gives the logits and gradients of its rows alone, whatever wraps the model."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout

LENGTHS = [37, 5, 64, 1, 20]
BACKENDS = [AttentionBackend.TORCH_CPU, AttentionBackend.MASKED]


def rows(vocabulary: int = 128) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocabulary, (length,), generator=generator) for length in LENGTHS]


def with_gradients(model: nn.Module, logits_TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and parameter gradients of a loss that reads every row with a different weight."""
    model.zero_grad()
    weight_T = torch.linspace(-1, 1, len(logits_TV))
    (logits_TV.float().log_softmax(-1)[:, 3] * weight_T).sum().backward()
    return logits_TV.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def alone(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    logits_TV = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows()])
    return with_gradients(model, logits_TV)


def packed(model: nn.Module, **kwargs: object) -> tuple[Tensor, dict[str, Tensor]]:
    layout = packed_layout(LENGTHS)
    call = {"position_ids": layout.position_ids, "layout": layout, "use_cache": False} | kwargs
    return with_gradients(model, model(input_ids=torch.cat(rows())[None], **call).logits[0])


def assert_equal(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert (found[0] - expected[0]).abs().max() < 2e-6
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).norm() / gradient.norm()
        assert error < 5e-6, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("has_checkpointing", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_packed_row_equals_its_rows_alone(
    tiny_model: Callable[..., nn.Module], backend: AttentionBackend, has_checkpointing: bool
):
    expected = alone(tiny_model("eager").train())
    model = tiny_model().train()
    if has_checkpointing:
        model.gradient_checkpointing_enable()  # pyright: ignore
    set_attention(model, backend)
    assert_equal(packed(model), expected)


def test_checkpointing_with_reentrant_autograd_keeps_the_layout(tiny_llama: Callable[..., nn.Module]):
    expected = alone(tiny_llama("eager").train())
    model = tiny_llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})  # pyright: ignore
    set_attention(model, AttentionBackend.TORCH_CPU)
    assert_equal(packed(model), expected)


def test_a_forgotten_use_cache_does_not_contaminate(tiny_model: Callable[..., nn.Module]):
    """Stock attention then stops looking for packed rows, without a word, and the logits are off by 0.5."""
    expected = alone(tiny_model("eager").train())
    model = tiny_model().train()
    set_attention(model, AttentionBackend.TORCH_CPU)
    assert_equal(packed(model, use_cache=True), expected)


def test_an_all_ones_attention_mask_does_not_contaminate(tiny_model: Callable[..., nn.Module]):
    expected = alone(tiny_model("eager").train())
    model = tiny_model().train()
    set_attention(model, AttentionBackend.TORCH_CPU)
    assert_equal(packed(model, attention_mask=torch.ones(1, sum(LENGTHS), dtype=torch.long)), expected)


def test_two_packed_rows_in_one_batch_are_stopped(tiny_llama: Callable[..., nn.Module]):
    model = tiny_llama()
    set_attention(model, AttentionBackend.TORCH_CPU)
    layout = packed_layout([3, 2])
    with pytest.raises(AssertionError, match="not a batch of 2"):
        model(input_ids=torch.ones(2, 5, dtype=torch.long), layout=layout, use_cache=False)


def test_a_forgotten_layout_is_stopped(tiny_llama: Callable[..., nn.Module]):
    model = tiny_llama()
    set_attention(model, AttentionBackend.TORCH_CPU)
    with pytest.raises(LaunchError, match="no layout of its rows"):
        model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=False)


def test_adapters_pass_the_layout_on(tiny_qwen3: Callable[..., nn.Module]):
    from peft import LoraConfig, get_peft_model

    def adapted() -> nn.Module:
        config = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return get_peft_model(tiny_qwen3("eager"), config)  # pyright: ignore

    expected = alone(adapted().train())
    model = adapted().train()
    set_attention(model, AttentionBackend.TORCH_CPU)
    found = packed(model)
    assert any("lora_A" in name for name in found[1])
    assert_equal(found, expected)


def test_autocast_packs_queries_and_keys_that_norms_left_in_fp32(tiny_qwen3: Callable[..., nn.Module]):
    exact = alone(tiny_qwen3("eager").train())
    model = tiny_qwen3().train()
    set_attention(model, AttentionBackend.TORCH_CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = packed(model)
    scale = exact[0].abs().max()
    assert (found[0].float() - exact[0]).abs().max() / scale < 2e-2


def test_bf16_weights_pack_as_exactly_as_bf16_rows_alone(tiny_model: Callable[..., nn.Module]):
    """The packed row may be as far from fp32 as the rows alone are, give or take the order of sums."""
    exact = alone(tiny_model("eager").train())
    rounded = alone(tiny_model("eager").to(torch.bfloat16).train())
    model = tiny_model().to(torch.bfloat16).train()
    set_attention(model, AttentionBackend.TORCH_CPU)
    found = packed(model)
    assert found[0].dtype == torch.bfloat16

    def error(result: tuple[Tensor, dict[str, Tensor]], name: str) -> float:
        return ((result[1][name].float() - exact[1][name]).norm() / exact[1][name].norm()).item()

    worst_alone = max(error(rounded, name) for name in exact[1])
    worst_packed = max(error(found, name) for name in exact[1])
    assert worst_packed < 1.5 * worst_alone
