"""Rows that several ranks hold together give the loss and gradients of one process that holds them whole."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.sections.methods.preference import Dpo as DpoRecipe
from memtrain.recipes.sections.methods.preference import Reward as RewardRecipe
from memtrain.recipes.sections.methods.sft import Sft as SftRecipe
from memtrain.trainers.batches.answer_batch import Answer, Group, collate_answers
from memtrain.trainers.batches.collate import Piece, lay_end_to_end, pad_right
from memtrain.trainers.distributed.context_parallel import shared
from memtrain.trainers.distributed.ddp import GradientAllReduce
from memtrain.trainers.methods.dpo import Dpo
from memtrain.trainers.methods.reward import Reward
from memtrain.trainers.methods.sft import Sft
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.context_parallel.groups import make_context
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.heads.reward_head import RewardScorer
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.reference.answer_logps import answer_logps
from memtrain.trainers.reference.reference import FrozenReference

SIZES = (2, 4)
MULTIPLE = 8
"""Twice the most ranks: the same batch is cut by 2 and by 4."""
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "sdpa",
    "pad_token_id": 0,
}
DOCUMENTS = [37, 5, 44, 1, 20, 3]
"""Two of them cross borders of any cut."""


def model_of(model_class: Any, config_class: Any, seed: int = 0, **config: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config_class(**(SHAPE | config)))


llama = partial(model_of, LlamaForCausalLM, LlamaConfig)
qwen3 = partial(model_of, Qwen3ForCausalLM, Qwen3Config)
mistral = partial(model_of, MistralForCausalLM, MistralConfig, sliding_window=6, attn_implementation="eager")
WINDOWED: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
capped = partial(
    model_of,
    Gemma2ForCausalLM,
    Gemma2Config,
    query_pre_attn_scalar=8,
    attn_logit_softcapping=0.5,
    **WINDOWED | {"attn_implementation": "eager"},
)


def sinking() -> nn.Module:
    """gpt-oss with sinks that weigh as much as a few tokens."""
    how = {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"}
    model: Any = model_of(GptOssForCausalLM, GptOssConfig, **WINDOWED | how)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.sinks.data = torch.tensor([0.5, -1.0, 2.0, 0.0]) + number
    return model


def adapted() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
        return get_peft_model(qwen3(), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))  # pyright: ignore


def pieces(lengths: list[int], first_loss_token: int = 0) -> list[Piece]:
    random = np.random.Generator(np.random.Philox(key=3))
    return [
        Piece(
            random.integers(1, 96, n).astype(np.int32),
            (np.arange(n) >= first_loss_token) & (random.random(n) > 0.2),
        )
        for n in lengths
    ]


def pairs(**how: bool) -> Any:
    random = np.random.Generator(np.random.Philox(key=4))

    def ids(n: int) -> Any:
        return random.integers(1, 96, n).astype(np.int32)

    def answer(n: int) -> Answer:
        return Answer(ids(n), np.ones(n, np.bool_))

    groups = [Group(ids(p), (answer(a), answer(b))) for p, a, b in ((17, 9, 14), (6, 21, 2), (11, 1, 8))]
    return collate_answers(groups, [1.0, 0.5, float("nan")], None, pad_id=0, multiple=MULTIPLE, **how)


@dataclass(frozen=True)
class Case:
    """A model, a method and a micro-batch."""

    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    method: Callable[[Callable[[], nn.Module]], Any] = lambda reference: Sft(SftRecipe())
    is_checkpointed: bool = False
    is_chunked: bool = True
    is_reward: bool = False
    slice_tokens: int = 0
    """Of the ranks' layers; one process has none."""
    backend: AttentionBackend = AttentionBackend.TORCH_CPU


packed = partial(lambda: lay_end_to_end(pieces(DOCUMENTS), pad_id=0, multiple=MULTIPLE))
padded = partial(lambda: pad_right(pieces([30, 7, 19]), pad_id=0, multiple=MULTIPLE))
one_long = partial(lambda: lay_end_to_end(pieces([123]), pad_id=0, multiple=MULTIPLE))
loss_at_the_end = partial(
    lambda: lay_end_to_end(pieces([128], first_loss_token=120), pad_id=0, multiple=MULTIPLE)
)
short = partial(lambda: lay_end_to_end(pieces([8] * 8), pad_id=0, multiple=MULTIPLE))

padded_pairs = partial(pairs, is_shared=False, is_flat=False)
PADDED = (padded, padded_pairs)
"""Batches that one process attends to by the model's own attention."""


def dpo(reference: Callable[[], nn.Module]) -> Dpo:
    return Dpo(
        DpoRecipe(), FrozenReference(reference()), lambda model, batch: answer_logps(model, batch).logp_A
    )


CASES = {
    "llama, packed": Case(llama, packed),
    "qwen3, packed": Case(qwen3, packed, is_checkpointed=True),
    "qwen3, packed, full logits": Case(qwen3, packed, is_chunked=False),
    "llama, one document": Case(llama, one_long, is_checkpointed=True),
    "llama, padded": Case(llama, padded),
    "qwen3, padded": Case(qwen3, padded, is_checkpointed=True),
    "llama, nothing learnt on most ranks": Case(llama, loss_at_the_end),
    "llama, documents that cross no border": Case(llama, short),
    "llama, label smoothing and z loss": Case(
        llama, packed, lambda reference: Sft(SftRecipe(label_smoothing=0.1, z_loss=1e-3))
    ),
    "llama, dynamic fine-tuning": Case(llama, packed, lambda reference: Sft(SftRecipe(loss="dft"))),
    "lora": Case(adapted, packed),
    "lora, checkpointed": Case(adapted, packed, is_checkpointed=True),
    "dpo, shared prompts": Case(
        qwen3, partial(pairs, is_shared=True, is_flat=True), dpo, is_checkpointed=True
    ),
    "dpo, end to end": Case(llama, partial(pairs, is_shared=False, is_flat=True), dpo),
    "dpo, padded": Case(llama, padded_pairs, dpo),
    "reward, shared prompts": Case(
        partial(model_of, LlamaForSequenceClassification, LlamaConfig, num_labels=1),
        partial(pairs, is_shared=True, is_flat=True),
        lambda reference: Reward(RewardRecipe(center_rewards_coefficient=0.01)),
        is_reward=True,
    ),
    "windows, dpo, shared prompts": Case(mistral, partial(pairs, is_shared=True, is_flat=True), dpo),
    "windows and sinks": Case(sinking, packed),
    "windows and capped scores": Case(capped, packed, backend=AttentionBackend.MASKED),
    "in slices, windows, one document": Case(mistral, one_long, slice_tokens=4),
    "in slices, windows, dpo, shared prompts": Case(
        mistral, partial(pairs, is_shared=True, is_flat=True), dpo, slice_tokens=9
    ),
    "in slices, windows and sinks": Case(sinking, packed, slice_tokens=9),
    "in slices, windows and capped scores": Case(
        capped, packed, slice_tokens=9, backend=AttentionBackend.MASKED
    ),
    "in slices, llama, packed": Case(llama, packed, slice_tokens=7),
    "in slices, qwen3, one document": Case(qwen3, one_long, slice_tokens=16),
    "in slices, llama, padded": Case(llama, padded, slice_tokens=10),
    "in slices, documents that cross no border": Case(llama, short, slice_tokens=5),
    "in slices, lora": Case(adapted, packed, slice_tokens=7),
    "in slices, dpo, shared prompts": Case(
        qwen3, partial(pairs, is_shared=True, is_flat=True), dpo, slice_tokens=9
    ),
}


def scorer_of(case: Case, context: Any, **changed: Any) -> nn.Module:
    model: Any = case.model(**changed).train()
    if case.is_checkpointed:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    if context is not None or case.batch not in PADDED:
        set_attention(model.get_base_model() if hasattr(model, "get_base_model") else model, case.backend)
    if context is not None and not context.by_heads:
        stream_layers(model, case.slice_tokens)
    scorer: Any = RewardScorer(model) if case.is_reward else Scorer(model, is_chunked=case.is_chunked)
    scorer.context = context
    return scorer


def learn(case: Case, context: Any = None) -> dict[str, Tensor]:
    """Loss, sums and gradients, summed over the ranks."""
    scorer = scorer_of(case, context)
    method = shared(case.method(lambda: scorer_of(case, context, seed=7)), context.size if context else 1)
    trained = {name: one for name, one in scorer.named_parameters() if one.requires_grad}
    exchange = GradientAllReduce(list(trained.values())) if context else None
    batch = case.batch()
    loss = method.loss(scorer, batch, denominator=float(batch.num_loss_tokens), want_stats=True)
    loss.value.backward()
    reported = {"loss": loss.value.detach(), **{f"sum of {name}": value for name, value in loss.sums.items()}}
    if exchange is not None:
        exchange.finish()
        for value in reported.values():
            dist.all_reduce(value)
    return reported | {name: one.grad for name, one in trained.items() if one.grad is not None}


def on_ranks(size: int, by_heads: bool, folder: Path) -> dict[str, dict[str, Tensor]]:
    """Every case on `size` forked processes; what rank 0 found, which all have."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
                context = make_context(size, by_heads=by_heads)
                # Heads are dealt out for whole rows, which have no slices.
                cases = {name: one for name, one in CASES.items() if not (by_heads and one.slice_tokens)}
                found = {name: learn(case, context) for name, case in cases.items()}
                if rank == 0:
                    torch.save(found, folder / "found.pt")
                dist.barrier()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * size
    return torch.load(folder / "found.pt")


@pytest.fixture(scope="module", params=[(size, by) for by in ("keys", "heads") for size in SIZES])
def found(request: Any, tmp_path_factory: Any) -> dict[str, dict[str, Tensor]]:
    """What the ranks found, by case. By heads four ranks share two heads of keys: each is sent to two."""
    size, by = request.param
    return on_ranks(size, by == "heads", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_rows_learn_what_one_process_learns(found: dict[str, dict[str, Tensor]], name: str):
    if name not in found:
        pytest.skip("heads are dealt out for whole rows, which have no slices")
    expected = learn(CASES[name])
    assert found[name].keys() == expected.keys()
    for what, value in expected.items():
        # Rewards are small differences of large sums.
        size = value.norm().clamp(min=1.0 if what.startswith("sum of") else 1e-6)
        error = (found[name][what] - value).norm() / size
        assert error < 1e-5, f"{what} is off by {error:.1e}"
