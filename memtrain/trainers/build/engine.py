"""The engine of a run: accelerate around our own loop, checked against the plan."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from memtrain.errors import LaunchError
from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.zero_config import stage_of
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.build.step import OptimizerStep, StepParts
from memtrain.trainers.distributed.ddp import GradientAllReduce
from memtrain.trainers.distributed.fsdp2 import (
    check_shards,
    gathered,
    own_shards,
    shard,
    shard_engine,
    whole_weights,
)
from memtrain.trainers.distributed.zero import (
    begin_zero,
    refuse_without_deepspeed,
    streamed_in_stage_3,
    whole_in_stage_3,
)
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.model.loading.sharded_init import kept_of
from memtrain.trainers.model.loading.sharded_load import fill_rows, is_empty
from memtrain.trainers.optim.in_backward import InBackward
from memtrain.trainers.optim.loss_scaling import LossScaling
from memtrain.trainers.optim.step import DistributedStep, lr_at, summing_wide
from memtrain.trainers.optim.zero_optimizer import ZeroOptimizer
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.runtime.allocator import use_expandable_segments
from memtrain.trainers.runtime.launcher_words import drop_launcher_words, refuse_launcher
from memtrain.trainers.runtime.one_order import sum_in_one_order
from memtrain.trainers.runtime.ranks import Ranks, current_ranks
from memtrain.trainers.runtime.weight_layout import WeightLayout

_KEPT: list[object] = []
"""The process group, until the process ends. Its destructor joins gloo's threads while it holds Python's
lock; a thread that lets go of a tensor at that moment waits for it, and both wait for ever (torch 2.13)."""


def make_accelerator(settings: Settings) -> Accelerator:
    """The accelerator of this process, with as many processes as the plan asks for.

    Raises: LaunchError when another number of processes runs, or they would not exchange gradients.
    """
    if settings.num_processes == 1:
        refuse_launcher(os.environ)
        drop_launcher_words(os.environ)
    torch.set_num_threads(settings.threads)
    if settings.deterministic:
        sum_in_one_order()
    if settings.device == "cuda":
        use_expandable_segments(settings.expandable_segments)
        if settings.step_graphs:
            # Autograd's nodes keep the stream that they were made on; nothing is captured on the default one.
            torch.cuda.set_stream(torch.cuda.Stream())
    accelerator = Accelerator(cpu=settings.device == "cpu", mixed_precision="no")
    asked, realised = settings.num_processes, accelerator.num_processes
    if asked != realised:
        raise LaunchError(
            f"the plan needs {asked} processes, and {realised} are running",
            where="cluster.processes",
            fix="start the run with `memtrain`, or with the line in launch.sh",
        )
    if asked > 1 and accelerator.distributed_type is DistributedType.NO:
        raise LaunchError(
            "the processes would not exchange gradients (accelerate set up no process group)",
            "cluster.processes",
            fix="start the run with `memtrain`, or with the line in launch.sh",
        )
    if asked > 1:
        _KEPT.append(torch.distributed.group.WORLD)
        _check_reach(settings)
    return accelerator


def _check_reach(settings: Settings) -> None:
    """Raise LaunchError unless a sum reaches every process; unconnected processes would train alone."""
    asked = settings.num_processes
    found, expected = _sum_of_ranks(settings), asked * (asked + 1) // 2
    if found != expected:
        raise LaunchError(
            f"the processes do not reach each other: their numbers sum to {found}, not {expected}",
            where="cluster.processes",
            fix="start the run with `memtrain`, or with the line in launch.sh",
        )


def _sum_of_ranks(settings: Settings) -> int:
    """1 + 2 + ... over all processes, by the collective that sums gradients."""
    number = torch.tensor(dist.get_rank() + 1, device=local_device(settings))
    dist.all_reduce(number)
    return int(number)


def check_same_plan_on_ranks(plan: Plan, ranks: Ranks) -> None:
    """Make sure that all ranks run the same plan with the same packages, before anything is loaded.

    Raises: LaunchError, on every rank, naming those that differ from rank 0.
    """
    # A digest: the recipe may hold secrets of the environment, which must be the same on every node.
    digest = hashlib.blake2b(
        plan.model_dump_json().encode("utf-8", "surrogatepass"), digest_size=16
    ).hexdigest()
    mine = (digest, torch.__version__, transformers.__version__)
    all_of_them = ranks.gather(mine)
    for what, values in zip(("plan", "torch", "transformers"), zip(*all_of_them, strict=True), strict=True):
        others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise LaunchError(
                f"rank {', '.join(others)} does not have the same {what} as rank 0",
                where=plan.run_dir,
                fix="let every node see the same run folder and the same environment",
            )


def make_spread(settings: Settings) -> WeightLayout:
    """Layout of weights over the ranks under a plan's settings.

    Raises: LaunchError where the plan's engine is not installed.
    """
    if uses_zero(settings):
        refuse_without_deepspeed()
        if stage_of(settings) < 3:
            return WeightLayout(lay=_same_everywhere, lay_frozen=_same_everywhere, gather=gathered)
        return WeightLayout(
            lay=_same_everywhere,
            # DeepSpeed is given the policy alone: models that are only asked are cut by FSDP2.
            lay_frozen=_in_rows(settings),
            whole=whole_in_stage_3,
            streamed=streamed_in_stage_3,
            gather=gathered,
            is_sharded=True,
        )
    if settings.num_processes == 1:
        return WeightLayout()
    if settings.engine != "fsdp2":
        return WeightLayout(lay=_same_everywhere, lay_frozen=_same_everywhere)
    lay = _in_rows(settings)
    return WeightLayout(
        lay=lay, lay_frozen=lay, trained=own_shards, whole=whole_weights, gather=gathered, is_sharded=True
    )


def _in_rows(settings: Settings) -> Callable[[nn.Module], None]:
    """Lays a scorer over the ranks in shards of its rows."""

    def lay(scorer: nn.Module) -> None:
        kept = kept_of(scorer) if is_empty(scorer) else None
        if settings.device == "cpu" and kept is None:
            _same_everywhere(scorer)
        shard(scorer, settings)
        check_shards(scorer, settings.num_processes)
        if kept is not None:
            fill_rows(scorer, kept, local_device(settings))

    return lay


Scaled = Callable[[DistributedStep], DistributedStep]


def scaled_by(position: TrainState) -> Scaled:
    """An engine whose losses are scaled in float16, by the scale that a run keeps with its position."""
    return lambda engine: LossScaling(engine, position).engine()


def begin(parts: StepParts, recipe: Recipe, settings: Settings, scaled: Scaled) -> OptimizerStep:
    """The step, begun: weights and optimizer states are loaded, and DeepSpeed cuts them here.

    `scaled`: the engine of float16 around another.
    """
    engine = make_engine(parts, settings, recipe.optim.max_grad_norm)
    return OptimizerStep(
        model=parts.scorer,
        method=parts.method,
        optimizer=parts.optimizer,
        parameters=list(parts.trained.values()),
        engine=scaled(engine) if settings.dtype == "float16" else engine,
        max_grad_norm=recipe.optim.max_grad_norm,
        follower=parts.follower,
        settings=settings,
        seed=recipe.train.seed,
        lr_at=partial(lr_at, optim=recipe.optim, max_steps=settings.max_steps),
    )


def make_engine(parts: StepParts, settings: Settings, max_grad_norm: float | None) -> DistributedStep:
    """Way of a step to the other ranks and the weights: by itself, in the backward pass, by our own exchange
    (distributed/ddp.py), that of the shards, or DeepSpeed's."""
    if settings.in_backward:
        return InBackward(parts.optimizer, list(parts.trained.values())).engine()
    if settings.num_processes == 1:
        return DistributedStep(begin=summing_wide(parts.trained.values()))
    if settings.engine == "fsdp2":
        return shard_engine(parts.scorer, parts.trained)
    if isinstance(parts.optimizer, ZeroOptimizer):
        return begin_zero(parts.scorer, parts.optimizer, settings, max_grad_norm)
    return GradientAllReduce(list(parts.trained.values())).engine()


def _same_everywhere(model: nn.Module) -> None:
    """Give every rank the weights of the main one."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)


def ranks_of(accelerator: Accelerator, settings: Settings) -> Ranks:
    """Place of this process among the others."""
    ranks = current_ranks(settings.context_parallel)
    assert ranks.world == accelerator.num_processes, "accelerate and torch disagree about the processes."
    return ranks
