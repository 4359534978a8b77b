"""A rank of a run of several processes: a process group whose other members are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.batches.tensors import with_tensors
from memtrain.trainers.distributed import fsdp2 as shards
from memtrain.trainers.distributed.fsdp2 import own_shards, shard
from memtrain.trainers.model.attention.row_layout import Layout
from memtrain.trainers.model.context_parallel.groups import ContextRanks
from memtrain.trainers.model.context_parallel.row_slices import SlicedLayout, slice_of
from memtrain.trainers.runtime.weight_layout import WeightLayout
from memtrain.trainers.tools.trace.fake_cuda import replaced

Rules = dict[Any, Callable[..., Any]]


@contextmanager
def as_fake_ranks(settings: Settings) -> Iterator[None]:
    """Context in which this process is a rank of the run; its collectives move nothing and make their usual
    allocations."""
    if settings.num_processes == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _give_collectives_a_shape()
    rank, world = played_rank(settings), settings.num_processes
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", _told_apart):
            yield
    finally:
        dist.destroy_process_group()


_tell = ShardingPropagator._propagate_tensor_meta_non_cached


def _told_apart(propagator: ShardingPropagator, operation: OpSchema) -> Any:
    """The shape of a cut tensor. torch learns it from tensors without data, the first time that a process
    asks; no run holds them, and nothing counts them."""
    with _disable_current_modes():
        return _tell(propagator, operation)


def played_rank(settings: Settings) -> int:
    """Rank 0, whose part is the largest where rows are dealt; under ZeRO-1 and 2 the last, which has its part
    of the gradients as soon as the head is summed, while all activations are there. Where an embedding is
    larger than a part, of more than two ranks another one may need more."""
    return settings.num_processes - 1 if settings.engine in ("zero1", "zero2") else 0


def _give_collectives_a_shape() -> None:
    """Register the collectives for tensors without data where torch has not done so itself: before 2.11 only
    a tool of its own does, as it is imported."""
    name = torch.ops.c10d._allgather_base_.default.name()
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
        from torch.distributed._tools import fake_collectives  # noqa: F401


def layout_without_data(settings: Settings) -> WeightLayout:
    """Layout of weights over ranks that are not there: whole, or cut by rows (DeepSpeed cuts its own)."""

    def lay(scorer: nn.Module) -> None:
        lay_in_rows(scorer, settings)

    made = WeightLayout()
    if settings.num_processes > 1 and settings.engine == "fsdp2":
        made = replace(made, lay=lay, trained=own_shards)
    return replace(made, lay_frozen=lay) if shards_weights(settings) else made


def lay_in_rows(scorer: nn.Module, settings: Settings) -> None:
    """Cut every weight by rows."""
    with _real_mesh():
        # A device that is played is a CPU to torch.
        shard(scorer, settings.model_copy(update={"device": "cpu"}))


@contextmanager
def _real_mesh() -> Iterator[None]:
    """A mesh of devices looks its own rank up in a tensor, which must have numbers."""
    plain = shards.init_device_mesh

    def made(*args: Any, **kwargs: Any) -> DeviceMesh:
        with _disable_current_modes():
            return plain(*args, **kwargs)

    shards.init_device_mesh = made
    try:
        yield
    finally:
        shards.init_device_mesh = plain


@contextmanager
def slicing_without_data(settings: Settings) -> Iterator[Rules]:
    """Slices of rows are laid out by the numbers that layouts know, not by tensors, which have none.

    Yields rules for a recorder: of the scored tokens, a slice holds as many as it has tokens.
    """
    from memtrain.trainers.model.heads import context_parallel_scoring as sliced_scoring

    if settings.context_parallel == 1:
        yield {}
        return
    most = 0

    def laid(layout: Layout, ranks: ContextRanks) -> SlicedLayout:
        nonlocal most
        with _disable_current_modes():
            made = slice_of(layout, ranks)
        most = made.num_tokens
        return with_tensors(made, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))

    def found(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        tensor: Tensor = args[0]
        return torch.empty(min(most, tensor.numel()), tensor.dim(), dtype=torch.long, device="cpu")

    before = sliced_scoring.slice_of
    sliced_scoring.slice_of = laid
    try:
        yield {torch.ops.aten.nonzero.default: found}
    finally:
        sliced_scoring.slice_of = before
