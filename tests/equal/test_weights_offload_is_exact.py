"""Weights that live on the host give the losses, norms and weights of the plain run, to the bit."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampled import sampled
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.sections.model import Adapter
from memtrain.recipes.sections.optim import Optim
from memtrain.trainers.losses.head.request import LogprobRequest
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.heads.build import scorer_of
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.offload.copy_engines import LazyEngine
from memtrain.trainers.model.offload.weights import compute_device, weights_of
from memtrain.trainers.model.streamed.check import verify_streamed
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Group, Sampling
from memtrain.trainers.optim.build import build_optimizer
from memtrain.trainers.optim.in_backward import InBackward
from memtrain.trainers.optim.step import DistributedStep, update
from memtrain.trainers.reference.build import frozen_scorer
from memtrain.trainers.reference.reference import FrozenReference, evaluating, without_adapter

TinyModel = Callable[..., Any]
LENGTHS = (5, 9, 2, 8)
ADAPTER = Adapter(r=4, dropout=0.1)


def train(
    model: Any, settings: Settings, *, num_micro_batches: int = 2, num_steps: int = 3
) -> tuple[list[float], list[Tensor]]:
    """Losses and norms of steps of packed micro-batches, and the weights after them."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(model.train(), Optim(lr=1e-2), settings)
    engine = InBackward(optimizer, parameters).engine() if settings.in_backward else DistributedStep()
    layout = packed_layout(LENGTHS)
    found: list[float] = []
    torch.manual_seed(0)
    for _ in range(num_steps):
        engine.begin(model, num_micro_batches)
        for _ in range(num_micro_batches):
            ids = torch.randint(1, 128, (1, sum(LENGTHS)))
            logits = model(
                input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False
            ).logits[0]
            loss = torch.nn.functional.cross_entropy(
                logits[layout.predicting_rows].float(), ids[0, layout.predicted_rows]
            )
            engine.backward(loss)
            found.append(loss.item())
        limit = None if settings.in_backward else 1.0
        found.append(update(optimizer, parameters, lr=1e-2, max_grad_norm=limit, engine=engine).item())
    return found, [weight.detach().clone() for weight in model.parameters()]


def equal(one: tuple[list[float], list[Tensor]], other: tuple[list[float], list[Tensor]]) -> bool:
    """The same bits."""
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def pair(tiny_model: TinyModel, adapter: Adapter | None, dtype: torch.dtype = torch.float32) -> Any:
    """A model with or without an adapter, twice."""
    plain = tiny_model(num_hidden_layers=3)
    set_attention(plain, "torch_cpu")
    plain.to(dtype)
    if adapter is not None:
        torch.manual_seed(1)
        plain = add_adapter(plain, adapter)
    return plain, copy.deepcopy(plain)


FORMS = {
    "plain": {},
    "in slices": {"slice_tokens": 24, "checkpoint_every": 0},
    "inputs away too": {"offload": "boundaries"},
    "stepped in the backward pass": {"in_backward": True},
}


ADAPTERS = {
    "full": (None, False),
    "lora": (ADAPTER, False),
    "dora": (Adapter(r=4, kind="dora"), False),
    "lora too": (ADAPTER, True),
    "dora too": (Adapter(r=4, kind="dora"), True),
    "lora too, and a whole head": (Adapter(r=4, modules_to_save=["lm_head"]), True),
}


@pytest.mark.parametrize(("form", "adapted"), sampled(itertools.product(FORMS, ADAPTERS)))
def test_training_is_the_same(
    tiny_model: TinyModel, make_settings: Callable[..., Settings], form: str, adapted: str
):
    adapter, moves = ADAPTERS[adapted]
    plain, treated = pair(tiny_model, adapter)
    settings = make_settings(
        checkpoint_every=1, adapter=adapter, weights_offload=True, adapters_offload=moves
    ).model_copy(update=FORMS[form])
    num_micro_batches = 1 if settings.in_backward else 2
    weights = apply_checkpointing_and_offload(treated, settings, LazyEngine()).weights
    assert equal(
        train(plain, settings, num_micro_batches=num_micro_batches),
        train(treated, settings, num_micro_batches=num_micro_batches),
    )
    assert weights is not None
    assert (weights.out_bytes > 0) == (adapter is None or moves)


@pytest.mark.parametrize("kind", ["adapter off", "copy"])
def test_a_reference_from_the_host_answers_as_one_on_the_device(
    tiny_model: TinyModel, make_settings: Callable[..., Settings], kind: str
):
    """The policy without its adapter, over weights on the host; a frozen copy with buffers of its own."""
    plain, treated = pair(tiny_model, ADAPTER if kind == "adapter off" else None)
    adapter = ADAPTER if kind == "adapter off" else None
    settings = make_settings(checkpoint_every=1, adapter=adapter, weights_offload=True)
    models: list[Any] = [plain, treated]
    if kind == "adapter off":
        apply_checkpointing_and_offload(treated, settings, LazyEngine())
        scorers = [scorer_of(model, "lm", settings) for model in models]
        asked = [without_adapter(scorer, scorer.model) for scorer in scorers]
    else:
        bare = settings.model_copy(update={"weights_offload": False})
        asked = [
            FrozenReference(frozen_scorer(model, one, LazyEngine()))
            for model, one in zip(models, (bare, settings), strict=True)
        ]
    layout = packed_layout(LENGTHS)
    ids = torch.randint(1, 128, (1, sum(LENGTHS)))
    inputs = {"input_ids": ids, "position_ids": layout.position_ids, "layout": layout}
    request = LogprobRequest(ids[0, layout.predicted_rows])
    with torch.no_grad(), evaluating(asked[0].scorer), evaluating(asked[1].scorer):
        for _ in range(2):
            answers = [one.scorer(inputs, layout.predicting_rows, request).logp_N for one in asked]
            assert torch.equal(*answers)


def test_bfloat16_weights_are_stepped_by_their_float32_copies(
    tiny_model: TinyModel, make_settings: Callable[..., Settings]
):
    plain, treated = pair(tiny_model, None, torch.bfloat16)
    settings = make_settings(checkpoint_every=1, dtype="bfloat16", master_weights=True, weights_offload=True)
    apply_checkpointing_and_offload(treated, settings, LazyEngine())
    assert equal(train(plain, settings), train(treated, settings))


def test_each_layer_travels_three_times_a_micro_batch_but_those_that_wait_in_a_buffer(
    tiny_model: TinyModel, make_settings: Callable[..., Settings]
):
    """Three layers: all in the forward pass; in the backward pass the last two are there, the first comes."""
    _, treated = pair(tiny_model, None)
    settings = make_settings(checkpoint_every=1, weights_offload=True)
    weights = apply_checkpointing_and_offload(treated, settings, LazyEngine()).weights
    assert weights is not None
    train(treated, settings, num_micro_batches=1, num_steps=1)
    ends = sum(
        {id(w): w.nbytes for w in (treated.lm_head.weight, treated.model.embed_tokens.weight)}.values()
    )
    called = treated.lm_head.weight.nbytes + treated.model.embed_tokens.weight.nbytes
    assert weights.back_bytes == 4 * weights.device_bytes + called
    assert weights.host_bytes == 3 * weights.device_bytes + ends


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_weight_that_embedding_and_head_share_gets_both_gradients(
    tiny_model: TinyModel, make_settings: Callable[..., Settings], num_micro_batches: int
):
    plain = tiny_model(num_hidden_layers=2, tie_word_embeddings=True)
    set_attention(plain, "torch_cpu")
    treated = copy.deepcopy(plain)
    assert treated.lm_head.weight is treated.model.embed_tokens.weight
    settings = make_settings(checkpoint_every=1, weights_offload=True, in_backward=num_micro_batches == 1)
    apply_checkpointing_and_offload(treated, settings, LazyEngine())
    assert equal(
        train(plain, settings, num_micro_batches=num_micro_batches),
        train(treated, settings, num_micro_batches=num_micro_batches),
    )


@pytest.mark.parametrize(
    "before", [{}, {"offload": "boundaries"}, {"slice_tokens": 24, "checkpoint_every": 0}]
)
def test_frozen_weights_go_to_the_host_in_mid_run(
    tiny_model: TinyModel, make_settings: Callable[..., Settings], before: dict[str, Any]
):
    """As when memory ran out: the same numbers, and each layer is computed again once, not twice."""
    plain, treated = pair(tiny_model, ADAPTER)
    settings = make_settings(checkpoint_every=1, adapter=ADAPTER).model_copy(update=before)
    for model in (plain, treated):
        apply_checkpointing_and_offload(model, settings, LazyEngine())
        train(model, settings, num_steps=1)
    moved = settings.model_copy(update={"weights_offload": True})
    assert apply_checkpointing_and_offload(treated, moved, LazyEngine()).weights is not None
    calls: list[int] = []
    treated.get_base_model().model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    assert equal(train(plain, settings, num_steps=2), train(treated, moved, num_steps=2))
    assert len(calls) == 2 * 2 * 2, "steps, micro-batches, and forward with recomputation"


def test_the_start_up_check_of_slices_leaves_no_gradient(
    tiny_model: TinyModel, make_settings: Callable[..., Settings]
):
    """Gradients of weights on the host take a way of their own, whatever autograd is asked for."""
    plain, treated = pair(tiny_model, None)
    settings = make_settings(checkpoint_every=0, slice_tokens=8, weights_offload=True)
    apply_checkpointing_and_offload(treated, settings, LazyEngine())
    assert verify_streamed(treated, AttentionBackend.TORCH_CPU) < 1e-5
    assert all(weight.grad is None and weight.requires_grad for weight in treated.parameters())
    apply_checkpointing_and_offload(plain, settings.model_copy(update={"weights_offload": False}))
    assert equal(train(plain, settings), train(treated, settings))


def test_a_pass_that_broke_off_leaves_nothing_behind(
    tiny_model: TinyModel, make_settings: Callable[..., Settings]
):
    plain, treated = pair(tiny_model, None)
    settings = make_settings(checkpoint_every=1, weights_offload=True)
    apply_checkpointing_and_offload(treated, settings, LazyEngine())
    layout = packed_layout(LENGTHS)

    def broken(gradient: Tensor) -> Tensor:
        raise RuntimeError("broken off")

    ids = torch.randint(1, 128, (1, sum(LENGTHS)))
    handle = treated.model.layers[0].register_forward_pre_hook(
        lambda module, args: args[0].register_hook(broken) and None
    )
    hidden = treated(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False)
    with pytest.raises(RuntimeError, match="broken off"):
        hidden.logits.sum().backward()
    handle.remove()
    treated.zero_grad()
    assert equal(train(plain, settings), train(treated, settings))


@pytest.mark.parametrize("form", ["plain", "in slices"])
def test_a_mixture_whose_router_has_an_adapter_is_the_same(make_settings: Callable[..., Settings], form: str):
    """PEFT sets an adapted router's weight anew in every pass; others of the layer keep their versions."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=128, hidden_size=16, moe_intermediate_size=8, num_experts=4, head_dim=8,
        num_experts_per_tok=2, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_config(config)
    set_attention(plain, "torch_cpu")
    plain = add_adapter(plain, Adapter(r=4))
    treated = copy.deepcopy(plain)
    settings = make_settings(checkpoint_every=1, adapter=Adapter(r=4), weights_offload=True)
    settings = settings.model_copy(update=FORMS[form])
    apply_checkpointing_and_offload(treated, settings, LazyEngine())
    assert any("gate.lora_A" in name for name, _ in treated.named_parameters())
    assert equal(train(plain, settings), train(treated, settings))


@pytest.mark.parametrize("adapter", [None, ADAPTER], ids=["full", "lora"])
def test_completions_are_those_of_weights_on_the_device(
    tiny_model: TinyModel, make_settings: Callable[..., Settings], adapter: Adapter | None
) -> None:
    """Reading prompts and writing tokens are passes over the layers like any other."""
    models = pair(tiny_model, adapter)
    settings = make_settings(weights_offload=True, checkpoint_every=1, adapter=adapter)
    apply_checkpointing_and_offload(models[1], settings, LazyEngine())
    groups = [Group((5, 6, 7), 3, seed=1), Group((9, 2), 3, seed=2)]
    found = [
        NativeSampler(model.eval(), AttentionBackend.TORCH_CPU, 6).generate(groups, Sampling(12))
        for model in models
    ]
    assert found[0] == found[1]


def test_a_model_computes_where_its_layers_are_brought(
    tiny_model: TinyModel, make_settings: Callable[..., Settings]
) -> None:
    """Of a model that is trained whole even the embedding lives on the host: its place tells nothing."""
    model = tiny_model()
    assert compute_device(model) == torch.device("cpu")
    settings = make_settings(weights_offload=True, checkpoint_every=1)
    apply_checkpointing_and_offload(model, settings, LazyEngine())
    home = weights_of(model)
    assert home is not None
    home.device = torch.device("meta")
    assert compute_device(model) == torch.device("meta")
