"""A rank under DeepSpeed's ZeRO: its own engine, cutting and stepping tensors without data.

DeepSpeed runs on its CPU accelerator in a process group whose other members are not there; nothing of it is
modelled. What it asks of data is answered: gradients are finite, other ranks agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from memtrain.memory.plan.engine_kinds import uses_zero
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.zero_config import zero_config
from memtrain.trainers.distributed import zero
from memtrain.trainers.memory_meter.live_tensors import Recorder
from memtrain.trainers.model.kernels.own_names import unchanged
from memtrain.trainers.optim.zero_optimizer import ZeroOptimizer
from memtrain.trainers.tools.trace.fake_cuda import replaced

ENGINES = ("stage_1_and_2.DeepSpeedZeroOptimizer", "stage3.DeepSpeedZeroOptimizer_Stage3")
AGREEING = ("stage3", "partition_parameters", "partitioned_param_coordinator")
"""Modules that compare numbers with rank 0's."""


@contextmanager
def as_fake_zero(settings: Settings) -> Iterator[None]:
    """DeepSpeed can be begun inside, by one rank, with data or without; its groups are gone afterwards."""
    if not uses_zero(settings):
        yield
        return
    with patch.dict("os.environ", {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}):
        zero.import_deepspeed("cpu")
        # Stage 3 puts a product of its own in the place of torch's, which stays for whatever comes after.
        changed = ("deepspeed.utils.groups", "deepspeed.comm.comm", "torch.nn.functional")
        with unchanged([import_module(name) for name in changed]), ExitStack() as undo:
            for name in AGREEING:
                undo.enter_context(
                    replaced(_module(name), "assert_ints_same_as_other_ranks", lambda numbers: None)
                )
            yield


@contextmanager
def zero_without_data(settings: Settings) -> Iterator[None]:
    """Context in which DeepSpeed's questions about numbers are answered, and weights stay where they are."""
    if not uses_zero(settings):
        yield
        return
    with ExitStack() as undo:
        for place in ENGINES:
            name, kind = place.split(".")
            engine: Any = getattr(_module(name), kind)
            undo.enter_context(replaced(_module(name), "is_invalid_grad_norm", lambda norm: False))
            undo.enter_context(replaced(engine, "has_overflow", _finite(engine.has_overflow)))
        # They are on their device and in their precision, and without data cannot be swapped.
        undo.enter_context(replaced(nn.Module, "_apply", lambda module, change, recurse=True: module))
        yield


@contextmanager
def as_fake_zero_settings(settings: Settings, max_grad_norm: float | None) -> Iterator[Settings]:
    """DeepSpeed is begun inside with the buffers of `settings`, on a device that is a CPU to it.

    Yields the settings to begin with.
    """
    if not uses_zero(settings):
        yield settings
        return
    asked = zero_config(settings, max_grad_norm)
    with replaced(zero, "zero_config", lambda *which: asked):
        yield settings.model_copy(update={"device": "cpu"})


def own_parts(scorer: nn.Module, optimizer: ZeroOptimizer, recorder: Recorder) -> None:
    """Weights belong to `weights`, whole or cut, and this rank's stepped parts to `master copies`."""
    cut = [getattr(parameter, "ds_tensor", parameter) for parameter in scorer.parameters()]
    recorder.own(cut, "weights")
    recorder.own(flats_of(optimizer), "master copies")


def flats_of(optimizer: ZeroOptimizer) -> list[Tensor]:
    """The float32 parts that this rank steps."""
    return [copies for group in optimizer.inner.param_groups for copies in group["params"]]


def _finite(plain: Any) -> Any:
    """The same check with all that it allocates, and a good end."""

    def has_overflow(engine: Any, *args: Any, **kwargs: Any) -> bool:
        plain(engine, *args, **kwargs)
        return False

    return has_overflow


def _module(name: str) -> Any:
    return import_module(f"deepspeed.runtime.zero.{name}")
