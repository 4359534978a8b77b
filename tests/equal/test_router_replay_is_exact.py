"""The sampler's choices of experts in the update: recorded as they are, and followed to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.experts.load_balance import routers_of
from memtrain.trainers.model.experts.router_replay import OWN, RouterReplay
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sampling
from memtrain.trainers.online.rollout.rollout_batches import new_window

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 6, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 5},
    "gpt_oss": {
        "num_local_experts": 4,
        "layer_types": ["full_attention", "full_attention"],
        "pad_token_id": 0,
    },
    "olmoe": {"num_experts": 4},
}
IDS = torch.tensor([[3, 5, 9, 2, 11, 40, 7, 1, 8, 8, 30, 12]])


def mixture(kind: str = "qwen3_moe") -> Any:
    torch.manual_seed(4)
    config = AutoConfig.for_model(kind, **SMALL | KINDS[kind], eos_token_id=1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if kind != "gpt_oss":
        set_attention(model, AttentionBackend.TORCH_CPU)
    return model


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    inputs: dict[str, Any] = {"input_ids": IDS}
    if model.config.model_type != "gpt_oss":
        layout = packed_layout((IDS.shape[1],))
        inputs |= {"position_ids": layout.position_ids, "layout": layout}
    logits = model(**inputs, use_cache=False).logits[0]
    loss = nn.functional.cross_entropy(logits[:-1], IDS[0, 1:])
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> bool:
    return torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_routers_own_choices_move_no_bit(kind: str) -> None:
    model = mixture(kind)
    expected = step(model)
    replay = RouterReplay(model)
    with replay.recording() as taken:
        assert same(step(model), expected)
    routes_TLK = taken()
    assert routes_TLK.shape == (12, 2, 2)
    checkpoint_layers(model, 1)
    for routes in (routes_TLK, torch.full_like(routes_TLK, OWN)):
        replay.send(routes)
        assert same(step(model), expected)


def test_other_choices_are_followed_in_recomputation_too() -> None:
    """Against the formula of Qwen3-MoE written out: the softmax of the given experts over their sum."""
    routes_TLK = torch.stack([torch.randperm(6)[:2] for _ in range(24)]).view(12, 2, 2)
    plain = mixture()
    for layer, router in enumerate(routers_of(plain)):

        def forward(hidden: Tensor, router: Any = router, layer: int = layer) -> tuple[Tensor, ...]:
            logits = nn.functional.linear(hidden.reshape(-1, 32), router.weight)
            given = logits.softmax(-1).gather(-1, routes_TLK[:, layer])
            return logits, given / given.sum(-1, keepdim=True), routes_TLK[:, layer]

        router.forward = forward
    expected = step(plain)
    reported = mixture()
    assert not torch.equal(step(reported)[0], expected[0])
    replay = RouterReplay(reported)
    checkpoint_layers(reported, 1)
    replay.send(routes_TLK.short())
    assert same(step(reported), expected)


def test_the_native_sampler_records_the_choices_of_the_model_itself() -> None:
    """Rows that end early give their slots to others; the last token of a completion was never read."""
    model = mixture()
    replay = RouterReplay(model)
    sampler = NativeSampler(model, AttentionBackend.TORCH_CPU, max_rows=3, replay=replay)
    prompts = [(3, 5, 9, 2), (11, 40), (7, 1, 8, 8, 30)]
    groups = [Group(prompt, 2, seed) for seed, prompt in enumerate(prompts)]
    made = sampler.generate(groups, Sampling(max_tokens=7, stop_ids=tuple(range(20))))
    assert len({len(sample.token_ids) for group in made for sample in group}) > 1
    model.eval()
    for prompt, group in zip(prompts, made, strict=True):
        for sample in group:
            ids = torch.tensor([[*prompt, *sample.token_ids]])
            layout = packed_layout((ids.shape[1],))
            with torch.no_grad(), replay.recording() as taken:
                model(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False)
            assert sample.routes is not None
            expected = taken().numpy()
            assert (sample.routes.prompt == expected[: len(prompt)]).all()
            assert (sample.routes.own[:-1] == expected[len(prompt) : -1]).all()
            assert (sample.routes.own[-1] == OWN).all()
    window = new_window(0, [0, 1, 2], [0, 0, 0], prompts, made, 1)
    assert window.routes_N is not None
    assert window.prompt_routes is not None
    assert len(window.routes_N) == len(window.ids_N)
    assert len(window.prompt_routes) == len(window.prompt_ids)
