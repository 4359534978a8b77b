"""The load-balance loss of routers: that of a derivation of its own, however a step is cut and laid out."""

# E experts, T tokens of all rows

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.build.balanced import AUX_LOSS, micro_batch_of
from memtrain.trainers.build.bare_steps import Stepper
from memtrain.trainers.build.components import build
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts, online_source

SIZE = "hidden_size: 32, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8"
MODELS = {
    "mixtral": "intermediate_size: 24, num_local_experts: 4, num_experts_per_tok: 2",
    "qwen3_moe": "intermediate_size: 24, moe_intermediate_size: 16, num_experts: 6, num_experts_per_tok: 3,"
    " mlp_only_layers: [1]",
    "qwen2_moe": "intermediate_size: 24, moe_intermediate_size: 16, shared_expert_intermediate_size: 16,"
    " num_experts: 4, num_experts_per_tok: 2",
    "olmoe": "intermediate_size: 16, num_experts: 4, num_experts_per_tok: 2",
}
WEIGHT = 0.5
PADDED = ("length.padding_free=false", "train.micro_batch_size=6")
"""The step in one micro-batch of padded rows."""


@pytest.fixture(scope="module")
def plan_of_experts(plan_of: Callable[..., Plan]) -> Callable[..., Plan]:
    """Factory of plans of tiny mixtures: `plan_of_experts("sft", "mixtral", 0.5)`."""

    def make(method: str, kind: str, weight: float, *overrides: str) -> Plan:
        config = f"model.config={{model_type: {kind}, {SIZE}, {MODELS[kind]}, tie_word_embeddings: false}}"
        return plan_of(method, config, f"train.router_aux_loss_coef={weight}", *overrides)

    return make


def stepped(
    plan: Plan, rollouts: Rollouts | None = None
) -> tuple[Stepper, dict[str, Tensor], dict[str, Tensor]]:
    """(who made it, gradients, sums) of the first step; an online method learns from fixed `rollouts`."""
    built = build(plan)
    stepper = Stepper(plan, built, online_source(plan, built, rollouts or Rollouts()))
    sums = stepper.gradients(stepper.work(0), want_stats=True)
    named = dict(stepper.built.model.named_parameters())
    return stepper, {name: p.grad.clone() for name, p in named.items() if p.grad is not None}, sums


def derived(stepper: Stepper) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(loss, its gradients, the loss of transformers' function) of a step's padded rows, in float64.

    Expert by expert, from the logits that transformers records:
    E * sum_e (share of tokens sent to e) * (mean probability of e).
    """
    micro_batch = micro_batch_of(stepper.steps.feed.micro_batch(stepper.work(0).sequences))
    model: Any = copy.deepcopy(base_model(stepper.built.model)).double().eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    for module in model.modules():
        module._forward_hooks.clear()
    is_token = torch.cat([torch.full((count,), bool(rows)) for count, rows in micro_batch.runs_R2.tolist()])
    mask_BT = is_token.view_as(micro_batch.input_ids).long()
    out = model.model(input_ids=micro_batch.input_ids, attention_mask=mask_BT, output_router_logits=True)
    config = model.config
    num_experts, num_chosen = out.router_logits[0].shape[-1], config.num_experts_per_tok
    logits_TE = torch.cat([layer[is_token] for layer in out.router_logits])
    sent, chances = [0] * num_experts, [logits_TE.new_zeros(()) for _ in range(num_experts)]
    for token_E in logits_TE:
        chance_E = token_E.exp() / token_E.exp().sum()
        order = sorted(range(num_experts), key=lambda one: -float(chance_E[one]))
        for expert in range(num_experts):
            sent[expert] += expert in order[:num_chosen]
            chances[expert] = chances[expert] + chance_E[expert]
    count = len(logits_TE)
    loss = sum((sent[e] / count) * (chances[e] / count) for e in range(num_experts)) * num_experts
    assert isinstance(loss, Tensor)
    theirs = load_balancing_loss_func(out.router_logits, num_experts, num_chosen, mask_BT)
    assert isinstance(theirs, Tensor)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, theirs.detach()


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], limit: float) -> None:
    size = torch.stack([one.double().norm() for one in wanted.values()]).norm()
    for name, one in wanted.items():
        assert (found[name].double() - one.double()).norm() < limit * size, name


@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_gradients_are_those_of_a_float64_derivation(plan_of_experts: Any, kind: str):
    """What the weight adds to the gradients of a padded step, and the value in its sums."""
    stepper, evened, sums = stepped(plan_of_experts("sft", kind, WEIGHT, *PADDED))
    _, plain, _ = stepped(plan_of_experts("sft", kind, 0, *PADDED))
    loss, gradients, theirs = derived(stepper)
    assert float(sums[AUX_LOSS] / stepper.work(0).denominator) == pytest.approx(float(loss), rel=1e-6)
    assert float(theirs) == pytest.approx(float(loss), rel=1e-6)
    assert loss > 1
    added = {name: evened[name].double() - plain[name].double() for name in gradients}
    assert_close(added, {name: WEIGHT * one for name, one in gradients.items()}, 1e-4)


LAYOUTS = {
    "rows one by one": ("length.padding_free=false", "train.micro_batch_size=1"),
    "rows two by two": ("length.padding_free=false", "train.micro_batch_size=2"),
    "rows end to end": ("length.padding_free=true", "train.micro_batch_size=6"),
    "end to end, padded to 32": ("length.padding_free=true", "length.pad_to_multiple_of=32"),
    "end to end, four at once": ("length.padding_free=true", "train.micro_batch_size=4"),
    "checkpointed": (*PADDED, "memory.activation_checkpointing=on"),
    "offloaded": (*PADDED, "memory.use=[full_offloading]"),
    "an adapter": (*PADDED, "model.adapter={r: 4, target_modules: [q_proj, v_proj]}"),
    "an adapter, split": (
        "length.padding_free=true",
        "train.micro_batch_size=2",
        "model.adapter={r: 4, target_modules: [q_proj, v_proj]}",
    ),
}


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_of_a_step_changes_it(plan_of_experts: Any, kind: str, layout: str):
    said = LAYOUTS[layout]
    adapter = tuple(one for one in said if "adapter" in one)
    _, wanted, sums = stepped(plan_of_experts("sft", kind, WEIGHT, *PADDED, *adapter))
    _, found, others = stepped(plan_of_experts("sft", kind, WEIGHT, *said))
    assert float(others[AUX_LOSS]) == pytest.approx(float(sums[AUX_LOSS]), rel=1e-6)
    assert_close(found, wanted, 2e-6)


@pytest.mark.parametrize("method", ["dpo", "kto", "reward"])
def test_a_shared_prompt_counts_for_each_of_its_answers(plan_of_experts: Any, method: str):
    """Prompts once, in micro-batches of two, against every answer in a padded row with its prompt."""
    apart = ("length.shared_prompts=false", *PADDED)
    shared = ("length.shared_prompts=true", "length.padding_free=true", "train.micro_batch_size=2")
    _, wanted, sums = stepped(plan_of_experts(method, "mixtral", WEIGHT, *apart))
    _, found, others = stepped(plan_of_experts(method, "mixtral", WEIGHT, *shared))
    assert float(others[AUX_LOSS]) == pytest.approx(float(sums[AUX_LOSS]), rel=1e-6)
    assert_close(found, wanted, 5e-6)


def test_an_engine_that_scales_the_loss_scales_what_is_beside_it(plan_of_experts: Any):
    """As the scaler of float16 does, and DeepSpeed, which averages over ranks what is to be summed."""
    plan = plan_of_experts("sft", "mixtral", WEIGHT, *PADDED)
    _, wanted, _ = stepped(plan)
    stepper = Stepper(plan, build(plan))
    engine = replace(stepper.training.engine, backward=lambda loss: (1024 * loss).backward())
    stepper.training = replace(stepper.training, engine=engine)
    stepper.gradients(stepper.work(0))
    named = stepper.built.model.named_parameters()
    found = {name: p.grad / 1024 for name, p in named if p.grad is not None}
    assert_close(found, wanted, 1e-6)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_answers_of_a_rollout_are_counted_as_rows_are(plan_of_experts: Any, method: str):
    """What the weight adds is derived of every answer in a padded row with its prompt; prompts once,
    in micro-batches of two, add the same."""
    rollouts = Rollouts()
    apart = ("length.shared_prompts=false", *PADDED)
    shared = ("length.shared_prompts=true", "length.padding_free=true", "train.micro_batch_size=2")
    stepper, evened, sums = stepped(plan_of_experts(method, "mixtral", WEIGHT, *apart), rollouts)
    _, plain, _ = stepped(plan_of_experts(method, "mixtral", 0, *apart), rollouts)
    loss, gradients, theirs = derived(stepper)
    assert float(sums[AUX_LOSS] / stepper.work(0).denominator) == pytest.approx(float(loss), rel=1e-6)
    assert float(theirs) == pytest.approx(float(loss), rel=1e-6)
    added = {name: evened[name].double() - plain[name].double() for name in gradients}
    assert_close(added, {name: WEIGHT * one for name, one in gradients.items()}, 1e-4)
    _, found, others = stepped(plan_of_experts(method, "mixtral", WEIGHT, *shared), rollouts)
    assert float(others[AUX_LOSS]) == pytest.approx(float(sums[AUX_LOSS]), rel=1e-6)
    assert_close(found, evened, 5e-6)


def test_an_evened_step_is_verified(plan_of_experts: Any):
    """`verify` compares steps of the whole run, the load-balance loss among its sums."""
    from memtrain.trainers.tools.verify.verify import verify

    plan = plan_of_experts("sft", "mixtral", WEIGHT, "train.micro_batch_size=2")
    found = verify(plan)
    assert found.is_exact, [check.says for check in found.checks if check.outcome == "fail"]
