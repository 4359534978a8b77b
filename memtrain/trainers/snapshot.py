"""What a checkpoint holds, and how a run goes on from it: trained weights, optimizer, position.

Whole, written by the main rank; or in shards, each written by the rank that holds it. Both hold the same
numbers, and either is read by any number of ranks: a rank takes the rows that it holds now from the files
they are in (slices.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memtrain.trainers.method import FollowsSteps
from memtrain.trainers.position import Position
from memtrain.trainers.run.checkpoint import Checkpoint, Parts
from memtrain.trainers.run.ranks import Ranks
from memtrain.trainers.run.slices import fill_from, name_of, read_optimizer
from memtrain.trainers.run.state_io import load_state, save_state
from memtrain.trainers.spread import full_of, gathered_here, is_cut, local_of, trained_parameters

State = dict[str, Any]


def parts_of(
    model: nn.Module,
    optimizer: Optimizer,
    position: Position,
    follower: FollowsSteps | None = None,
    kept: Callable[[], object] | None = None,
    *,
    trained: Mapping[str, nn.Parameter] | None = None,
    ranks: Ranks | None = None,
    is_sharded: bool = False,
) -> Parts:
    """The parts that this rank saves; `kept`: the rollout at hand, of methods that write their completions.

    `trained`: what the optimizer steps, by name. Called by all ranks: whole weights are gathered here, before
    anything is written, so that a disk that refuses leaves nobody waiting. No random state: every draw is
    named by its step and not by those before it.
    """
    ranks = ranks or Ranks()
    trained = trained_parameters(model) if trained is None else trained
    read = local_of if is_sharded else full_of
    states: dict[str, Callable[[], object]] = {}
    weights = _read_all(trained_parameters(model), read, ranks, is_sharded=is_sharded)
    states["weights"] = lambda: weights
    state = optimizer.state_dict() if is_sharded else _whole_optimizer(model, optimizer, trained)
    states["optimizer"] = lambda: state
    if follower is not None:
        followed = _read_all(follower.kept_state(), read, ranks, is_sharded=is_sharded)
        states["follower"] = lambda: followed
    if is_sharded:
        states = {name_of(name, ranks.rank, ranks.world): state for name, state in states.items()}
    if ranks.is_main:
        states["loop"] = lambda: asdict(position)
        if kept is not None:
            states["rollout"] = kept
    elif not is_sharded:
        states = {}
    return {name: _writer(made) for name, made in states.items()}


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer,
    position: Position,
    follower: FollowsSteps | None = None,
    *,
    trained: Mapping[str, nn.Parameter] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Put weights, optimizer and position where the checkpoint left them, however many ranks wrote it."""
    trained = trained_parameters(model) if trained is None else trained
    load_weights(checkpoint, model, ranks)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    rank, world = _place(model, ranks)
    names = names_in(optimizer, trained)
    optimizer.load_state_dict(read_optimizer(checkpoint, names, shapes, rank=rank, world=world))
    for name, value in load_state(checkpoint.part("loop")).items():
        setattr(position, name, value)
    if follower is not None:
        fill_from(checkpoint, "follower", follower.kept_state(), rank=rank, world=world)


def load_weights(checkpoint: Checkpoint, model: nn.Module, ranks: Ranks | None = None) -> None:
    """Put the trained weights where the checkpoint left them."""
    rank, world = _place(model, ranks)
    trained = trained_parameters(model)
    in_stage_3 = [one for one in trained.values() if hasattr(one, "ds_tensor")]
    with gathered_here(in_stage_3, writes=True) if in_stage_3 else nullcontext():
        fill_from(checkpoint, "weights", trained, rank=rank, world=world)


def names_in(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of what `optimizer` steps, in the order that its state counts them."""
    names = {id(parameter): name for name, parameter in trained.items()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _place(model: nn.Module, ranks: Ranks | None) -> tuple[int, int]:
    """(number of this rank's rows, in how many parts rows are); (0, 1) where weights are whole."""
    in_shards = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return (ranks.rank, ranks.world) if ranks is not None and in_shards else (0, 1)


def _read_all(
    tensors: Mapping[str, Tensor], read: Callable[[Tensor], Tensor], ranks: Ranks, *, is_sharded: bool
) -> dict[str, Tensor]:
    """The tensors as this rank writes them. Gathered ones are moved to the host, one at a time."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        made = read(tensor).detach()
        if is_cut(tensor) and not is_sharded:
            made = made.to("cpu", copy=True) if ranks.is_main else made.new_empty(0)
        found[name] = made
    return found


def _whole_optimizer(model: nn.Module, optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> State:
    """The optimizer's state with rows of all ranks together, in host memory."""
    state = optimizer.state_dict()
    weights = dict(model.named_parameters())
    names = names_in(optimizer, trained)
    entries: dict[int, dict[str, Any]] = {}
    for index, entry in state["state"].items():
        weight = weights[names[index]]
        entries[index] = {key: _whole(value, weight, trained[names[index]]) for key, value in entry.items()}
    return state | {"state": entries}


def _whole(value: Any, weight: Tensor, own: Tensor) -> Any:
    if not isinstance(weight, DTensor) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    placed = DTensor.from_local(
        value.to(weight.device),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    return placed.full_tensor().to("cpu", copy=True)


def _writer(state: Callable[[], object]) -> Callable[[Path], None]:
    return lambda path: save_state(state(), path)
