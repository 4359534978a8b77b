"""Completions that share one prompt in a row give the log-probs and gradients of one row per completion."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import shared_layout

RAGGED = [(40, [7, 19, 1, 33]), (3, [5, 64]), (71, [12]), (1, [1, 2])]
PAIR = [(24, [9, 17])]
Result = tuple[Tensor, dict[str, Tensor]]


def tokens(groups: list[tuple[int, list[int]]]) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(5)

    def draw(length: int) -> Tensor:
        return torch.randint(1, 128, (length,), generator=generator)

    return [draw(prompt) for prompt, _ in groups], [[draw(n) for n in lengths] for _, lengths in groups]


def with_gradients(model: nn.Module, logp_N: Tensor) -> Result:
    """Log-probs, and parameter gradients of their sum under weights of both signs, as preferences have."""
    weight_N = torch.randn(len(logp_N), generator=torch.Generator().manual_seed(9))
    model.zero_grad()
    (logp_N.float() * weight_N).sum().backward()
    return logp_N.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def duplicated(model: nn.Module, groups: list[tuple[int, list[int]]]) -> Result:
    prompts, completions = tokens(groups)
    logp = []
    for prompt, group in zip(prompts, completions, strict=True):
        for completion in group:
            row = torch.cat([prompt, completion])[None]
            logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
            logp.append(logits.float().log_softmax(-1).gather(-1, completion[:, None])[:, 0])
    return with_gradients(model, torch.cat(logp))


def shared(model: nn.Module, groups: list[tuple[int, list[int]]]) -> Result:
    layout = shared_layout(groups)
    prompts, completions = tokens(groups)
    row = torch.cat([*prompts, *(completion for group in completions for completion in group)])[None]
    logits_TV = model(input_ids=row, position_ids=layout.position_ids, layout=layout, use_cache=False).logits[
        0
    ]
    logp_NV = logits_TV[layout.predicting_rows].float().log_softmax(-1)
    return with_gradients(model, logp_NV.gather(-1, row[0, layout.predicted_rows, None])[:, 0])


def assert_equal(found: Result, expected: Result) -> None:
    assert (found[0] - expected[0]).abs().max() < 4e-6
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).norm() / gradient.norm()
        assert error < 5e-6, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("has_checkpointing", [False, True])
@pytest.mark.parametrize("groups", [PAIR, RAGGED], ids=["pair", "ragged"])
@pytest.mark.parametrize("backend", [AttentionBackend.TORCH_CPU, AttentionBackend.MASKED])
def test_a_prompt_computed_once_equals_a_prompt_per_completion(
    tiny_model: Callable[..., nn.Module],
    backend: AttentionBackend,
    groups: list[tuple[int, list[int]]],
    has_checkpointing: bool,
):
    expected = duplicated(tiny_model("eager").train(), groups)
    model = tiny_model().train()
    if has_checkpointing:
        model.gradient_checkpointing_enable()  # pyright: ignore
    set_attention(model, backend)
    assert_equal(shared(model, groups), expected)


def test_several_groups_in_a_row_equal_a_row_for_each(tiny_model: Callable[..., nn.Module]):
    """Every group alone in its row, the same weights on the same tokens: the log-probs do not move."""
    model = tiny_model().train()
    set_attention(model, AttentionBackend.TORCH_CPU)
    together, _ = shared(model, RAGGED)
    prompts, completions = tokens(RAGGED)
    apart = []
    for (prompt_len, lengths), prompt, group in zip(RAGGED, prompts, completions, strict=True):
        layout = shared_layout([(prompt_len, lengths)])
        row = torch.cat([prompt, *group])[None]
        logits = model(
            input_ids=row, position_ids=layout.position_ids, layout=layout, use_cache=False
        ).logits[0]
        logp = logits[layout.predicting_rows].log_softmax(-1)
        apart.append(logp.gather(-1, row[0, layout.predicted_rows, None])[:, 0].detach())
    assert (together - torch.cat(apart)).abs().max() < 4e-6


def test_bf16_sharing_is_as_exact_as_bf16_duplicates(tiny_model: Callable[..., nn.Module]):
    exact = duplicated(tiny_model("eager").train(), RAGGED)
    rounded = duplicated(tiny_model("eager").to(torch.bfloat16).train(), RAGGED)
    model = tiny_model().to(torch.bfloat16).train()
    set_attention(model, AttentionBackend.TORCH_CPU)
    found = shared(model, RAGGED)

    def worst(result: Result) -> float:
        return max(((result[1][n].float() - g).norm() / g.norm()).item() for n, g in exact[1].items())

    assert worst(found) < 1.5 * worst(rounded)
