"""The record of a model's layers: passes on tensors without data, of what runs: what a layer keeps and holds.

Three lengths of a row are enough for all others: at each event of the passes the live bytes are a parabola
of the length, and what is recorded are the moments of which one is the highest at some length. A layer stands
for its like with a layer before and after it: what comes next decides what it keeps. The first is a kind of
its own, since frozen embeddings need no gradient.
"""

# T: tokens of a row, D: hidden width.

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from memtrain.errors import LaunchError
from memtrain.memory.model_shape.layer_record import (
    LayerRecord,
    ModelRecord,
    Moment,
    Peak,
    SlicedLayers,
    SliceMoment,
    TravellingLayers,
    Treatment,
)
from memtrain.memory.model_shape.length_rules import own_layers
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.attention import MERGED
from memtrain.trainers.memory_meter.live_tensors import Recorder
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.heads.backbone import backbone_of, base_model
from memtrain.trainers.model.loading.locate import make_config
from memtrain.trainers.model.loading.module_shapes import decoder_layers
from memtrain.trainers.model.offload.activations import apply_checkpointing_and_offload
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers
from memtrain.trainers.tools.trace.fake_host import TracedHost
from memtrain.trainers.tools.trace.fake_model import bare_model, fakeify
from memtrain.trainers.tools.trace.liger import as_fake_liger
from memtrain.trainers.tools.trace.operator_rules import RULES, kernel_scratch, with_operator_rules
from memtrain.trainers.tools.trace.steps import own_gradients

Bytes = NDArray[np.int64]
"""Live bytes after each event."""

PIECES = ("mamba_chunk_size", "chunk_size", "block_size")
"""Keys of configurations that tell the tokens of a piece."""
USUAL_PIECE = 64
"""Tokens of a piece where layers carry a state and the configuration tells none. Source: transformers 5.23,
the default of `torch_chunk_gated_delta_rule`."""
TOKEN_BY_TOKEN = frozenset(("falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv", "xlstm", "zamba"))
"""Model types whose code loops over the tokens of a row: seconds for each hundred in a layer."""
FEW_TOKENS = 16
"""Tokens of a piece of theirs. Chosen."""
STEP_TOKENS = 128
"""Tokens between two lengths where a row is taken whole: a block of attention's kernels. Chosen."""
LENGTHS = (2, 3, 4)
"""Pieces of the rows that are passed. Chosen: with one piece a loop over pieces holds less than its share."""
IN_SLICES = ((2048, 512), (4096, 512), (4096, 1024), (4096, 2048))
"""Tokens of rows and of their slices that are passed, the last where scores of pairs are kept: as many as
what a moment grows with."""
TRAVELLING = (128, 192, 256)
"""Pieces of the rows whose activations travel: in shorter ones much is too small to do so."""
PLAIN = {"slice_tokens": 0, "offload": "none", "checkpoint_every": 0}
"""Treatments aside: each has passes of its own."""
BESIDE = "beside the layers"
"""Owner of what the passes hold and a step does not: the last output, of which the loss picks rows."""
SCRATCH = "kernel scratch"
"""Owner of a kernel's own memory."""
ROWS = np.geomspace(16, 2**20, 200)
"""Lengths at which a moment must be the highest to be recorded."""


@dataclass
class Marks:
    """Numbers of events at which a layer's passes begin and end."""

    forward: list[int] = field(default_factory=list[int])
    """Beginnings of all layers, and the end of the last."""
    backward: dict[int, int] = field(default_factory=dict[int, int])
    """Moments at which the gradient of a layer's input is there; by the number of layers that of the last
    output."""
    done: int = 0
    """End of the forward pass: what is there then is kept for the backward pass."""
    end: int = 0
    """End of the backward pass."""
    entering: int = -1
    """The allocation that enters the first layer."""
    leaving: int = -1
    """That which leaves the last."""

    def turn(self, at: int) -> tuple[int, int]:
        """Beginning and end of a layer's backward pass; that of a first layer whose input needs no gradient
        ends with all."""
        return self.backward[at + 1], self.backward.get(at, self.end) + 1


@dataclass(frozen=True)
class Passes:
    """The three passes over a row of one length: without gradients, with them, and with every layer computed
    again."""

    serials: Bytes
    """The allocation of each event, whose bytes are added or taken away in it."""
    sizes: Bytes
    is_gradient: NDArray[np.bool_]
    """Of a weight."""
    in_kernel: NDArray[np.bool_]
    """Events at which a kernel takes memory of its own, which is not among `sizes`."""
    begun: int
    bare: Marks
    trained: Marks
    again: Marks

    def live(self, first: int, last: int | None = None, *, of_gradients: bool = False) -> Bytes:
        """Live bytes before the first event and after each, of allocations that begin at events `first` to
        `last` (None: to the end); gradients of weights, or all others."""
        births = np.full(int(self.serials.max()) + 1, len(self.serials))
        np.minimum.at(births, self.serials, np.arange(len(self.serials)))
        born = births[self.serials]
        counts = (born >= first) & (self.is_gradient == of_gradients)
        if last is not None:
            counts &= born < last
        return np.concatenate([[0], np.cumsum(np.where(counts, self.sizes, 0))])

    def is_like(self, other: Passes) -> bool:
        """Whether the same happens at both lengths; not where code loops over pieces of a row."""
        marks = (self.bare, self.trained, self.again) == (other.bare, other.trained, other.again)
        return marks and np.array_equal(self.serials, other.serials)


class Span(NamedTuple):
    """The numbers of events of a layer's turn, and what is live after each."""

    events: Bytes
    own: Bytes
    gradients: Bytes
    """Of the layer's weights, as far as they came in this turn."""
    is_in_kernel: NDArray[np.bool_]


def measure_layers(
    config: Mapping[str, Any], settings: Settings, treatments: Collection[Treatment] = ()
) -> ModelRecord:
    """The record of every kind of layer under a run's precision, kernels, packing, attention and adapter."""
    settings = settings.model_copy(update=PLAIN)
    piece = piece_of(config)
    step = STEP_TOKENS if piece == 1 else piece
    kinds = kinds_of(config, settings)
    inner = {kind: next((at for at, one in enumerate(kinds) if at and one == kind), 0) for kind in kinds}
    depth = min(len(kinds), max(inner.values()) + 2)
    passed = Fit(step, LENGTHS, [_passes(config, settings, depth, count * step) for count in LENGTHS])
    # The last layer is of its own, too: what comes next is the norm after the layers.
    last = depth - 1 if kinds[depth - 1] == kinds[-1] else inner[kinds[-1]]
    stands = [0, *(inner[kind] for kind in kinds[1:-1]), last][-len(kinds) :]
    places = list(dict.fromkeys(stands))
    layers = tuple(passed.layer(at, is_last=at == depth - 1) for at in places)
    slices = "slices" in treatments and can_slice(config, settings)
    has_scores = any(moment.square for layer in layers for moment in layer.backward.moments)
    return ModelRecord(
        kinds=layers,
        order=tuple(places.index(at) for at in stands),
        piece=piece,
        # What no token adds are adapters in half precision, which are counted with the weights.
        tables=passed.moment(partial(_before_layers, entering=False)).model_copy(update={"start": 0.0}),
        embedded=passed.moment(partial(_before_layers, entering=True)),
        final_norm=passed.moment(_after_layers),
        final_backward=passed.peak(_final_backward),
        sliced=_in_slices(config, settings, kinds, has_scores=has_scores) if slices else None,
        travelling=_travelling(config, settings, depth)
        if "travelling" in treatments and piece == 1
        else None,
    )


def can_slice(config: Mapping[str, Any], settings: Settings) -> bool:
    """Whether layers may go over a row in slices: no state from token to token, attention that is merged."""
    merges = settings.attention in MERGED and settings.quantize != "8bit"
    return merges and not own_layers(make_config(config).to_dict())


def _in_slices(
    config: Mapping[str, Any], settings: Settings, kinds: Sequence[int], *, has_scores: bool
) -> SlicedLayers | None:
    """A layer of each kind over a row in slices; None where they get what cannot be cut. It keeps its input
    alone, so what comes before and after does not matter, but that the first one's needs no gradient."""
    depth = min(len(kinds), max(2, 1 + max(map(kinds.index, kinds))))
    lengths = IN_SLICES[: 3 + has_scores]
    try:
        passes = [
            _passes(config, settings.model_copy(update={"slice_tokens": part}), depth, row)
            for row, part in lengths
        ]
    except LaunchError:
        return None

    def fitted(count: Callable[[Passes], int]) -> SliceMoment:
        told = np.array([[1, row, part, part**2][: len(lengths)] for row, part in lengths], np.float64)
        found = np.linalg.solve(told, np.array([count(one) for one in passes], np.float64))
        return SliceMoment(**dict(zip(("start", "row", "slice", "square"), found.tolist(), strict=False)))

    def backward(one: Passes, at: int, *, in_kernel: bool) -> int:
        start, end = one.trained.turn(at)
        found = _span(one, one.trained.done, range(start, end), (start, end))
        return _most(found.own + found.gradients, found.is_in_kernel if in_kernel else None)

    def forward(one: Passes, at: int) -> int:
        begin, left = one.bare.forward[at : at + 2]
        return _most(_span(one, one.begun, range(begin, left + 1)).own) - _tables(one)

    has_kernel = any(one.in_kernel.any() for one in passes)
    return SlicedLayers(
        backward=tuple(fitted(partial(backward, at=at, in_kernel=False)) for at in range(depth)),
        in_kernel=tuple(fitted(partial(backward, at=at, in_kernel=True)) for at in range(depth * has_kernel)),
        forward=tuple(fitted(partial(forward, at=at)) for at in range(depth)),
        tables=fitted(_tables),
        final_backward=fitted(lambda one: _most(_of_final_norm(one, one.trained.done).own)),
    )


def _most(own: Bytes, among: NDArray[np.bool_] | None = None) -> int:
    """The most of some events; 0 without any."""
    return int((own if among is None else own[among]).max(initial=0))


def _tables(one: Passes) -> int:
    return _before_layers(one, entering=False)


def _travelling(config: Mapping[str, Any], settings: Settings, depth: int) -> TravellingLayers:
    """The same layers with all that they keep on its way to the host."""
    away = settings.model_copy(update={"offload": "all"})
    fit = Fit(
        STEP_TOKENS, TRAVELLING, [_passes(config, away, depth, count * STEP_TOKENS) for count in TRAVELLING]
    )

    def waiting(one: Passes) -> int:
        marks = one.trained
        return int(one.live(one.bare.end, marks.forward[-1])[marks.done]) - _output(one) - _tables(one)

    def stays(one: Passes) -> int:
        marks, at = one.trained, depth // 2 if depth > 2 else 0
        end = marks.backward[len(marks.forward) - 1]
        # What only the layers after it push out is gone by the end of their turn.
        begin, left = marks.forward[at : at + 2]
        return int(one.live(begin, left)[min(marks.done, end)]) if depth > 2 else 0

    def in_turn(one: Passes, at: int) -> Span:
        start, end = one.trained.turn(at)
        found = _span(one, one.bare.end, range(start, end), (start, end))
        return found._replace(own=found.own - _tables(one))

    def in_forward(one: Passes) -> Span:
        marks = one.trained
        found = _span(one, one.bare.end, range(marks.forward[0], marks.forward[-1] + 1))
        return found._replace(own=found.own - _tables(one))

    turns = [fit.peak(partial(in_turn, at=at)) for at in range(depth)]
    later = turns[1:] or turns
    return TravellingLayers(
        depth=depth,
        stays=fit.moment(stays),
        waiting=fit.moment(waiting),
        forward=fit.peak(in_forward),
        backward=Peak(
            moments=tuple(moment for one in later for moment in one.moments),
            in_kernel=tuple(moment for one in later for moment in one.in_kernel),
        ),
        first=turns[0],
    )


def piece_of(config: Mapping[str, Any]) -> int:
    """Tokens of the pieces in which a model's code takes a row; 1 where it takes the row whole."""
    known = make_config(config).get_text_config()
    if known.model_type in TOKEN_BY_TOKEN:
        return FEW_TOKENS
    told = max((int(found) for key in PIECES if (found := getattr(known, key, None))), default=0)
    return told or (USUAL_PIECE if own_layers(known.to_dict()) else 1)


def kinds_of(config: Mapping[str, Any], settings: Settings) -> tuple[int, ...]:
    """The kind of each layer: those of one class with alike parameters and alike attention are one."""
    model = bare_model(config, settings.model_copy(update={"adapter": None, "quantize": "none"}))
    found: dict[Any, int] = {}
    kinds = list[int]()
    for layer in decoder_layers(backbone_of(base_model(model))):
        windows = {getattr(module, "sliding_window", None) for module in layer.modules()} - {None}
        parameters = tuple((name, p.shape) for name, p in layer.named_parameters())
        kinds.append(found.setdefault((type(layer), parameters, frozenset(windows)), len(found)))
    return tuple(kinds)


class Fit:
    """Bytes at all lengths, from passes at three: `step` tokens apart."""

    def __init__(self, step: int, counts: Sequence[int], passes: Sequence[Passes]) -> None:
        self.passes = passes
        self.step, self.lengths = (counts[1] - counts[0]) * step, [count * step for count in counts]
        self.is_alike = all(passes[0].is_like(other) for other in passes[1:])

    def layer(self, at: int, *, is_last: bool) -> LayerRecord:
        """The record of a layer."""

        def kept(one: Passes) -> int:
            begin, end = one.trained.forward[at : at + 2]
            of_layer = int(one.live(begin, end)[one.trained.done])
            return of_layer - _output(one) * is_last

        def in_passes(one: Passes) -> Span:
            marks = one.trained
            start, end = marks.turn(at)
            begin, left = marks.forward[at : at + 2]
            return _span(one, begin, [*range(begin, left + 1), *range(start, end)], (start, end))

        def in_forward(one: Passes) -> Span:
            begin, left = one.bare.forward[at : at + 2]
            return _span(one, one.begun, range(begin, left + 1))

        def in_recomputation(one: Passes) -> Span:
            start, end = one.again.turn(at)
            return _span(one, one.again.done, range(start, end), (start, end))

        return LayerRecord(
            kept=self.moment(kept),
            backward=self.peak(in_passes),
            forward=self.peak(in_forward),
            recomputed=self.peak(in_recomputation),
        )

    def moment(self, count: Callable[[Passes], int]) -> Moment:
        """The bytes that a function counts, at all lengths."""
        start, each, square = self._parabolas(np.array([[count(one)] for one in self.passes]))
        return Moment(start=start[0], each=each[0], square=square[0])

    def peak(self, of: Callable[[Passes], Span]) -> Peak:
        """The moments of a span that are the highest at some length."""
        spans = [of(one) for one in self.passes]
        highest = self._highest(spans, lambda span: np.ones(len(span.own), np.bool_))
        if not any(span.is_in_kernel.any() for span in spans):
            return Peak(moments=highest)
        return Peak(moments=highest, in_kernel=self._highest(spans, lambda span: span.is_in_kernel))

    def _highest(
        self, spans: Sequence[Span], among: Callable[[Span], NDArray[np.bool_]]
    ) -> tuple[Moment, ...]:
        if not self.is_alike:
            tops = [int(np.where(among(span), span.own, -1).argmax()) for span in spans]
            owns = np.array([[span.own[top]] for span, top in zip(spans, tops, strict=True)])
            gradients = [max(int(span.gradients[top]) for span, top in zip(spans, tops, strict=True))]
            return self._moments(owns, gradients)
        chosen = np.flatnonzero(among(spans[-1]))
        owns = np.array([span.own[chosen] for span in spans])
        gradients = spans[-1].gradients[chosen]
        start, each, square = self._parabolas(owns)
        bytes_at = start[:, None] + each[:, None] * ROWS + square[:, None] * ROWS**2
        tops = np.unique([bytes_at.argmax(0), (bytes_at + gradients[:, None]).argmax(0)])
        return self._moments(owns[:, tops], [int(gradients[top]) for top in tops])

    def _moments(self, owns: Bytes, gradients: Sequence[int]) -> tuple[Moment, ...]:
        found = zip(*self._parabolas(owns), gradients, strict=True)
        return tuple(Moment(start=s, each=e, square=q, gradients=g) for s, e, q, g in found)

    def _parabolas(self, owns: Bytes) -> tuple[NDArray[np.float64], ...]:
        """(start, each, square) through the bytes at the three lengths, [3, n]."""
        low, middle, high = owns.astype(np.float64)
        first, second, _ = self.lengths
        square = (high - 2 * middle + low) / (2 * self.step**2)
        each = (middle - low) / self.step - square * (first + second)
        return low - each * first - square * first**2, each, square


def _span(one: Passes, born: int, events: Sequence[int], turn: tuple[int, int] = (0, 0)) -> Span:
    """Live bytes at some events of what came since the event `born`; gradients that came in a turn."""
    numbers = np.array(events)
    in_kernel = np.concatenate([[False], one.in_kernel])[numbers]
    gradients = one.live(*turn, of_gradients=True)[numbers]
    return Span(numbers, one.live(born)[numbers], gradients, in_kernel)


def _before_layers(one: Passes, *, entering: bool) -> int:
    """What is made before the layers and kept: their input, or all else."""
    marks, begun = one.trained, one.bare.end
    kept = int(one.live(begun, marks.forward[0])[marks.done])
    changes = one.sizes[: marks.done][one.serials[: marks.done] == marks.entering]
    own = int(changes.sum())
    return own if entering else kept - own


def _output(one: Passes) -> int:
    """The output of the last layer, where the norm after it keeps that."""
    marks = one.trained
    return int(one.sizes[: marks.done][one.serials[: marks.done] == marks.leaving].sum())


def _after_layers(one: Passes) -> int:
    """What the norm after the layers keeps, its input too, without its output."""
    marks = one.trained
    return int(one.live(marks.forward[-1], marks.done)[marks.done]) + _output(one)


def _final_backward(one: Passes) -> Span:
    """The norm's backward pass, over what it kept of its own: of that some is gone at the highest moment."""
    marks = one.trained
    found = _of_final_norm(one, marks.forward[-1])
    kept = one.live(marks.forward[-1], marks.done)[marks.done]
    return found._replace(own=found.own - kept)


def _of_final_norm(one: Passes, born: int) -> Span:
    """What is live in the norm's backward pass of what came since the event `born`."""
    marks = one.trained
    return _span(one, born, range(marks.done, marks.backward[max(marks.backward)] + 1))


def _passes(config: Mapping[str, Any], settings: Settings, depth: int, length: int) -> Passes:
    """The passes through the first layers at a length, treated as the settings say: layers that go over
    slices, or whose activations travel, are not computed again besides."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        with_operator_rules(settings.device),
        as_fake_liger(settings),
    ):
        with unset_fake_temporarily():
            model = bare_model(config, settings, depth)
        fakeify(model)
        base = base_model(model)
        recorder = Recorder("cpu", rules=RULES, scratch=kernel_scratch(settings.attention))
        with recorder:
            recorder.own([*model.parameters(), *model.buffers()], "weights")
            own_gradients(model, recorder)
            ids_1T = torch.zeros(1, length, dtype=torch.long)  # noqa: N806
            begun = len(recorder.events)
            run = partial(_passed, base, ids_1T, recorder, takes_layout=settings.attention != "transformers")
            if settings.slice_tokens or settings.offload != "none":
                apply_checkpointing_and_offload(model, settings, TracedHost())
            bare = Marks(end=begun)
            if settings.offload == "none":
                with torch.no_grad():
                    bare = run()
            trained = again = run()
            if not settings.slice_tokens and settings.offload == "none":
                # A gradient that is added to one would be there twice.
                model.zero_grad()
                checkpoint_layers(base, 1)
                again = run()
        owners = [recorder.owner_of(serial) for serial, _ in recorder.events]
        own = [num_bytes or -recorder.origins[serial].num_bytes for serial, num_bytes in recorder.events]
        weighs = np.array([owner not in (BESIDE, SCRATCH) for owner in owners])
        return Passes(
            serials=np.array([serial for serial, _ in recorder.events]),
            sizes=np.array(own) * weighs,
            is_gradient=np.array([owner == "gradients" for owner in owners]),
            in_kernel=np.array(
                [owner == SCRATCH and size > 0 for owner, size in zip(owners, own, strict=True)]
            ),
            begun=begun,
            bare=bare,
            trained=trained,
            again=again,
        )


class Loss(torch.autograd.Function):
    """A number made of hidden states, whose gradient is let go of by autograd as that of any loss is."""

    @staticmethod
    def forward(ctx: Any, hidden_1TD: Tensor) -> Tensor:  # noqa: N803
        """A number."""
        ctx.shape, ctx.dtype = hidden_1TD.shape, hidden_1TD.dtype
        return hidden_1TD.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """A gradient of that shape."""
        return torch.empty(ctx.shape, dtype=ctx.dtype)


def _passed(base: Any, ids_1T: Tensor, recorder: Recorder, *, takes_layout: bool) -> Marks:  # noqa: N803
    """Run the backbone, and its backward pass where gradients are on; when each layer began and ended.

    `takes_layout`: attention is memtrain's own, which is told where rows begin: here one alone.
    """
    marks, backbone = Marks(), backbone_of(base)
    layers = decoder_layers(backbone)

    def now() -> int:
        return len(recorder.events)

    def gradient_at(at: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            marks.backward[at] = now()

        return hook

    def before(at: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            marks.forward.append(now())
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            if not at:
                marks.entering = recorder.serial_of(hidden)
            if hidden.requires_grad:
                hidden.register_hook(gradient_at(at))

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        marks.forward.append(now())
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        marks.leaving = recorder.serial_of(hidden)
        if hidden.requires_grad:
            hidden.register_hook(gradient_at(len(layers)))

    hooks = [one.register_forward_pre_hook(before(at), with_kwargs=True) for at, one in enumerate(layers)]
    hooks.append(layers[-1].register_forward_hook(after))
    asked = {"layout": packed_layout([ids_1T.shape[1]])} if takes_layout else {}
    hidden_1TD: Tensor = backbone(input_ids=ids_1T, use_cache=False, **asked)[0]  # noqa: N806
    marks.done = now()
    if hidden_1TD.requires_grad:
        recorder.own([hidden_1TD], BESIDE)
        Loss.apply(hidden_1TD).backward()
    marks.end = now()
    for hook in hooks:
        hook.remove()
    return marks
