"""Streamed layers give the loss and the gradients of the plain run, on every kind of row."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampled import sampled
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from memtrain.errors import LaunchError
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.batches.collate import Piece, pad_right
from memtrain.trainers.losses.head.request import NllRequest
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout, shared_layout
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.offload import activations as activations_module
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.offload.copy_engines import LazyEngine
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.model.streamed.check import verify_streamed

TinyModel = Callable[..., Any]

ROWS = {
    "one document": packed_layout([127]),
    "packed": packed_layout([37, 5, 64, 1, 20]),
    "padded rows": packed_layout([32] * 4),
    "shared prompts": shared_layout([(30, [11, 9, 12]), (7, [20, 38])]),
    "many short prompts": shared_layout([(5, [6, 7]), (4, [8, 5]), (9, [6, 3]), (20, [14, 30])]),
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-13}
"""Relative: what another order of the sums leaves."""
AS_FAR = 1.5
"""Beyond the tolerance, a float32 run may be so many times as far from float64 as the plain run is: with LoRA
that one is itself off by up to 2.6e-6, and streamed ones by 0.65 to 1.31 times as much (90 cases; CPU)."""


def step(model: Any, layout: Layout, seed: int = 0) -> tuple[float, dict[str, Tensor]]:
    """Loss of one training row, and the gradient of each weight that has one."""
    model.train().zero_grad()
    torch.manual_seed(seed)
    ids = torch.randint(0, 128, (1, layout.num_tokens))
    hidden = model(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False)
    logits = hidden.logits[0, layout.predicting_rows]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = torch.nn.functional.cross_entropy(wide, ids[0, layout.predicted_rows])
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


QUERY = "model.layers.0.self_attn.q_proj.weight"


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative error of the gradient of all weights, by its norm; no weight is off by ten times as much."""
    assert set(found) == set(expected)
    off = {name: (found[name].double() - one.double()).norm() for name, one in expected.items()}
    sizes = {name: one.double().norm() for name, one in expected.items()}
    whole = float(torch.stack([*off.values()]).norm() / torch.stack([*sizes.values()]).norm())
    assert all(float(off[name]) <= 10 * max(whole, 1e-13) * float(size) for name, size in sizes.items())
    return whole


def with_adapter(model: Any, **keys: Any) -> Any:
    """A LoRA whose second factor is not zero, so that both get a gradient."""
    torch.manual_seed(1)
    adapted = add_adapter(model, Adapter(r=4, **keys))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    return adapted


KINDS = ("full", "lora", "dora")


@pytest.mark.parametrize(("dtype", "rows", "kind"), sampled(itertools.product(TOLERANCE, ROWS, KINDS)))
def test_loss_and_gradients_are_those_of_the_plain_run(
    tiny_model: TinyModel, dtype: torch.dtype, rows: str, kind: str
):
    model = tiny_model(num_hidden_layers=3)
    set_attention(model, "torch_cpu")
    if kind != "full":
        model = with_adapter(model, kind=kind)
    model.to(dtype)
    loss, gradients = step(model, ROWS[rows])
    _, exact = step(copy.deepcopy(model).double(), ROWS[rows])
    limit = max(TOLERANCE[dtype], AS_FAR * error(gradients, exact))
    for slice_tokens in (64, 24, 11):
        stream_layers(model, slice_tokens)
        found, streamed = step(model, ROWS[rows])
        assert found == pytest.approx(loss, rel=1e-6)
        assert error(streamed, exact) <= limit
    stream_layers(model, 0)
    assert step(model, ROWS[rows])[0] == loss


def test_padded_rows_go_in_slices_as_under_the_models_own_attention(tiny_model: TinyModel):
    """Padding and all end to end: slices begin in rows and in padding."""
    model = tiny_model(num_hidden_layers=2)
    generator = torch.Generator().manual_seed(0)
    pieces = [
        Piece(torch.randint(0, 128, (length,), generator=generator).int().numpy(), np.ones(length, np.bool_))
        for length in (37, 5, 50)
    ]
    batch = pad_right(pieces, pad_id=0)
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}

    def ask() -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        request = NllRequest(batch.targets, torch.ones(len(batch.targets)))
        loss = Scorer(model)(inputs, batch.scored_index, request).loss
        loss.backward()
        return loss.item(), {name: w.grad.clone() for name, w in model.named_parameters()}

    set_attention(model, AttentionBackend.TRANSFORMERS)
    loss, gradients = ask()
    set_attention(model, AttentionBackend.TORCH_CPU)
    for slice_tokens in (64, 24, 11):
        stream_layers(model, slice_tokens)
        found, streamed = ask()
        assert found == pytest.approx(loss, rel=1e-6)
        assert error(streamed, gradients) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_masked_attention_goes_in_slices(tiny_model: TinyModel, dtype: torch.dtype, rows: str):
    model = tiny_model(num_hidden_layers=2).to(dtype)
    set_attention(model, "masked")
    loss, gradients = step(model, ROWS[rows])
    stream_layers(model, 24)
    found, streamed = step(model, ROWS[rows])
    assert found == pytest.approx(loss, rel=1e-6)
    assert error(streamed, gradients) < TOLERANCE[dtype]


RULED = {
    "mistral": ("torch_cpu", {"sliding_window": 20}),
    "gemma2": ("masked", {"sliding_window": 20, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    "gemma3_text": (
        "torch_cpu",
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": ("torch_cpu", {"sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Windows of all layers and of some, capped scores, sinks; each with the attention that computes it."""


@pytest.mark.parametrize("rows", ["packed", "shared prompts", "many short prompts"])
@pytest.mark.parametrize("kind", RULED)
def test_windows_caps_and_sinks_go_in_slices(kind: str, rows: str):
    backend, keys = RULED[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **keys))
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    set_attention(model, backend)
    loss, gradients = step(model, ROWS[rows])
    assert kind != "gpt_oss" or any(name.endswith("sinks") for name in gradients)
    for slice_tokens in (64, 24, 11):
        stream_layers(model, slice_tokens)
        found, streamed = step(model, ROWS[rows])
        assert found == pytest.approx(loss, rel=1e-6)
        assert error(streamed, gradients) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_layers_of_experts_go_in_slices(kind: str):
    """Routers choose for each token by itself; a router's gradient is summed over the slices as any other."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    experts = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **experts))
    set_attention(model, "torch_cpu")
    loss, gradients = step(model, ROWS["packed"])
    assert any("gate.weight" in name for name in gradients), "the routers are trained"
    stream_layers(model, 24)
    found, streamed = step(model, ROWS["packed"])
    assert found == pytest.approx(loss, rel=1e-6)
    assert error(streamed, gradients) < TOLERANCE[torch.float32]


@pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes (pip install 'memtrain[quant]')"
)
def test_layers_of_4_bit_weights_go_in_slices(tmp_path: Path, tiny_llama: TinyModel):
    """Weights are dequantized for each slice: the same numbers each time."""
    tiny_llama(num_hidden_layers=2).save_pretrained(tmp_path)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=four, dtype=torch.float32)
    model = with_adapter(model)
    set_attention(model.get_base_model(), "torch_cpu")
    loss, gradients = step(model, ROWS["packed"])
    stream_layers(model, 24)
    found, streamed = step(model, ROWS["packed"])
    assert found == pytest.approx(loss, rel=1e-6)
    assert error(streamed, gradients) < TOLERANCE[torch.float32]


def test_a_row_of_one_slice_is_the_plain_run_to_the_bit(tiny_model: TinyModel):
    model = with_adapter(tiny_model(), dropout=0.1)
    set_attention(model.get_base_model(), "torch_cpu")
    loss, gradients = step(model, ROWS["packed"])
    stream_layers(model, 127)
    found, streamed = step(model, ROWS["packed"])
    assert found == loss
    assert all(torch.equal(streamed[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("rows", ROWS)
def test_passes_without_gradients_are_the_same(tiny_model: TinyModel, rows: str):
    model, layout = tiny_model(), ROWS[rows]
    set_attention(model, "torch_cpu")
    ids = torch.randint(0, 128, (1, layout.num_tokens))
    inputs = {"input_ids": ids, "position_ids": layout.position_ids, "layout": layout, "use_cache": False}
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
        stream_layers(model, 17)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_weights_are_rounded_once(tiny_model: TinyModel):
    """Two rows that nearly cancel, a slice each: in bfloat16 the linear maps' gradients are the plain run's.

    A slice's gradient that is rounded before it is added is off by its own size, not by the sum's.
    """
    model = tiny_model(num_hidden_layers=2, seed=3).to(torch.bfloat16)
    set_attention(model, "torch_cpu")
    row = torch.randint(0, 128, (1, 40))
    ids, layout = torch.cat([row, row], dim=1), packed_layout([40, 40])
    ids[0, 50] = (ids[0, 50] + 1) % 128
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(40)[:, None]
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": layout.position_ids, "layout": layout}

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        hidden = model.model(**inputs, use_cache=False)[0][0]
        (hidden.float().square() * signs).sum().backward()
        return {name: weight.grad.double() for name, weight in model.named_parameters() if "proj" in name}

    plain = gradients()
    stream_layers(model, 40)
    found = gradients()
    assert max(float((found[name] - one).norm() / one.norm()) for name, one in plain.items()) < 1e-3


def test_gradients_of_keys_are_summed_in_float32(tiny_model: TinyModel):
    """In bfloat16 and 35 slices, the streamed gradients are as near to float32 as those of the plain run."""
    exact = tiny_model(num_hidden_layers=2, seed=3).to(torch.bfloat16).float()
    half = copy.deepcopy(exact).to(torch.bfloat16)
    for model in (exact, half):
        set_attention(model, "torch_cpu")
    layout = packed_layout([700])
    _, expected = step(exact, layout)
    plain = error(step(half, layout)[1], expected)
    stream_layers(half, 20)
    assert error(step(half, layout)[1], expected) < 1.1 * plain


@pytest.mark.parametrize("backend", ["torch_cpu", "masked"])
def test_what_keys_of_several_slices_give_a_query_is_summed_before_it_is_rounded(
    tiny_model: TinyModel, backend: AttentionBackend
):
    """A query's gradient sums to zero over what all keys share: the parts of its slices are large."""
    exact = tiny_model(num_hidden_layers=1, seed=3, attention_bias=True)
    with torch.no_grad():
        exact.model.layers[0].self_attn.k_proj.bias.fill_(8.0)
    exact = exact.to(torch.bfloat16).float()
    half = copy.deepcopy(exact).to(torch.bfloat16)
    for model in (exact, half):
        set_attention(model, backend)
    layout = packed_layout([700])
    (_, expected), (_, plain) = step(exact, layout), step(half, layout)
    stream_layers(half, 20)
    _, streamed = step(half, layout)
    off = [float((one[QUERY].float() - expected[QUERY]).norm()) for one in (streamed, plain)]
    assert off[0] < 1.1 * off[1]


def test_what_was_dropped_in_a_slice_is_dropped_again(tiny_model: TinyModel):
    """The gradient is the slope of the loss under the same draws: central differences in float64."""
    model = with_adapter(tiny_model(), dropout=0.3).double()
    set_attention(model.get_base_model(), "torch_cpu")
    stream_layers(model, 19)
    layout = ROWS["packed"]
    _, gradients = step(model, layout)
    weights = {n: p for n, p in model.named_parameters() if n in gradients}
    torch.manual_seed(5)
    ways = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def moved(by: float) -> float:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.add_(ways[name], alpha=by)
        return step(model, layout)[0]

    above, below = moved(1e-4), moved(-2e-4)
    slope = sum(float((gradients[name] * way).sum()) for name, way in ways.items())
    assert (above - below) / 2e-4 == pytest.approx(slope, rel=3e-2)


def test_random_numbers_after_the_backward_pass_are_those_after_the_forward_pass(tiny_model: TinyModel):
    model = with_adapter(tiny_model(), dropout=0.3)
    set_attention(model.get_base_model(), "torch_cpu")
    stream_layers(model, 19)
    layout = ROWS["packed"]
    ids = torch.randint(0, 128, (1, layout.num_tokens))
    out = model(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False).logits
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("keep", [0, 2])
def test_inputs_of_streamed_layers_wait_on_the_host(
    tiny_model: TinyModel, make_settings: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, keep: int
):
    monkeypatch.setattr(activations_module, "Offloader", partial(Offloader, min_bytes=512))
    model = tiny_model(num_hidden_layers=3)
    set_attention(model, "torch_cpu")
    apply_checkpointing_and_offload(model, make_settings(checkpoint_every=0, slice_tokens=24))
    expected = step(model, ROWS["packed"])
    away = make_settings(checkpoint_every=0, slice_tokens=24, offload="boundaries", offload_keep=keep)
    offloader = apply_checkpointing_and_offload(model, away, LazyEngine()).offloader
    found = step(model, ROWS["packed"])
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    assert offloader is not None
    assert offloader.traffic.out_bytes == (3 - keep) * 4 * 127 * 64


def test_a_streamed_layers_input_has_left_when_the_next_layer_is_at_work(
    tiny_model: TinyModel, make_settings: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """Autograd packs what a custom function saves only when it is through: the copy starts before."""
    monkeypatch.setattr(activations_module, "Offloader", partial(Offloader, min_bytes=512))
    model = tiny_model(num_hidden_layers=4)
    set_attention(model, "torch_cpu")
    away = make_settings(checkpoint_every=0, slice_tokens=24, offload="boundaries")
    apply_checkpointing_and_offload(model, away)
    inputs: list[StorageWeakRef] = []
    there: list[list[int]] = []

    def note_input(layer: Any, given: tuple[Tensor, ...]) -> None:
        inputs.append(StorageWeakRef(given[0].untyped_storage()))

    def note_there(mlp: Any, given: tuple[Tensor, ...]) -> None:
        there.append([number for number, one in enumerate(inputs) if not one.expired()])

    for layer in model.model.layers:
        layer.register_forward_pre_hook(note_input)
    modules = [*(layer.mlp for layer in model.model.layers), model.lm_head]
    handles = [module.register_forward_pre_hook(note_there) for module in modules]
    layout = ROWS["packed"]
    ids = torch.randint(0, 128, (1, layout.num_tokens))
    out = model(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False).logits
    for handle in handles:
        handle.remove()
    # The model's own forward pass holds the embeddings, the first layer's input, to its end.
    assert {tuple(found) for found in there[:-1]} == {(0,), (0, 1), (0, 2), (0, 3)}
    assert there[-1] == [], "The loss stands beside no layer's input."
    out.sum().backward()


def test_hooks_of_a_weight_see_its_gradient_once(tiny_model: TinyModel):
    model = tiny_model()
    set_attention(model, "torch_cpu")
    _, expected = step(model, ROWS["packed"])
    seen: dict[str, list[Tensor]] = {}
    for name, weight in model.named_parameters():
        made = seen.setdefault(name, [])
        weight.register_post_accumulate_grad_hook(lambda w, made=made: made.append(w.grad.clone()))
    stream_layers(model, 24)
    step(model, ROWS["packed"])
    assert {len(made) for made in seen.values()} == {1}
    assert error({name: made[0] for name, made in seen.items()}, expected) < 1e-6


def test_micro_batches_add_up(tiny_model: TinyModel):
    model = tiny_model()
    set_attention(model, "torch_cpu")
    _, once = step(model, ROWS["packed"])
    stream_layers(model, 24)
    model.zero_grad()
    step(model, ROWS["packed"])
    zero_grad, model.zero_grad = model.zero_grad, lambda: None
    _, twice = step(model, ROWS["packed"])
    model.zero_grad = zero_grad
    assert error({name: gradient / 2 for name, gradient in twice.items()}, once) < 1e-6


def test_a_copy_of_a_model_streams_its_own_layers(tiny_model: TinyModel):
    model = tiny_model()
    set_attention(model, "torch_cpu")
    stream_layers(model, 24)
    other = copy.deepcopy(model)
    for weight in model.parameters():
        torch.nn.init.zeros_(weight)
    stream_layers(model, 0)
    _, gradients = step(other, ROWS["packed"])
    assert gradients["model.layers.0.mlp.up_proj.weight"].norm() > 0
    assert other.model.layers[0].forward.module is other.model.layers[0]


def test_a_tensor_that_is_not_known_to_be_cut_is_refused(tiny_llama: TinyModel):
    model = tiny_llama()
    set_attention(model, "torch_cpu")
    stream_layers(model, 24)
    layout = ROWS["packed"]
    ids = torch.zeros(1, layout.num_tokens, dtype=torch.int64)
    with pytest.raises(LaunchError, match="`per_token`, a tensor whose token dimension is unknown"):
        model(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False, per_token=ids)


def test_a_kernel_that_stands_in_a_norm_stays_there(tiny_llama: TinyModel):
    model = tiny_llama()
    norm = model.model.norm
    own = norm.forward
    norm.forward = lambda x: 2 * own(x)
    set_attention(model, "torch_cpu")
    loss, gradients = step(model, ROWS["packed"])
    stream_layers(model, 24)
    found, streamed = step(model, ROWS["packed"])
    assert found == pytest.approx(loss, rel=1e-6)
    assert error(streamed, gradients) < TOLERANCE[torch.float32]
    stream_layers(model, 0)
    assert step(model, ROWS["packed"])[0] == loss


def test_layers_that_mix_tokens_outside_attention_are_found_at_the_start(tiny_llama: TinyModel):
    model = tiny_llama()
    set_attention(model, "torch_cpu")
    stream_layers(model, 4096)
    assert verify_streamed(model, AttentionBackend.TORCH_CPU) < 1e-5
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) + 0.1 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    with pytest.raises(LaunchError, match="layers in slices differ from whole layers"):
        verify_streamed(model, AttentionBackend.TORCH_CPU)
