"""The step that is traced: the worker's own forward, backward and update, with the phases a recorder sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memtrain.trainers.build.balanced import own_method
from memtrain.trainers.memory_meter.live_tensors import Recorder
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.online.rollout.protocol import OnlineMethod
from memtrain.trainers.online.rollout.scoring_passes import policy_pass, reference_pass
from memtrain.trainers.reference.reference import evaluating
from memtrain.trainers.tools.trace.dummy_batches import DummyFeed
from memtrain.trainers.tools.trace.setup import StepSetup

Enter = Callable[[str], None]


def one_step(
    stage: StepSetup,
    *,
    want_stats: bool,
    enter: Enter = lambda phase: None,
    stepped: Callable[[], None] = lambda: None,
) -> None:
    """Forward, backward and update, as the loop does them.

    `enter` hears `ahead`, `forward`, `exchange`, `optimizer` and `end`; `stepped` is called when the
    gradients of the step are whole.
    """
    enter("ahead")
    before_step(stage)
    enter("forward")
    denominator = float(sum(micro_batch.num_loss_tokens for micro_batch in stage.micro_batches))
    sums = stage.step.passes(
        stage.micro_batches,
        denominator=max(1.0, denominator),
        num_micro_batches=len(stage.micro_batches),
        want_stats=want_stats,
    )
    enter("exchange")
    stage.step.engine.finish()
    stepped()
    enter("optimizer")
    norm = stage.step.update(-1)
    del norm, sums
    enter("end")


def before_step(stage: StepSetup) -> None:
    """Run the method's work before the first micro-batch of a step."""
    # As much of a feed as a method's work before a step asks for.
    feed: Any = DummyFeed(stage.micro_batches[0])
    sequences = [np.array([number]) for number in range(len(stage.micro_batches))]
    stage.step.preview(np.concatenate(sequences), sequences, feed=feed)


def one_evaluation(stage: StepSetup) -> None:
    """A pass over the first micro-batch without gradients, with statistics."""
    with torch.no_grad(), evaluating(stage.scorer):
        before_step(stage)
        stage.method.loss(stage.scorer, stage.micro_batches[0], denominator=1.0, want_stats=True)


def one_pass(stage: StepSetup, micro_batch: Any) -> None:
    """The passes of an online method over answers that are written and not yet learnt from."""
    method = own_method(stage.method)
    assert isinstance(method, OnlineMethod), "Only these methods score answers before they learn."
    needs = method.section.needs
    if needs.asks_policy:
        policy_pass(stage.scorer, micro_batch, needs, method.temperature)
    if needs.reference and stage.reference is not None:
        reference_pass(stage.reference, micro_batch, method.temperature)


def watch_layers(model: nn.Module, recorder: Recorder, prefix: Callable[[], str]) -> None:
    """Enter a phase at every border of a layer: `<prefix>.forward.first`, `.head`, `.backward.last`, ...

    Layers between the first and the last share the names `middle`, so that peaks of a shallow model stand for
    those of a deep one.
    """
    layers = _layers(base_model(model))
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

    decoder = base_model(model).get_decoder()
    decoder.register_forward_pre_hook(before_model)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(before_layer(index), with_kwargs=True)
    layers[-1].register_forward_hook(after_layers)


def gradients_of(stage: StepSetup) -> list[Tensor]:
    """The gradients of this rank's stepped weights."""
    return [parameter.grad for parameter in stage.parameters if parameter.grad is not None]


def own_gradients(model: nn.Module, recorder: Recorder) -> None:
    """Gradients belong to `gradients` from the moment they are there. Call it before hooks that free them."""

    def ready(parameter: Tensor) -> None:
        if parameter.grad is not None:
            recorder.own([parameter.grad], "gradients")

    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        parameter.register_post_accumulate_grad_hook(ready)


def own_states(stage: StepSetup, recorder: Recorder) -> None:
    """Assign the optimizer's states to `optimizer`, its float32 copies to `master copies`."""
    recorder.own(tensors_of(stage.optimizer.state), "optimizer")
    masters = getattr(stage.optimizer, "_masters", [])
    weights = set(map(id, stage.parameters))
    recorder.own([m for group in masters for m in group if id(m) not in weights], "master copies")


def tensors_of(state: Any) -> list[Tensor]:
    """The tensors in an optimizer's state."""
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def _layers(base: nn.Module) -> list[nn.Module]:
    """The decoder's layers: the longest module list of the model."""
    lists = [list(module) for module in base.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)
