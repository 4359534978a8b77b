"""FSDP2's shards that wait on the host of a traced CUDA run: fake `meta` tensors, as all of the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from memtrain.memory.plan.engine_kinds import is_sharded
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.distributed import fsdp2 as shards
from memtrain.trainers.tools.trace.fake_cuda import called_from, replaced
from memtrain.trainers.tools.trace.fake_host import HOST

FSDP = "torch.distributed.fsdp._fully_shard"
FUSED = "_get_fused_kernels_supported_devices"
DEVICE = "cpu"
"""Device that plays the GPU: the device of FSDP2's mesh, and the host's name there, are both of this name."""


@contextmanager
def shards_on_host(settings: Settings) -> Iterator[None]:
    """FSDP2 sends shards between the device and the host inside, as far as memory goes.

    Its streams are none: on a mesh of CPUs torch's own stand-ins wait for nothing, and a tensor is let go of
    at the line that lets go of it. The optimizer steps on the host.

    Source: torch 2.13's `fully_shard`, read: shards go to the host when they are cut and when their gradients
    are summed, and come back to be gathered; nothing else in it moves between devices.
    """
    if settings.weights_offload and settings.device == "cuda":
        with replaced(import_module("torch.optim.optimizer"), FUSED, lambda: [DEVICE, HOST]):
            yield
        return
    if not is_sharded(settings) or settings.shard_offload != "parameters" or settings.device != "cuda":
        yield
        return
    is_fsdp = called_from(FSDP)
    plain: Any = torch.Tensor.to

    def to(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], torch.device) and is_fsdp():
            args = (torch.device(HOST if tensor.fake_device.type == DEVICE else DEVICE), *args[1:])
        return plain(tensor, *args, **kwargs)

    def cpu(tensor: FakeTensor) -> Tensor:
        return plain(tensor, HOST if is_fsdp() else DEVICE)

    with ExitStack() as undo:
        undo.enter_context(replaced(FakeTensor, "to", to))
        undo.enter_context(replaced(FakeTensor, "cpu", cpu))
        for check in ("_validate_cpu_offload_params", "_validate_no_meta_params"):
            undo.enter_context(replaced(FSDPParamGroup, check, lambda group: None))
        undo.enter_context(replaced(shards, "_meeting_place", lambda device: torch.device(DEVICE)))
        undo.enter_context(replaced(import_module("torch.optim.optimizer"), FUSED, lambda: [DEVICE, HOST]))
        yield
