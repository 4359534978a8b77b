"""The two sides of a comparison: a plan made repeatable, and the same steps without any memory strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.context_parallel import held_by
from memtrain.memory.rules.precision import WITHOUT_COPIES
from memtrain.memory.strategies.registry import without_strategies
from memtrain.trainers.build.components import Built, build
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.protocols.feed import StepWork
from memtrain.trainers.runtime.seed import torch_generator

LONGEST_EAGER = 1024
"""Tokens up to which the plain side attends by transformers' eager form, the furthest from our kernels;
above, its scores of row length squared would not fit, and torch's SDPA on padded rows stands for it."""

STIR_SHARE = 0.1
STIR_ZEROS = 0.02
"""Distance by which weights are moved from their start, over their own size; zeros by so much. At the start a
policy is its reference and an adapter adds nothing: terms vanish that should be compared. Taste."""


def on_one_process(plan: Plan, *, steps: int) -> Plan:
    """The share of one process of a plan, for its first `steps` steps."""
    settings = plan.settings
    count = settings.num_processes
    share: dict[str, Any] = {"num_processes": 1, "max_steps": steps, "engine": "ddp"}
    share |= {"shard_offload": "none", "checkpoint_layout": "full"} | held_by(1)
    if settings.batch_size is not None:
        share["batch_size"] = max(1, settings.batch_size // count)
    if settings.batch_tokens is not None:
        share["batch_tokens"] = max(1, settings.batch_tokens // count)
    known = {name: value for name, value in share.items() if name in Settings.model_fields}
    return plan.model_copy(update={"settings": settings.model_copy(update=known)})


def deterministic(plan: Plan) -> Plan:
    """The plan without random draws that follow the layout of the rows: dropout and embedding noise."""
    recipe, settings = plan.recipe, plan.settings
    optim = recipe.optim.model_copy(update={"neftune_alpha": None})
    evaluation = recipe.eval.model_copy(update={"max_rows": 2})
    model, adapter = recipe.model, settings.adapter
    if adapter is not None:
        adapter = adapter.model_copy(update={"dropout": 0.0})
        model = model.model_copy(update={"adapter": adapter})
    return plan.model_copy(
        update={
            "recipe": recipe.model_copy(update={"optim": optim, "eval": evaluation, "model": model}),
            "settings": settings.model_copy(update={"adapter": adapter}),
        }
    )


def baseline_plan(plan: Plan) -> Plan:
    """The same steps on the same pieces of rows: padded, every activation kept, logits whole, own attention.

    Pieces of packed rows stay in one micro-batch, a padded row each. The reference model is a copy of its
    own, asked in every step. The optimizer is the recipe's.
    """
    settings = plan.settings
    plain = without_strategies(settings, but=("sequences",))
    return plan.model_copy(update={"settings": plain})


def in_float32(plan: Plan) -> Plan:
    """The same in float32, the base of the measure of rounding."""
    wide = {"dtype": "float32", **WITHOUT_COPIES}
    return plan.model_copy(update={"settings": plan.settings.model_copy(update=wide)})


def built_side(plan: Plan, *, is_plain: bool) -> Built:
    """A side with its weights moved from their start, and nothing dropped. The same weights on every side."""
    built = build(plan)
    for module in models_of(built):
        _drop_nothing(module)
    perturb(built)
    longest = plan.settings.max_length or LONGEST_EAGER + 1
    if is_plain and longest <= LONGEST_EAGER:
        for module in models_of(built):
            base: Any = base_model(module)
            if base._can_set_attn_implementation():
                base.set_attn_implementation("eager")
    return built


def models_of(built: Built) -> Iterator[nn.Module]:
    """The model of a side, and that of its reference where it holds one."""
    yield built.model
    if built.reference is not None:
        reference: Any = built.reference
        yield reference.model


def perturb(built: Built) -> None:
    """Move every trained weight by a draw of its name, in float32: the same for every layout and dtype."""
    with torch.no_grad():
        for name, parameter in built.trained.items():
            size = float(parameter.float().square().mean().sqrt()) * STIR_SHARE or STIR_ZEROS
            noise = torch.randn(parameter.shape, generator=torch_generator(0, "stir", name))
            parameter.add_((size * noise).to(parameter.device, parameter.dtype))
    if isinstance(built.optimizer, MasterWeights):
        built.optimizer.follow()


def same_pieces(planned: Built, plain: Built) -> None:
    """Let the plain side lay out the very pieces of rows of the planned one, by the same numbers."""
    for mine, theirs in ((plain.train, planned.train), (plain.eval, planned.eval)):
        if mine is not None and hasattr(mine, "sequences"):
            vars(mine)["sequences"] = vars(theirs)["sequences"]


def whole_step(work: StepWork, *, num_micro_batches: int) -> StepWork:
    """The same sequences in the same order in one micro-batch, or in `num_micros` of them."""
    order = torch.cat([torch.from_numpy(one) for one in work.micro_batches]).numpy()
    cuts = torch.arange(len(order)).tensor_split(num_micro_batches)
    micro_batches = tuple(order[cut.numpy()] for cut in cuts if len(cut))
    return StepWork(
        step=work.step,
        epoch=work.epoch,
        is_last_of_epoch=work.is_last_of_epoch,
        sequences=work.sequences,
        micro_batches=micro_batches,
        denominator=work.denominator,
        num_tokens=work.num_tokens,
        num_sequences=work.num_sequences,
        num_loss_tokens=work.num_loss_tokens,
        passes=work.passes,
        of_epoch=work.of_epoch,
    )


def whole_state(built: Built) -> list[dict[str, Tensor]]:
    """The weights of a side's models, on the host."""
    return [
        {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        for model in models_of(built)
    ]


def take_state(built: Built, states: list[dict[str, Tensor]]) -> None:
    """Give a side's models the weights of another, in their own dtype."""
    for model, state in zip(models_of(built), states, strict=True):
        model.load_state_dict(state)


def _drop_nothing(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if "attention_dropout" in vars(module):
            vars(module)["attention_dropout"] = 0.0
