"""Layout of a run's weights over its ranks: whole on each (plain data parallel), or in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Gather = Callable[[nn.Module], dict[str, Tensor] | None]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name; tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_cut(tensor: Tensor) -> bool:
    """Whether this rank holds only a part of a weight: FSDP2's rows, or its part in ZeRO's stage 3."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor")


def local_of(tensor: Tensor) -> Tensor:
    """Part of a weight on this rank, in the same storage; a plain tensor is itself."""
    if hasattr(tensor, "ds_tensor"):
        return cast(Any, tensor).ds_tensor
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def waits_on_host(tensor: Tensor) -> bool:
    """Whether the rows of a weight are in host memory while its layer computes on a GPU.

    They meet on the GPU: NCCL sends nothing from the host.
    """
    if not isinstance(tensor, DTensor):
        return False
    return local_of(tensor.detach()).device.type == "cpu" and tensor.device_mesh.device_type != "cpu"


def full_of(tensor: Tensor) -> Tensor:
    """All of a weight, on every rank; called by all of them. A plain tensor is itself."""
    if hasattr(tensor, "ds_tensor"):
        with gathered_here([tensor]):
            return tensor.detach().clone()
    if not isinstance(tensor, DTensor):
        return tensor
    if waits_on_host(tensor):
        # On the device of the mesh: that is where `from_local` moves the rows.
        shape, stride, mesh, where = tensor.shape, tensor.stride(), tensor.device_mesh, tensor.placements
        own = local_of(tensor.detach())
        tensor = DTensor.from_local(own, mesh, where, run_check=False, shape=shape, stride=stride)
    return tensor.full_tensor()


def gathered_here(tensors: Sequence[Tensor], *, writes: bool = False) -> AbstractContextManager[None]:
    """Weights of ZeRO's stage 3 are whole inside; writes to them stay where it `writes`."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    return deepspeed.zero.GatheredParameters(list(tensors), modifier_rank=0 if writes else None)


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Functions that lay weights where the plan says. The default leaves them whole."""

    lay: Callable[[nn.Module], None] = lambda scorer: None
    """Lays the weights of the scorer that is trained over the ranks, in place."""
    lay_frozen: Callable[[nn.Module], None] = lambda scorer: None
    """The same for a model beside it that is only asked: a reference, a reward model."""
    trained: Callable[[nn.Module], dict[str, nn.Parameter]] = trained_parameters
    """Parameters that this rank's optimizer steps, by the name of the weight that each is (a part of)."""
    whole: Callable[[nn.Module], AbstractContextManager[None]] = lambda scorer: nullcontext()
    """Context in which passes of single ranks are possible: no collectives inside."""
    streamed: Callable[[nn.Module], AbstractContextManager[None]] = lambda scorer: nullcontext()
    """Context in which passes gather layer by layer, in whatever number: all ranks make as many."""
    gather: Gather = lambda model: None
    """Whole weights for the main rank's file, called by all ranks; None where the model has them itself."""
    is_sharded: bool = False
    """Every pass through the model is a collective: all ranks make as many."""


def rows_of(num_rows: int, rank: int, world: int) -> range:
    """The rows of a tensor that are in shard `rank` of `world`; may be none."""
    size = -(-num_rows // world)
    return range(min(num_rows, rank * size), min(num_rows, (rank + 1) * size))
