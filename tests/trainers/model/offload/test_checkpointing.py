"""Activation checkpointing: which layers, what stays after a pause, dropout, adapters, and noise."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.errors import LaunchError
from memtrain.recipes.sections.model import Adapter
from memtrain.trainers.model.attention import set_attention
from memtrain.trainers.model.attention.row_layout import shared_layout
from memtrain.trainers.model.loading.adapters import add_adapter
from memtrain.trainers.model.loading.neftune import add_noise, shared_row_lengths
from memtrain.trainers.model.offload import activations
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers, draws_numbers, recompute

TinyModel = Callable[..., Any]
IDS = torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(0))


def gradients(model: Any, seed: int = 0) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def counting(calls: list[int]) -> Callable[..., Any]:
    def run(layer: Any, *inputs: Any) -> Any:
        calls.append(1)
        return recompute(layer, *inputs)

    return run


@pytest.mark.parametrize(("every", "expected"), [(1, 4), (2, 2), (3, 2), (9, 1)])
def test_every_nth_layer_is_checkpointed(tiny_model: TinyModel, every: int, expected: int):
    model = tiny_model(num_hidden_layers=4).train()
    plain = gradients(model)
    calls: list[int] = []
    chosen = checkpoint_layers(model, every, counting(calls))
    assert len(chosen.layers) == expected
    assert_same(plain, gradients(model))
    assert len(calls) == expected


def test_a_pause_forgets_neither_the_layers_nor_how_they_run(tiny_model: TinyModel):
    """Defect C1 of TRL 1.16: on again after a reference pass, without `every_n_layers` and the offloader."""
    model = tiny_model(num_hidden_layers=4).train()
    calls: list[int] = []
    chosen = checkpoint_layers(model, 2, counting(calls))
    with chosen.paused(), torch.no_grad():
        model(input_ids=IDS)
    assert calls == []
    gradients(model)
    assert len(calls) == 2


def test_a_pause_that_fails_ends_all_the_same(tiny_model: TinyModel):
    chosen = checkpoint_layers(tiny_model(), 1)
    with pytest.raises(KeyError), chosen.paused():
        raise KeyError
    assert all(layer.gradient_checkpointing for layer in chosen.layers)


def test_generation_in_a_pause_keeps_its_cache(tiny_model: TinyModel):
    model = tiny_model().train()
    chosen = checkpoint_layers(model, 1)
    with chosen.paused(), torch.no_grad():
        cache = model(input_ids=IDS, use_cache=True).past_key_values
    assert cache.get_seq_length() == IDS.shape[1]


def test_evaluation_is_not_checkpointed(tiny_model: TinyModel):
    model = tiny_model().eval()
    calls: list[int] = []
    checkpoint_layers(model, 1, counting(calls))
    gradients(model)
    assert calls == []


def test_dropout_drops_the_same_numbers_twice(tiny_model: TinyModel):
    model = tiny_model(attention_dropout=0.3, attention="eager").train()
    plain = gradients(model)
    assert not all(torch.equal(plain[n], g) for n, g in gradients(model, seed=1).items())
    checkpoint_layers(model, 1)
    assert_same(plain, gradients(model))


def test_an_adapter_learns_the_same_under_checkpointing(tiny_model: TinyModel):
    """Nothing that enters the first layer needs a gradient: the frozen embedding.

    Defect C2 of TRL 1.16: what adapters need of checkpointing had a name that nothing reads. On weights in
    shards: test_fsdp2.py and test_zero.py of tests/runs.
    """
    torch.manual_seed(0)
    model = add_adapter(tiny_model(), Adapter(r=4, dropout=0.2))
    plain = gradients(model)
    assert any("layers.0" in name for name in plain)
    checkpoint_layers(model, 1)
    assert_same(plain, gradients(model))


def test_layers_that_cannot_be_checkpointed_are_said():
    with pytest.raises(LaunchError, match="layers of Linear cannot be checkpointed"):
        checkpoint_layers(nn.Linear(1, 1), 1)


def test_noise_is_bounded_by_the_row_and_only_in_training(tiny_model: TinyModel):
    """Two rows of 4 and 8 tokens laid end to end: bounds 5 / sqrt(4 * 64) and 5 / sqrt(8 * 64)."""
    model = tiny_model()
    seen: list[Tensor] = []
    model.get_input_embeddings().weight.data.zero_()
    remove = add_noise(model, 5.0)
    model.get_input_embeddings().register_forward_hook(lambda m, a, out: seen.append(out.detach()))
    positions = torch.cat([torch.arange(4), torch.arange(8)])[None]
    model.train().get_decoder()(input_ids=IDS[:1], position_ids=positions)
    model.eval()(input_ids=IDS[:1], position_ids=positions)
    remove()
    model.train()(input_ids=IDS[:1], position_ids=positions)
    noise_TD = seen[0][0].abs()
    for part_TD, length in ((noise_TD[:4], 4), (noise_TD[4:], 8)):
        bound = 5 / math.sqrt(length * 64)
        assert 0.95 * bound < part_TD.max() <= bound * (1 + 1e-6)
    assert not seen[1].any()
    assert not seen[2].any()


def test_noise_under_shared_prompts_follows_each_row(tiny_model: TinyModel):
    """A prompt of 4 with completions of 2 and 8: rows of 6 and 12, each completion's noise by its own.

    The prompt's tokens are drawn once for both: the mean of 1 / 6 and 1 / 12 is 1 / 8.
    """
    layout = shared_layout([(4, [2, 8]), (3, [5])])
    expected = [8.0] * 4 + [8.0] * 3 + [6.0] * 2 + [12.0] * 8 + [8.0] * 5
    assert shared_row_lengths(layout, "cpu")[0].tolist() == pytest.approx(expected)
    model = tiny_model()
    seen: list[Tensor] = []
    model.get_input_embeddings().weight.data.zero_()
    add_noise(model, 5.0)
    model.get_input_embeddings().register_forward_hook(lambda m, a, out: seen.append(out.detach()))
    set_attention(model, "torch_cpu")
    ids = torch.randint(100, (1, layout.num_tokens))
    model.train().get_decoder()(input_ids=ids, position_ids=layout.position_ids, layout=layout)
    for place, length in ((slice(7, 9), 6), (slice(9, 17), 12)):
        bound = 5 / math.sqrt(length * 64)
        assert 0.9 * bound < seen[0][0, place].abs().max() <= bound * (1 + 1e-6)


@pytest.mark.parametrize(
    ("config", "draws"),
    [({}, False), ({"attention_dropout": 0.1}, True), ({"router_jitter_noise": 0.1}, True)],
)
def test_the_random_state_is_kept_only_where_numbers_are_drawn(tiny_llama, config, draws):
    model = tiny_llama(**config).train()
    assert draws_numbers(model) == draws
    layer = checkpoint_layers(model, 1).layers[0]
    assert (layer._gradient_checkpointing_func is recompute) == draws


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_layers_are_computed_again_as_compiled_ones(
    tiny_llama: TinyModel, make_settings: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, compiled: bool
):
    """torch's own checkpoint would compute them again uncompiled, to other roundings."""

    def again(layer: Callable[..., Any], *inputs: Any) -> Any:
        return layer(*inputs)

    monkeypatch.setattr(activations, "recompute_compiled", lambda: again)
    settings = make_settings(checkpoint_every=1, compiled=compiled)
    treated = activations.apply_checkpointing_and_offload(tiny_llama(), settings).checkpointing
    assert treated is not None
    ways = {layer._gradient_checkpointing_func is again for layer in treated.layers}
    assert ways == {compiled}
