"""FSDP2: every weight in shards over the ranks, gathered a layer at a time while it computes.

torch's `fully_shard` on the scorer itself, without accelerate's plugin: that one takes CPU processes for
plain data parallel and says nothing. Gradients are summed, not averaged: losses are divided by what the whole
step counts already.

Every pass through the model is a collective: all ranks must make as many passes, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.heads.value_head import ValueScorer
from memtrain.trainers.model.quantized.packed import shardable
from memtrain.trainers.optim.step import HALF, DistributedStep, set_wide
from memtrain.trainers.runtime.weight_layout import full_of, local_of, waits_on_host


def shard(scorer: nn.Module, settings: Settings) -> None:
    """Lay the weights of `scorer` over the ranks, in place; each rank keeps rows of every weight.

    A group is gathered at once: each layer, the embedding, the head, and what is left of the backbone. A head
    that is tied to the embedding is in the backbone's group, which then stays whole until the backward pass
    is through. Gradients of half-precision weights are summed in float32.

    Source: Zhao et al. 2023 (FSDP), arXiv:2304.11277, section 4; grouping as in torchtitan.

    Raises: LaunchError when a group trains weights of several precisions.
    """
    shardable(scorer)
    mesh = init_device_mesh(settings.device, (settings.num_processes,))
    for base in models_of(scorer):
        for group in _groups(base):
            _check_precision(group)
            _shard_group(group, mesh, settings)
    _shard_group([scorer], mesh, settings)
    assert isinstance(scorer, FSDPModule), "fully_shard makes it one."
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # Gloo sums, and divides nothing; so does NCCL then, in the same order.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    scorer.register_forward_pre_hook(_begin_groups_anew, prepend=True)


def _begin_groups_anew(scorer: nn.Module, inputs: object) -> None:
    """Let a pass gather every group.

    Until torch 2.12 a group of several modules is gathered when its first module runs, and not again before
    all of them ran. A head that is tied to the embedding never does: its weight alone is read.
    """
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            cast(Any, module)._get_fsdp_state()._modules_to_run_forward.clear()


def models_of(scorer: nn.Module) -> list[PreTrainedModel]:
    """The models that a scorer holds: its own, and a value model beside it."""
    own = scorer.own if isinstance(scorer, ValueScorer) else None
    return [base_model(model) for model in (cast(Any, scorer).model, own) if model is not None]


def _groups(base: PreTrainedModel) -> Iterator[list[nn.Module]]:
    """Modules gathered together, inner modules before their owners."""
    backbone, embedding = base.get_decoder(), base.get_input_embeddings()
    heads = [
        head for head in (base.get_output_embeddings(), getattr(base, "score", None)) if head is not None
    ]
    for module in base.modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield [module]
    own = set(embedding.parameters())
    if any(parameter in own for head in heads for parameter in head.parameters()):
        yield [backbone, *heads]
        return
    yield [embedding]
    yield from ([head] for head in heads)
    yield [backbone]


def _shard_group(group: list[nn.Module], mesh: DeviceMesh, settings: Settings) -> None:
    is_half = any(p.dtype in HALF for module in group for p in module.parameters() if p.requires_grad)
    offload = OffloadPolicy()
    if settings.shard_offload == "parameters":
        offload = CPUOffloadPolicy(pin_memory=settings.device == "cuda")
    # The loss leaves the scorer in float32 whatever the weights are: no output_dtype.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_half else None, cast_forward_inputs=False)
    fully_shard(
        group if len(group) > 1 else group[0],
        mesh=mesh,
        reshard_after_forward=True,
        mp_policy=policy,
        offload_policy=offload,
    )


def _check_precision(group: list[nn.Module]) -> None:
    fresh = {p for module in group for p in module.parameters() if not isinstance(p, DTensor)}
    dtypes = {str(p.dtype).removeprefix("torch.") for p in fresh if p.requires_grad}
    if len(dtypes) > 1:
        raise LaunchError(
            f"{type(group[0]).__name__} trains weights in {' and '.join(sorted(dtypes))}, and FSDP2 sums the "
            "gradients of a group in one precision",
            "model.adapter.modules_to_save",
            "leave layers of the backbone out of it, or set model.dtype: float32",
        )


def check_shards(model: nn.Module, num_ranks: int) -> None:
    """Raise LaunchError unless every weight is in shards over all ranks: FSDP2 that is plain data parallel
    would need more memory than was planned, and say nothing."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise LaunchError(
                f"the plan needs FSDP2, and {name} is not sharded",
                "cluster.engine",
                "set cluster.engine: ddp, or report this model",
            )
        assert parameter.placements == (Shard(0),), f"{name} is not in shards of its rows."
        assert parameter.device_mesh.size() == num_ranks, f"{name} is over other ranks than the run's."


def own_shards(model: nn.Module) -> dict[str, nn.Parameter]:
    """Rows of every trained weight on this rank, as plain parameters that an optimizer can step.

    They share their storage with the model's, so that every optimizer that looks at single numbers works on
    them as it would on whole weights.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A pass through a part of the model leaves the group of its outermost module whole.
            module.reshard()
    return {
        name: nn.Parameter(local_of(parameter.detach()))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def shard_engine(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> DistributedStep:
    """Engine by which a step reaches the other ranks: torch has summed gradients over them when a pass is
    through."""
    named = dict(model.named_parameters())
    sums = _Sums([(named[name], own) for name, own in trained.items()])
    return DistributedStep(begin=sums.begin, finish=sums.hand_over, clip=clip_shards)


class _Sums:
    """Gradients of this rank's rows, summed over micro-batches in float32.

    torch sums over the ranks in float32, rounds to the weight's precision, and would add micro-batches there.
    Its hooks are there only while a step has several: with one, gradients that go to the host are not waited
    for one by one.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self._pairs = pairs
        self._own = {parameter: own for parameter, own in pairs if own.dtype in HALF}
        self._is_summing = False
        self._hooks: list[RemovableHandle] = []

    def begin(self, model: nn.Module, num_micro_batches: int) -> None:
        """A step of so many micro-batches follows."""
        self._is_summing = num_micro_batches > 1
        set_wide(self._own.values(), is_wide=self._is_summing)
        if not self._is_summing:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
        elif not self._hooks:
            self._hooks += [one.register_post_accumulate_grad_hook(self._made) for one in self._own]

    def hand_over(self) -> None:
        """The gradients of the model's shards become the gradients of the stepped plain parameters."""
        for parameter, own in self._pairs:
            if not self._is_summing or own.dtype not in HALF:
                own.grad = None if parameter.grad is None else local_of(parameter.grad)
            parameter.grad = None

    def _made(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        own, part = self._own[cast(nn.Parameter, parameter)], local_of(parameter.grad)
        if waits_on_host(parameter):
            # Before torch 2.13 the copy to the host may be under way, on the stream that is current here.
            torch.cuda.current_stream().synchronize()
        if own.grad is None:
            own.grad = part.float()
        else:
            own.grad.add_(part)
        parameter.grad = None


def clip_shards(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; the norm before.

    float32 on the device, the same on every rank. Called by all ranks together.

    Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1, over all shards together.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = gradients[0].device if gradients else torch.device("cpu")
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in gradients]
    square = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
    reduced = square.to(_meeting_place(device))
    dist.all_reduce(reduced)
    norm = reduced.sqrt().float().to(device)
    if max_norm != float("inf"):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _meeting_place(device: torch.device) -> torch.device:
    """Device from which a scalar can be sent: shards that wait on the host meet on the device with NCCL."""
    if device.type == "cpu" and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextmanager
def whole_weights(scorer: nn.Module) -> Iterator[None]:
    """Every weight is whole on every rank inside: passes there are no collectives, and may differ in number.

    What every completion needs: ranks write as many tokens as their prompts take. Called by all ranks.
    """
    # Of the policy alone: a value model beside it writes nothing.
    policy = cast(nn.Module, cast(Any, scorer).model)
    groups = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for module in groups:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in groups:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Whole weights by name, in the main rank's host memory, one gathered at a time; empty on the others.

    Of a model with an adapter, what is trained. Called by all ranks. Tied weights appear once.
    """
    trained_only, keeps = isinstance(model, PeftModel), dist.get_rank() == 0
    once = {name for name, _ in model.named_parameters()}
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in again or (trained_only and name not in trained):
                continue
            whole = full_of(tensor)
            if keeps:
                state[name] = whole.detach().to("cpu", copy=True)
    return state
