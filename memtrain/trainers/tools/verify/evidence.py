"""Evidence of a step: operators, kernels, and the trace of each strategy of the plan."""

# V vocabulary

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

from memtrain.memory.strategies.base import Evidence
from memtrain.memory.strategies.registry import used_in
from memtrain.trainers.batches.answer_batches import AnswerFeed
from memtrain.trainers.batches.collate import TokenFeed
from memtrain.trainers.build.components import Built
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.model.offload.weights import weights_of
from memtrain.trainers.model.streamed.apply import StreamedForward
from memtrain.trainers.optim.compressed_moments import CODES
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.protocols.feed import StepWork
from memtrain.trainers.tools.verify.record import Side

ATTENTION_OPS = ("attention", "flex")
"""Parts of the names of attention operators."""
MOST_KERNELS = 8
"""Named device kernels, most time first. Taste."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Operators and passes of one step of a side."""

    attention: str
    """Name of the attention function that the model's layers call."""
    attention_ops: dict[str, int]
    """Attention operators of torch, with how often each ran; empty where it is plain matrix products."""
    layer_passes: float
    """Forward passes of a layer for each micro-batch: 1, or 2 where all are computed again."""
    layers_again: float
    """Of these, inside the backward pass."""
    largest_logits_rows: int
    """Rows of the largest tensor as wide as the vocabulary that was made."""
    micro_batches: int
    flattened: int
    """Micro-batches that were one row without padding between."""
    forwarded_tokens: int
    own_tokens: int
    """The same without padding."""
    vocab_size: int
    offloaded_bytes: int
    fetched_bytes: int
    """Bytes of weights that came from the host."""
    gradients_left: int
    """Weights that have a gradient after the backward pass."""
    kernels: tuple[str, ...]
    """On a GPU, the kernels that took most time."""


class _Operators(TorchDispatchMode):
    """Counts attention operators, and sees the tallest tensor that is as wide as the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.attention: Counter[str] = Counter()
        self.largest_rows = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if any(word in name for word in ATTENTION_OPS):
            self.attention[name.removesuffix(".default")] += 1
        # A transposed weight is as wide, and is no tensor of its own.
        is_own = isinstance(out, Tensor) and out.ndim > 1 and not func.is_view
        if is_own and out.shape[-1] == self.vocab_size:
            self.largest_rows = max(self.largest_rows, out.numel() // self.vocab_size)
        return out


@dataclass(slots=True)
class _Layers:
    """Counts the forward passes of the layers' first parts, recomputations among them."""

    passes: int = 0
    again: int = 0
    num_layers: int = 0
    handles: list[Any] = field(default_factory=list[Any])

    def watch(self, model: nn.Module) -> None:
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                self.num_layers += 1
                first = next(layer.children())
                self.handles.append(first.register_forward_pre_hook(self._passed))

    def _passed(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self.passes += 1
            self.again += torch._C._current_graph_task_id() != -1


class Watch:
    """Watch over the passes of a step: `with Watch(side, number) as watch`, then `watch.ran`."""

    def __init__(self, side: Side, number: int) -> None:
        self.side = side
        self.work = side.work(number)
        self.ran: Ran | None = None
        """Operators and passes, once the pass is over."""

    def __enter__(self) -> Watch:
        built = self.side.built
        self._before = _traffic(built)
        self._fetched_before = _fetched(built)
        self._layers = _Layers()
        self._layers.watch(built.model)
        self._stack = ExitStack()
        self._kernels = self._stack.enter_context(_kernels(self.side))
        self._operators = self._stack.enter_context(
            _Operators(base_model(built.model).config.get_text_config().vocab_size)
        )
        return self

    def __exit__(self, *fault: object) -> None:
        self._stack.close()
        for handle in self._layers.handles:
            handle.remove()
        if fault[0] is None:
            self.ran = self._summary()

    def _summary(self) -> Ran:
        side, layers = self.side, self._layers
        micro_batches = [
            side.stepper.steps.feed.micro_batch(sequences) for sequences in self.work.micro_batches
        ]
        inside = [_inputs(micro_batch) for micro_batch in micro_batches]
        return Ran(
            attention=str(base_model(side.built.model).config._attn_implementation),
            attention_ops=dict(self._operators.attention),
            layer_passes=layers.passes / max(1, layers.num_layers * len(micro_batches)),
            layers_again=layers.again / max(1, layers.num_layers * len(micro_batches)),
            largest_logits_rows=self._operators.largest_rows,
            micro_batches=len(micro_batches),
            flattened=sum("layout" in inputs for inputs in inside),
            forwarded_tokens=sum(int(inputs["input_ids"].numel()) for inputs in inside),
            own_tokens=sum(micro_batch.num_tokens for micro_batch in micro_batches),
            vocab_size=self._operators.vocab_size,
            offloaded_bytes=_traffic(side.built) - self._before,
            fetched_bytes=_fetched(side.built) - self._fetched_before,
            gradients_left=sum(parameter.grad is not None for parameter in side.stepper.parameters),
            kernels=tuple(self._kernels),
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """Evidence that a strategy leaves in a step."""

    acted: bool
    had_work: bool
    """Whether a strategy had work to do: small steps fit a micro-batch, and a tile of logits."""
    expected: str
    """Evidence that was expected."""


def traces(planned: Side, ran: Ran, plainly: Ran, work: StepWork) -> dict[str, Trace]:
    """The strategies of the plan, each with the trace it left; strategies without a trace are not in it."""
    settings, feed = planned.plan.settings, planned.stepper.steps.feed
    logits_bytes = plainly.largest_logits_rows * plainly.vocab_size * 4
    sequences, tokens = len(work.sequences), int(feed.tokens[work.sequences].sum())
    is_cut = sequences > settings.micro_batch_size or tokens > (settings.micro_tokens or tokens)
    pieces = _most_pieces(planned)
    optimizer = planned.built.optimizer
    form = optimizer.form.name if isinstance(optimizer, MasterWeights) else ""
    found: dict[Evidence, Trace] = {
        "rows end to end": Trace(ran.flattened == ran.micro_batches, True, "concatenated rows"),
        "rows in one sequence": Trace(pieces > 1, pieces > 1, "sequences of several rows"),
        "fewer tokens": Trace(
            ran.forwarded_tokens < plainly.own_tokens, _has_groups(planned), "tokens saved"
        ),
        "several micro-batches": Trace(ran.micro_batches > 1, is_cut, "several micro-batches"),
        # The forward pass over weights from the host has no graph, and is not counted.
        "all layers twice": Trace(
            ran.layer_passes > 1.5 or (settings.weights_offload and ran.layers_again >= 1),
            True,
            "recomputed layers",
        ),
        "some layers twice": Trace(ran.layer_passes > 1, True, "recomputed layers"),
        "layers in parts": Trace(
            ran.layer_passes > 1,
            tokens > settings.slice_tokens * ran.micro_batches,
            "layers in slices",
        ),
        "bytes that travel": Trace(ran.offloaded_bytes > 0, True, "offloaded bytes"),
        "weights that travel": Trace(ran.fetched_bytes > 0, True, "weights fetched from the host"),
        "logits in parts": Trace(
            ran.largest_logits_rows < plainly.largest_logits_rows,
            logits_bytes > settings.loss_tile_bytes,
            "logits in chunks",
        ),
        "freed gradients": Trace(ran.gradients_left == 0, True, "gradients freed in the backward pass"),
        "bits beside the weights": Trace(form == "split", True, "split copies"),
        "weights without copies": Trace(form == "stochastic", True, "weights without float32 copies"),
        "moments in 8 bits": Trace(
            bool(optimizer.state)
            and all(set(CODES.values()) <= state.keys() for state in optimizer.state.values()),
            True,
            "8-bit moments",
        ),
        "log-probs in the feed": Trace(_is_precomputed(planned), True, "precomputed log-probs"),
        "policy as reference": Trace(
            planned.built.reference is planned.built.scorer, True, "passes with the adapter switched off"
        ),
    }
    return {one.name: found[one.evidence] for one in used_in(settings) if one.evidence is not None}


def _inputs(batch: Any) -> dict[str, Any]:
    inside = getattr(batch, "answers", batch)
    return getattr(inside, "micro_batch", inside).model_inputs()


def _most_pieces(side: Side) -> int:
    """Rows of the sequence that holds most."""
    feed = side.built.train
    return int(np.diff(feed.sequences.bin_ptr).max(initial=0)) if isinstance(feed, TokenFeed) else 0


def _has_groups(side: Side) -> bool:
    """Whether a prompt has several answers in one sequence, or in one micro-batch of a rollout."""
    feed = side.built.train
    if not isinstance(feed, AnswerFeed):
        return side.plan.recipe.online is not None and side.plan.settings.micro_batch_size > 1
    return feed.sequences.num_answers > 1 or int(feed.weights.max(initial=0)) > 1


def _is_precomputed(side: Side) -> bool:
    return isinstance(side.built.train, AnswerFeed) and side.built.train.reference_IK is not None


def offloader_of(built: Built) -> Offloader | None:
    """Offloader of the activations of a side's model; None where nothing is moved."""
    for layer in built.model.modules():
        run: Callable[..., Any] | None = getattr(layer, "_gradient_checkpointing_func", None)
        forward = vars(layer).get("forward")
        streamed = forward.leaving if isinstance(forward, StreamedForward) else None
        for owner in (getattr(one, "__self__", None) for one in (run, streamed)):
            if isinstance(owner, Offloader):
                return owner
    return None


def _traffic(built: Built) -> int:
    offloader = offloader_of(built)
    return 0 if offloader is None else offloader.traffic.out_bytes


def _fetched(built: Built) -> int:
    weights = weights_of(built.model)
    return 0 if weights is None else weights.back_bytes


@contextmanager
def _kernels(side: Side) -> Iterator[list[str]]:
    """The device kernels of the enclosed work, filled at its end; nothing on a CPU."""
    found: list[str] = []
    if side.stepper.device.type != "cuda":
        yield found
        return
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield found
    spent = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    found += [f"{event.key} x{event.count}" for event in spent[:MOST_KERNELS]]
