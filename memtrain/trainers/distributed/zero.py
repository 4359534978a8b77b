"""DeepSpeed's ZeRO around our own loop: its engine exchanges gradients and steps, and gathers in stage 3.

Losses are divided by what the whole step counts; DeepSpeed divides by the ranks once more, so they are
multiplied by them here. A backward pass of stages 2 and 3 is a collective, in stage 3 every pass: all ranks
make as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.zero_config import stage_of, zero_config
from memtrain.trainers.optim.step import DistributedStep
from memtrain.trainers.optim.zero_optimizer import Flat, Piece, ZeroOptimizer
from memtrain.trainers.runtime.deepspeed_import import import_deepspeed

_BEGUN: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""DeepSpeed's optimizer of each scorer whose weights it has cut up."""


def refuse_without_deepspeed() -> None:
    """Raises: LaunchError where DeepSpeed cannot be imported."""
    if find_spec("deepspeed") is None:
        raise LaunchError(
            "cluster.engine names a DeepSpeed engine, and deepspeed is not installed here",
            "cluster.engine",
            "pip install 'memtrain[deepspeed]', or set cluster.engine: fsdp2",
        )


def begin_zero(
    scorer: nn.Module, optimizer: ZeroOptimizer, settings: Settings, max_grad_norm: float | None
) -> DistributedStep:
    """Cut the weights, or states of weights, of `scorer` over the ranks; how a step reaches them.

    Weights and states are whole and loaded by now. Called by all ranks together.

    Source: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 5.
    """
    deepspeed = import_deepspeed(settings.device)
    is_cpu = settings.device == "cpu"
    deepspeed.init_distributed(
        "gloo" if is_cpu else "nccl", auto_mpi_discovery=False, dist_init_required=False
    )
    engine, inner, _, _ = deepspeed.initialize(
        model=scorer, optimizer=optimizer.inner, config=zero_config(settings, max_grad_norm)
    )
    flats = _flats_of_stage_3(optimizer, inner) if stage_of(settings) == 3 else _flats(optimizer)
    optimizer.give(flats)
    _BEGUN[scorer] = inner
    stepping = _Stepping(engine, inner, optimizer, settings.num_processes)
    return DistributedStep(
        begin=lambda model, num_micro_batches: None,
        backward=stepping.backward,
        last_pass=stepping.last_pass,
        clip=stepping.clip,
        step=stepping.step,
    )


class _Stepping:
    """A step through DeepSpeed's engine."""

    def __init__(self, engine: Any, inner: Any, optimizer: ZeroOptimizer, world: int) -> None:
        self._engine = engine
        self._inner = inner
        self._optimizer = optimizer
        self._world = world
        self._is_last = False
        self._norm = torch.zeros(())

    @contextmanager
    def last_pass(self) -> Iterator[None]:
        """The backward pass inside is the last of its step."""
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False

    def backward(self, loss: Tensor) -> None:
        """Make gradients, and exchange them as the stage does."""
        self._engine.set_gradient_accumulation_boundary(self._is_last)
        # What its own forward pass would do: losses ask the scorer itself, some of them several times.
        self._inner.clear_backward_seen_flag()
        self._engine._backward_prologue()
        self._engine.backward(loss * self._world)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """The norm of the gradients: DeepSpeed clips in its step, and it is filled in then."""
        self._norm = torch.zeros((), device=self._engine.device)
        return self._norm

    def step(self, optimizer: Optimizer) -> None:
        """Clip, and move the weights."""
        self._optimizer.set_rates()
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        # A norm on the device is not waited for.
        self._norm.copy_(torch.as_tensor(0.0 if norm is None else norm))


def _flats(optimizer: ZeroOptimizer) -> tuple[Flat, ...]:
    """The flat parts of stages 1 and 2: a stretch of all weights of a group, end to end."""
    made: list[Flat] = []
    first = 0
    for outer, inner in zip(optimizer.param_groups, optimizer.inner.param_groups, strict=True):
        (copies,) = inner["params"]
        pieces: list[Piece] = []
        for number, parameter in enumerate(outer["params"]):
            mapping = parameter._hp_mapping
            if mapping is not None:
                ours, theirs = mapping.hp_fragment_address, mapping.lp_fragment_address
                pieces.append(Piece(first + number, theirs.start, ours.start, theirs.numel))
        made.append(Flat(copies, tuple(pieces)))
        first += len(outer["params"])
    return tuple(made)


def _flats_of_stage_3(optimizer: ZeroOptimizer, inner: Any) -> tuple[Flat, ...]:
    """The flat parts of stage 3: this rank's stretch of each weight, end to end."""
    import torch.distributed as dist

    numbers = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    made: list[Flat] = []
    for copies, group in zip(inner.fp32_partitioned_groups_flat, inner.fp16_groups, strict=True):
        pieces: list[Piece] = []
        place = 0
        for parameter in group:
            size = parameter.partition_numel()
            first = dist.get_rank() * size
            count = max(0, min(size, parameter.ds_numel - first))
            if count:
                pieces.append(Piece(numbers[id(parameter)], first, place, count))
            place += size
        made.append(Flat(copies, tuple(pieces)))
    return tuple(made)


@contextmanager
def whole_in_stage_3(scorer: nn.Module) -> Iterator[None]:
    """The policy is whole on every rank inside, and no pass is a collective. Called by all ranks."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    offload = _BEGUN[scorer].parameter_offload
    policy: nn.Module = scorer.model  # pyright: ignore[reportAssignmentType]
    with deepspeed.zero.GatheredParameters(list(policy.parameters())):
        # Its hooks would cut a layer up again as soon as it has computed.
        offload._remove_module_hooks()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()
        for parameter in scorer.parameters():
            parameter.ds_active_sub_modules.clear()  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            offload.setup_zero_stage3_hooks()


@contextmanager
def streamed_in_stage_3(scorer: nn.Module) -> Iterator[None]:
    """Passes gather module by module inside, and DeepSpeed neither learns their order nor expects one.

    It keeps the order of a step's passes, and those that write completions are another number each time.
    """
    coordinator = _BEGUN[scorer].parameter_offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    yield
