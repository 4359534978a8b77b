"""Rows beside longer ones, packed or padded, are what plain transformers gives them alone: to rounding."""

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.batches.collate import Piece, lay_end_to_end, pad_right
from memtrain.trainers.model.attention import functions, set_attention
from memtrain.trainers.model.attention.isolation_check import verify_isolation
from memtrain.trainers.model.attention.own_positions import row_lengths, take_own_positions
from memtrain.trainers.model.attention.padding_check import verify_padding
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sampling

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONG}),
    "dynamic": ("llama", {"head_dim": 16, "max_position_embeddings": 16, "rope_parameters": DYNAMIC}),
    "of layer types": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 512,
            "max_position_embeddings": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": DYNAMIC,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "temperature": (
        "llama4_text",
        {
            "head_dim": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 512,
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 8,
            "attn_scale": 0.5,
        },
    ),
}
LENGTHS = [9, 40, 5, 20, 16]
"""Some below the 16 tokens (8 for Llama 4) at which each kind changes, some above, and one on it."""


def model_of(kind: str, *, ours: bool, attention: str = "eager") -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, config = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoConfig.for_model(family, **(SHAPE | config))
        model = AutoModelForCausalLM.from_config(made, attn_implementation=attention)
    if ours:
        take_own_positions(model)
    return model.eval()


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 128, (length,), generator=generator) for length in LENGTHS]


def alone(kind: str) -> list[Tensor]:
    """Log-probs [T, V] of each row in a newly made model of plain transformers."""
    with torch.no_grad():
        return [
            model_of(kind, ours=False)(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1)
            for row in rows()
        ]


def pieces() -> list[Piece]:
    return [Piece(row.numpy(), torch.ones(len(row), dtype=torch.bool).numpy()) for row in rows()]


def packed(model: nn.Module) -> list[Tensor]:
    micro_batch = lay_end_to_end(pieces(), pad_id=0, multiple=8)
    with torch.no_grad():
        logp_TV = model(**micro_batch.model_inputs(), use_cache=False).logits[0].log_softmax(-1)
    return [logp_TV[start:end] for start, end in pairwise(accumulate(LENGTHS, initial=0))]


def padded(model: nn.Module, *, by_row: bool) -> list[Tensor]:
    micro_batch = pad_right(pieces(), pad_id=0, by_row=by_row)
    with torch.no_grad():
        logp_BTV = model(**micro_batch.model_inputs(), use_cache=False).logits.log_softmax(-1)
    return [logp_TV[:length] for logp_TV, length in zip(logp_BTV, LENGTHS, strict=True)]


def furthest(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_row_is_what_plain_transformers_gives_it_alone(kind: str):
    expected = alone(kind)
    model = model_of(kind, ours=True)
    set_attention(model, AttentionBackend.TORCH_CPU)
    assert furthest(packed(model), expected) < 2e-5
    # What a neighbour has left behind changes nothing either.
    assert furthest(packed(model), expected) < 2e-5


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "of layer types"])
def test_without_positions_of_our_own_a_packed_row_is_another(kind: str):
    """The fault that is mended: transformers takes the longest row for all."""
    model = model_of(kind, ours=False)
    set_attention(model, AttentionBackend.TORCH_CPU)
    assert furthest(packed(model), alone(kind)) > 1e-2


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "of layer types", "temperature"])
def test_a_padded_row_is_what_plain_transformers_gives_it_alone(kind: str):
    assert furthest(padded(model_of(kind, ours=True), by_row=True), alone(kind)) < 2e-5


def test_gradients_of_packed_rows_are_those_of_the_rows_alone():
    def gradients(model: nn.Module, take: Callable[[], Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        take().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    for kind in ("longrope", "temperature"):
        plain = model_of(kind, ours=False)
        expected = gradients(
            plain,
            lambda plain=plain: sum(
                plain(input_ids=row[None], use_cache=False).logits.log_softmax(-1)[..., 3].sum()
                for row in rows()
            ),
        )
        model = model_of(kind, ours=True)
        set_attention(model, AttentionBackend.TORCH_CPU)
        micro_batch = lay_end_to_end(pieces(), pad_id=0)
        found = gradients(
            model,
            lambda model=model, micro_batch=micro_batch: (
                model(**micro_batch.model_inputs(), use_cache=False).logits.log_softmax(-1)[..., 3].sum()
            ),
        )
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() < 1e-4 * gradient.norm() + 1e-6, name


def test_the_length_of_each_row_is_read_from_its_positions():
    """Rows of 3 and 2 tokens, and two completions of 2 and 1 after a prompt of 3."""
    position_BT = torch.tensor([[0, 1, 2, 0, 1, 3, 4, 3]])
    assert row_lengths(position_BT).tolist() == [[3, 3, 3, 2, 2, 5, 5, 4]]


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "temperature"])
def test_the_start_up_check_sees_a_model_whose_positions_follow_its_neighbours(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """At 13 and 9 tokens, where the check looked before, LongRoPE and dynamic NTK show nothing."""
    lengths = {"shared_prompts": False, "longest": 40, "together": 64}
    verify_isolation(model_of(kind, ours=True), AttentionBackend.TORCH_CPU, **lengths)
    monkeypatch.setattr(functions, "is_tempered", lambda module: False)
    with pytest.raises(LaunchError, match="differs from its rows computed alone"):
        verify_isolation(model_of(kind, ours=False), AttentionBackend.TORCH_CPU, **lengths)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_check_of_padded_rows_sees_it_too(kind: str):
    with pytest.raises(LaunchError, match="padded beside a longer one"):
        verify_padding(model_of(kind, ours=True), longest=40, by_row=False)
    assert verify_padding(model_of(kind, ours=True), longest=40, by_row=True) < 1e-5


def test_the_native_sampler_scales_queries_by_their_place_in_their_own_row():
    """Prompts of 5, 12 and 3 tokens grow past the 8 tokens at which Llama 4 begins to scale."""
    model = model_of("temperature", ours=True)
    prompts = [tuple(row[:length].tolist()) for row, length in zip(rows(), (5, 12, 3), strict=False)]
    groups = [Group(prompt, 2, seed) for seed, prompt in enumerate(prompts)]
    made = NativeSampler(model, AttentionBackend.TORCH_CPU, max_rows=6).generate(
        groups, Sampling(max_tokens=10)
    )
    plain = model_of("temperature", ours=False)
    for group, samples in zip(groups, made, strict=True):
        for sample in samples:
            ids_T = torch.tensor([*group.prompt_ids, *sample.token_ids])
            with torch.no_grad():
                logp_TV = plain(input_ids=ids_T[None], use_cache=False).logits[0].log_softmax(-1)
            first = len(group.prompt_ids)
            own_T = logp_TV[first - 1 : -1].gather(1, ids_T[first:, None])[:, 0]
            assert (own_T - torch.tensor(sample.logprobs)).abs().max() < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_layers_are_streamed_are_what_plain_transformers_gives_them_alone(kind: str):
    """Layers run over slices of 24 tokens, and Llama 4 counts places from the beginning of each."""
    expected = alone(kind)
    model = model_of(kind, ours=True)
    set_attention(model, AttentionBackend.TORCH_CPU)
    stream_layers(model, 24)
    assert furthest(packed(model), expected) < 2e-5
