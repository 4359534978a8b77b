"""The contents of a checkpoint, and the start of a run from it: trained weights, optimizer, position.

Whole, written by the main rank; or in shards, each written by the rank that holds it. All hold the same
numbers, and each is read by any number of ranks: a rank takes what it holds now from the files it is in
(rows: slices.py; what DeepSpeed's ranks step: pieces.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memtrain.trainers.checkpoints.checkpoint import Checkpoint, Parts
from memtrain.trainers.checkpoints.flat_shards import has_pieces, read_states
from memtrain.trainers.checkpoints.pinned_copy import HostCopies
from memtrain.trainers.checkpoints.row_shards import fill_from, read_optimizer
from memtrain.trainers.checkpoints.shard_names import PIECES, name_of
from memtrain.trainers.checkpoints.state_io import load_state, save_state
from memtrain.trainers.optim.zero_optimizer import ZeroOptimizer
from memtrain.trainers.protocols.method import TracksPolicy
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.weight_layout import (
    full_of,
    gathered_here,
    is_cut,
    local_of,
    trained_parameters,
)

State = dict[str, Any]
WEIGHTS = "weights"
WHOLE_WEIGHTS = f"{WEIGHTS}.safetensors"
"""File of a checkpoint whose weights are whole."""
MODEL_NAME = "model."
"""Beginning of the names of a model's weights in the scorer that holds it."""


def parts_of(
    model: nn.Module,
    optimizer: Optimizer,
    position: TrainState,
    follower: TracksPolicy | None = None,
    kept: Callable[[], object] | None = None,
    *,
    trained: Mapping[str, nn.Parameter] | None = None,
    ranks: Ranks | None = None,
    is_sharded: bool = False,
    copies: HostCopies | None = None,
) -> Parts:
    """The parts that this rank saves; `kept`: the rollout at hand, of methods that write their completions.

    `trained`: what the optimizer steps, by name. `copies`: what the parts are copied into, so that the run
    may change weights and states before they are written. Called by all ranks: whole weights are gathered
    here, before anything is written, so that a disk that refuses leaves nobody waiting. No random state:
    every draw is named by its step and not by those before it.
    """
    ranks = ranks or Ranks()
    trained = trained_parameters(model) if trained is None else trained
    how = _Reading(ranks, is_sharded, copies if is_sharded or ranks.is_main else None)
    cut = optimizer if is_sharded and isinstance(optimizer, ZeroOptimizer) else None
    own: dict[str, object] = {}
    whole: dict[str, object] = {}
    if cut is not None:
        own[WEIGHTS + PIECES] = how.pieces(cut, trained)
        own["optimizer" + PIECES] = cut.own_state(how.own)
    else:
        states = own if is_sharded else whole
        states[WEIGHTS] = how.weights(trained_parameters(model))
        states["optimizer"] = how.optimizer(model, optimizer, trained)
    if follower is not None:
        # DeepSpeed is given the policy alone: what follows it is whole.
        states = own if is_sharded and cut is None else whole
        states["follower"] = how.weights(follower.kept_state())
    if ranks.is_main:
        whole["loop"] = asdict(position)
        if kept is not None:
            whole["rollout"] = kept() if copies is None else copies.state(kept())
    else:
        whole = {}
    named = {name_of(name, ranks.rank, ranks.world): state for name, state in own.items()}
    # Whole weights have the names of the model itself, so that the file is one of a Hugging Face model too.
    return {
        name: _writer(state, root=MODEL_NAME if name == WEIGHTS else "")
        for name, state in (named | whole).items()
    }


def restore(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer,
    position: TrainState,
    follower: TracksPolicy | None = None,
    *,
    trained: Mapping[str, nn.Parameter] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Put weights, optimizer and position where the checkpoint left them, however many ranks wrote it."""
    trained = trained_parameters(model) if trained is None else trained
    load_weights(checkpoint, model, ranks)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    rank, world = _place(model, ranks)
    if isinstance(optimizer, ZeroOptimizer) and has_pieces(checkpoint, "optimizer"):
        number = ranks.rank if ranks is not None else 0
        optimizer.load_pieces(lambda wanted: read_states(checkpoint, wanted, own=number)["state"])
    else:
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
        fill_from(checkpoint, WEIGHTS, trained, rank=rank, world=world)


def names_in(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> list[str]:
    """Names of what `optimizer` steps, in the order that its state counts them."""
    names = {id(parameter): name for name, parameter in trained.items()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _place(model: nn.Module, ranks: Ranks | None) -> tuple[int, int]:
    """(number of this rank's rows, in how many parts rows are); (0, 1) where weights are whole."""
    in_shards = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return (ranks.rank, ranks.world) if ranks is not None and in_shards else (0, 1)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The form of a rank's share of a save: whole or its rows; in place, or copied to host memory."""

    ranks: Ranks
    is_sharded: bool
    copies: HostCopies | None
    """None also where this rank writes nothing."""

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as this rank writes them. Gathered ones are moved to the host, one at a time."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if is_cut(tensor) and not self.is_sharded:
                found[name] = self._gathered(full_of(tensor).detach())
            else:
                found[name] = self.own(local_of(tensor).detach())
        return found

    def pieces(self, optimizer: ZeroOptimizer, trained: Mapping[str, nn.Parameter]) -> dict[str, State]:
        """Pieces of the weights on this rank, by name."""
        names = names_in(optimizer, trained)
        return {
            names[index]: {"first": first, "numbers": self.own(numbers)}
            for index, (first, numbers) in optimizer.own_weights().items()
        }

    def optimizer(self, model: nn.Module, optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> State:
        """The optimizer's state, of this rank's rows or of all ranks'."""
        if isinstance(optimizer, ZeroOptimizer):
            return optimizer.whole_state(self._gathered)
        state = optimizer.state_dict()
        weights = dict(model.named_parameters())
        names = names_in(optimizer, trained)
        entries: dict[int, dict[str, Any]] = {}
        for index, entry in state["state"].items():
            weight, own = weights[names[index]], trained[names[index]]
            entries[index] = {key: self._of(value, weight, own) for key, value in entry.items()}
        groups = [dict(group) for group in state["param_groups"]]
        return state | {"state": entries, "param_groups": groups}

    def _of(self, value: Any, weight: Tensor, own: Tensor) -> Any:
        """Entry of the state of a weight, to be saved."""
        if not isinstance(value, Tensor):
            return value
        is_of_rows = isinstance(weight, DTensor) and value.shape == own.shape
        if self.is_sharded or not is_of_rows:
            return self.own(value)
        assert isinstance(weight, DTensor), "Only these have rows elsewhere."
        # No backend sends 16-bit integers, which are what split copies keep.
        sent = value.int() if value.dtype == torch.int16 else value
        placed = DTensor.from_local(
            sent.to(weight.device),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
        return self._gathered(placed.full_tensor().to(value.dtype))

    def own(self, tensor: Tensor) -> Tensor:
        """A tensor of this rank."""
        return tensor if self.copies is None else self.copies.tensor(tensor)

    def _gathered(self, whole: Tensor) -> Tensor:
        """A tensor that was made of all ranks' parts; nothing beside the main one."""
        if not self.ranks.is_main:
            return whole.new_empty(0)
        return whole.to("cpu", copy=True) if self.copies is None else self.copies.tensor(whole)


def _writer(state: object, *, root: str) -> Callable[[Path], None]:
    return lambda path: save_state(state, path, root=root)
