"""The scorer against the model's own logits: gradients of every parameter, adapters, ties, logit rules."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import AttentionBackend
from memtrain.trainers.losses.head.request import LogprobRequest, NllRequest
from memtrain.trainers.model.attention.functions import set_attention
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.heads.backbone import base_model, head_of
from memtrain.trainers.model.heads.build import configure_loss, scorer_of
from memtrain.trainers.model.heads.lm_head import Scorer, head_form, verify_head

VOCAB = 128
IDS = torch.randint(1, VOCAB, (2, 17), generator=torch.Generator().manual_seed(7))
# Row 1 is padded after 11 tokens; every other token of row 0 is scored.
INDEX = torch.cat([torch.arange(0, 16, 2), 17 + torch.arange(0, 10)])
TARGETS = IDS.flatten()[INDEX + 1]
WEIGHTS = torch.rand(len(INDEX), generator=torch.Generator().manual_seed(8))


def plain_logp(model: nn.Module) -> torch.Tensor:
    logits = model(input_ids=IDS, use_cache=False).logits.flatten(0, 1)[INDEX]
    return logits.log_softmax(-1).gather(1, TARGETS[:, None])[:, 0]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_scorer_equals_plain(model: nn.Module) -> None:
    """Loss and every gradient, by weighted NLL and by log-probs, in tiles of 7 tokens and at once."""
    (-(plain_logp(model) * WEIGHTS).sum()).backward()
    expected = gradients(model)
    assert expected
    for is_chunked in (True, False):
        scorer = Scorer(model, is_chunked=is_chunked, tile_bytes=7 * VOCAB * 4)
        for kind in ("nll", "logp"):
            model.zero_grad()
            if kind == "nll":
                loss = scorer({"input_ids": IDS}, INDEX, NllRequest(TARGETS, WEIGHTS)).loss
            else:
                logp = scorer({"input_ids": IDS}, INDEX, LogprobRequest(TARGETS)).logp_N
                loss = -(logp * WEIGHTS).sum()
            loss.backward()
            torch.testing.assert_close(loss, -(plain_logp(model) * WEIGHTS).sum(), rtol=2e-6, atol=1e-5)
            got = gradients(model)
            assert got.keys() == expected.keys()
            for name, grad in expected.items():
                torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=2e-6 * float(WEIGHTS.sum()))


def with_adapters(model: nn.Module, **config: object) -> nn.Module:
    peft = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM", **config))
    torch.manual_seed(3)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return peft


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_scorer_equals_the_models_own_logits(tiny_model, tie):
    assert_scorer_equals_plain(tiny_model(tie_word_embeddings=tie))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_adapter_on_the_head_is_one_more_pair(tiny_llama, use_rslora):
    model = with_adapters(tiny_llama(), target_modules=["q_proj", "lm_head"], use_rslora=use_rslora)
    assert_scorer_equals_plain(model)


def test_two_active_adapters_on_the_head_add_up(tiny_llama):
    model = with_adapters(tiny_llama(), target_modules=["lm_head"])
    model.add_adapter("second", LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    assert_scorer_equals_plain(model)


def test_an_adapter_on_the_head_holds_no_hidden_states_after_its_answer(tiny_llama):
    """A function that called itself held them until the collector came, over several steps."""
    scorer = Scorer(with_adapters(tiny_llama(), target_modules=["lm_head"]))
    hidden_ND = torch.randn(len(TARGETS), scorer.model.config.hidden_size)
    alive = weakref.ref(hidden_ND)
    gc.disable()
    try:
        with torch.no_grad():
            scorer.answered(hidden_ND, LogprobRequest(TARGETS))
        del hidden_ND
        assert alive() is None
    finally:
        gc.enable()


def test_adapters_below_the_head_only(tiny_qwen3):
    assert_scorer_equals_plain(with_adapters(tiny_qwen3(), target_modules=["q_proj", "v_proj"]))


def test_head_among_modules_to_save(tiny_llama):
    model = with_adapters(tiny_llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert_scorer_equals_plain(model)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["lora", "saved"],
)
def test_switched_off_adapters_give_the_base_model(tiny_llama, config):
    """The reference log-probs of DPO: the same scorer with adapters off equals the untouched model."""
    base = plain_logp(tiny_llama()).detach()
    model = with_adapters(tiny_llama(), **config)
    if "modules_to_save" in config:
        nn.init.normal_(model.base_model.model.lm_head.modules_to_save["default"].weight)
    scorer = Scorer(model)
    with torch.no_grad(), model.disable_adapter():
        logp = scorer({"input_ids": IDS}, INDEX, LogprobRequest(TARGETS)).logp_N
    torch.testing.assert_close(logp, base, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert (scorer({"input_ids": IDS}, INDEX, LogprobRequest(TARGETS)).logp_N - base).abs().max() > 1e-3


def test_bias_softcap_and_scale_are_read_from_the_model():
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
        PhiConfig,
        PhiForCausalLM,
    )

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    made = {
        "softcap": Gemma2ForCausalLM(Gemma2Config(**shape, head_dim=16, final_logit_softcapping=2.0)),
        "divides": GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=4.0)),
        "multiplies": CohereForCausalLM(CohereConfig(**shape, logit_scale=0.3)),
        "bias": PhiForCausalLM(PhiConfig(**shape)),
    }
    nn.init.normal_(made["bias"].lm_head.bias)
    assert head_form(made["softcap"].config)[2:4] == (2.0, 1.0)
    assert head_form(made["divides"].config)[2:4] == (None, 0.25)
    assert head_form(made["multiplies"].config)[2:4] == (None, 0.3)
    for model in made.values():
        verify_head(Scorer(model))
        assert_scorer_equals_plain(model.eval())


def test_no_scored_position_still_reaches_every_parameter(tiny_llama):
    """A rank whose micro-batch teaches nothing takes part in every reduction, with zeros."""
    model = tiny_llama()
    nothing = torch.zeros(0, dtype=torch.long)
    loss = Scorer(model)({"input_ids": IDS}, nothing, NllRequest(nothing, torch.zeros(0))).loss
    loss.backward()
    assert loss.item() == 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any()


def test_the_head_runs_inside_its_own_call(tiny_llama):
    """Hooks on every module that owns a weight of the head see the loss computed before they end."""
    model = with_adapters(tiny_llama(), target_modules=["lm_head"])
    scorer = Scorer(model)
    head = head_of(base_model(model))
    open_calls: list[str] = []
    seen: list[set[str]] = []
    for name, module in {"head": head, "base": head.base_layer, "up": head.lora_B["default"]}.items():
        module.register_forward_pre_hook(lambda *_, name=name: open_calls.append(name))
        module.register_forward_hook(lambda *_, name=name: open_calls.remove(name))

    class Spy(LogprobRequest):
        def answer(self, *operands):
            seen.append(set(open_calls))
            return super().answer(*operands)

    scorer({"input_ids": IDS}, INDEX, Spy(TARGETS))
    assert seen == [{"head", "base", "up"}]
    assert not open_calls


def test_generation_and_plain_calls_are_left_alone(tiny_llama):
    model = tiny_llama()
    before = model(input_ids=IDS, use_cache=False).logits
    Scorer(model)
    Scorer(model)
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.lm_head.weight)
    assert not copied(input_ids=IDS, use_cache=False).logits.any()
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, before)


def test_unknown_change_of_logits_is_refused_by_name(tiny_llama):
    class Odd(type(tiny_llama())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.5
            return out

    model = tiny_llama()
    model.__class__ = Odd
    with pytest.raises(LaunchError, match="Odd"):
        verify_head(Scorer(model))


def test_verify_head_accepts_half_precision(tiny_qwen3):
    verify_head(Scorer(tiny_qwen3().to(torch.bfloat16)))


def test_packed_rows_score_as_rows_alone(tiny_model):
    """Three rows end to end, on packed attention, give the loss and gradients of the three apart."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (9, 5, 14)]
    alone, packed = Scorer(tiny_model()), Scorer(tiny_model())
    for row in rows:
        request = NllRequest(row[1:], torch.ones(len(row) - 1))
        alone({"input_ids": row[None]}, torch.arange(len(row) - 1), request).loss.backward()
    set_attention(packed.model, AttentionBackend.TORCH_CPU)
    verify_head(packed)
    layout, ids = packed_layout([len(row) for row in rows]), torch.cat(rows)
    request = NllRequest(ids[layout.predicted_rows], torch.ones(len(layout.predicted_rows)))
    inputs = {"input_ids": ids[None], "position_ids": layout.position_ids, "layout": layout}
    packed(inputs, layout.predicting_rows, request).loss.backward()
    for name, expected in gradients(alone).items():
        torch.testing.assert_close(gradients(packed)[name], expected, rtol=1e-4, atol=2e-5)


def test_variants_of_lora_on_the_head_are_refused(tiny_llama):
    model = with_adapters(tiny_llama(), target_modules=["lm_head"], use_dora=True)
    with pytest.raises(LaunchError, match="not plain LoRA"):
        Scorer(model)


def test_autocast_scores_in_fp32(tiny_llama):
    """bf16 products, fp32 log-probs and fp32 gradients; within bf16 rounding of the fp32 model."""
    model = tiny_llama()
    scorer = Scorer(model)
    expected = plain_logp(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logp = scorer({"input_ids": IDS}, INDEX, LogprobRequest(TARGETS)).logp_N
    logp.sum().backward()
    assert logp.dtype == torch.float32
    assert model.lm_head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(logp, expected, rtol=0, atol=5e-2)


def test_every_form_of_the_settings_reaches_the_rule(
    tiny_model: Callable[..., Any], make_settings: Callable[..., Settings]
):
    settings = make_settings(loss="chunked", loss_kernel="triton", loss_tile_bytes=4096)
    scorer: Any = scorer_of(tiny_model(num_hidden_layers=1), "lm", settings)
    assert (scorer.form.is_chunked, scorer.form.is_liger) == (True, False)
    rule = scorer.form.rule(0.5)
    assert (rule.tile_bytes, rule.kernel, rule.temperature) == (4096, "triton", 0.5)
    configure_loss(scorer, settings.model_copy(update={"loss": "full", "loss_kernel": "torch"}))
    assert (scorer.form.is_chunked, scorer.form.kernel) == (False, "torch")
