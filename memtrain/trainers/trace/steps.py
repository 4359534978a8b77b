"""The step that is traced: the worker's own forward, backward and update, with the phases a recorder sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from memtrain.memory.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.collate import MicroBatch
from memtrain.trainers.method import Method
from memtrain.trainers.model.head import Scorer, base_model
from memtrain.trainers.optim import build_optimizer
from memtrain.trainers.step import Engine, forward_backward, update
from memtrain.trainers.trace.recorder import Recorder

Enter = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything a step needs."""

    scorer: Scorer
    method: Method
    optimizer: Optimizer
    recipe: Recipe
    micros: Sequence[MicroBatch]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]


def set_the_stage(
    model: nn.Module, recipe: Recipe, settings: Settings, micros: Sequence[MicroBatch]
) -> Stage:
    """Scorer, method and optimizer around a model, as a run builds them."""
    scorer = Scorer(cast(Any, model), is_chunked=settings.loss != "full", tile_bytes=settings.loss_tile_bytes)
    method: Method = import_module(METHODS[recipe.method].trainer).method(recipe)
    return Stage(scorer, method, build_optimizer(scorer, recipe.optim, settings), recipe, micros)


def one_step(stage: Stage, *, want_stats: bool, enter: Enter = lambda phase: None) -> None:
    """Forward, backward and update; `enter` hears `forward`, `optimizer` and `end`."""
    enter("forward")
    denominator = float(sum(micro.num_learnt for micro in stage.micros))
    sums = forward_backward(
        stage.scorer,
        stage.method,
        stage.micros,
        denominator=max(1.0, denominator),
        engine=Engine(),
        num_micros=len(stage.micros),
        want_stats=want_stats,
    )
    enter("optimizer")
    optim = stage.recipe.optim
    norm = update(
        stage.optimizer, stage.parameters, lr=optim.lr, max_grad_norm=optim.max_grad_norm, engine=Engine()
    )
    del norm, sums
    enter("end")


def one_evaluation(stage: Stage) -> None:
    """A forward pass of the first micro-batch without gradients, with statistics."""
    stage.scorer.eval()
    with torch.no_grad():
        stage.method.loss(stage.scorer, stage.micros[0], denominator=1.0, want_stats=True)
    stage.scorer.train()


def watch_layers(stage: Stage, recorder: Recorder, prefix: Callable[[], str]) -> None:
    """Enter a phase at every border of a layer: `<prefix>.forward.first`, `.head`, `.backward.last`, ...

    Layers between the first and the last share the names `middle`, so that peaks of a shallow model stand for
    those of a deep one.
    """
    layers = _layers(base_model(stage.scorer.model))
    names = {0: "first", len(layers) - 1: "last"}

    def place(index: int) -> str:
        return names.get(index, "middle")

    def before_layer(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled() or ".backward." in recorder.phase:
                return
            recorder.enter(f"{prefix()}.forward.{place(index)}")
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            if hidden.requires_grad:
                after = (
                    f"{prefix()}.backward.{place(index - 1)}" if index else f"{prefix()}.backward.embedding"
                )
                hidden.register_hook(lambda gradient: recorder.enter(after))

        return hook

    def after_layers(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled() and ".backward." not in recorder.phase:
            recorder.enter(f"{prefix()}.head")
            hidden: Tensor = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: recorder.enter(f"{prefix()}.backward.last"))

    def before_model(module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            recorder.enter(f"{prefix()}.forward")

    decoder = base_model(stage.scorer.model).get_decoder()
    decoder.register_forward_pre_hook(before_model)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(before_layer(index), with_kwargs=True)
    layers[-1].register_forward_hook(after_layers)


def own_gradients(stage: Stage, recorder: Recorder) -> None:
    """Gradients belong to `gradients` from the moment they are there."""

    def ready(parameter: Tensor) -> None:
        if parameter.grad is not None:
            recorder.own([parameter.grad], "gradients")

    for parameter in stage.parameters:
        parameter.register_post_accumulate_grad_hook(ready)


def own_states(stage: Stage, recorder: Recorder) -> None:
    """Whatever the optimizer keeps belongs to `optimizer`, its float32 copies to `master copies`."""
    recorder.own(_tensors_of(stage.optimizer.state), "optimizer")
    masters = getattr(stage.optimizer, "_masters", [])
    weights = set(map(id, stage.parameters))
    recorder.own([m for group in masters for m in group if id(m) not in weights], "master copies")


def _tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for value in values for tensor in _tensors_of(value)]


def _layers(base: nn.Module) -> list[nn.Module]:
    """The decoder's layers: the longest module list of the model."""
    lists = [list(module) for module in base.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)
