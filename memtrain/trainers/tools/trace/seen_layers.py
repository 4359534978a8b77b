"""Passes through one layer of each kind, on tensors without data: what a layer keeps, and holds at most.

For models whose layers no formula knows. Three lengths of a row stand for all others.
"""

# T: tokens of a row, D: hidden width.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from memtrain.memory.model_shape.seen_layers import Growth, SeenLayer, SeenLayers
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.memory_meter.live_tensors import Recorder
from memtrain.trainers.model.attention.row_layout import packed_layout
from memtrain.trainers.model.heads.backbone import backbone_of, base_model
from memtrain.trainers.model.loading.locate import make_config
from memtrain.trainers.model.loading.module_shapes import decoder_layers
from memtrain.trainers.model.offload.checkpointing import checkpoint_layers
from memtrain.trainers.tools.trace.fake_model import bare_model, fakeify
from memtrain.trainers.tools.trace.operator_rules import RULES, kernel_scratch, with_operator_rules
from memtrain.trainers.tools.trace.steps import own_gradients

PIECES = ("mamba_chunk_size", "chunk_size", "block_size")
"""Keys of configurations that tell the tokens of a piece."""
USUAL_PIECE = 64
"""Tokens of a piece where the configuration tells none. Source: transformers 5.23, the default of
`torch_chunk_gated_delta_rule`."""
TOKEN_BY_TOKEN = frozenset(("falcon_mamba", "jamba", "mamba", "recurrent_gemma", "rwkv", "xlstm", "zamba"))
"""Model types whose code loops over the tokens of a row: seconds for each hundred in a layer."""
FEW_TOKENS = 16
"""Tokens of a piece of theirs. Chosen."""
BESIDE = "beside the layers"
"""Owner of what the passes hold and a step does not: the last output, and a gradient to begin with."""
LENGTHS = (2, 3, 4)
"""Pieces of the rows that are passed. Chosen: with one piece a loop over pieces holds less than its share."""


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


class Change(NamedTuple):
    """Beginning or end of an allocation."""

    serial: int
    num_bytes: int
    """Added, or taken away."""
    is_gradient: bool = False
    """Of a weight."""


class Seen(NamedTuple):
    """Bytes of a layer at a length, as in SeenLayer."""

    kept: int
    backward: int
    gradients: int
    forward: int
    recomputed: int
    recomputed_gradients: int


def see_layers(config: Mapping[str, Any], settings: Settings) -> SeenLayers:
    """The activations of every kind of layer under a run's precision, attention and adapter.

    Quantized weights are taken as they are when unpacked, and Liger's kernels as transformers' own code.
    """
    plain = settings.model_copy(update={"liger": False, "kernels": "transformers", "quantize": "none"})
    firsts, order = kinds_of(config, plain)
    piece = piece_of(config)
    passes = [_seen(config, plain, max(firsts) + 1, count * piece) for count in LENGTHS]
    seen = tuple(
        SeenLayer(
            kept=_growth(piece, [one[at].kept for one in passes]),
            backward=_growth(piece, [one[at].backward for one in passes]),
            gradients=max(one[at].gradients for one in passes),
            forward=_growth(piece, [one[at].forward for one in passes]),
            recomputed=_growth(piece, [one[at].recomputed for one in passes]),
            recomputed_gradients=max(one[at].recomputed_gradients for one in passes),
        )
        for at in firsts
    )
    return SeenLayers(kinds=seen, order=order, piece=piece)


def piece_of(config: Mapping[str, Any]) -> int:
    """Tokens of the pieces in which a model's code takes a row."""
    known = make_config(config).get_text_config()
    if known.model_type in TOKEN_BY_TOKEN:
        return FEW_TOKENS
    return max((int(found) for key in PIECES if (found := getattr(known, key, None))), default=USUAL_PIECE)


def _growth(piece: int, num_bytes: Sequence[int]) -> Growth:
    """The parabola through the bytes at `LENGTHS`, three lengths with one piece more each."""
    low, middle, high = num_bytes
    bend = high - 2 * middle + low
    # On a grid of pieces p: low + (p - p0) * (middle - low) + (p - p0) * (p - p0 - 1) / 2 * bend.
    first = LENGTHS[0]
    each = middle - low - bend * (2 * first + 1) / 2
    start = low - first * (middle - low) + first * (first + 1) / 2 * bend
    return Growth(start=start, each=each / piece, square=bend / 2 / piece**2)


def kinds_of(config: Mapping[str, Any], settings: Settings) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the first layer of each kind, the kind of each layer): layers of one class with alike parameters."""
    model = bare_model(config, settings.model_copy(update={"adapter": None}))
    layers = decoder_layers(backbone_of(base_model(model)))
    firsts: dict[Any, int] = {}
    order = list[int]()
    for at, layer in enumerate(layers):
        signature = type(layer), tuple((name, p.shape) for name, p in layer.named_parameters())
        firsts.setdefault(signature, at)
        order.append(list(firsts).index(signature))
    return tuple(firsts.values()), tuple(order)


def _seen(config: Mapping[str, Any], settings: Settings, depth: int, length: int) -> list[Seen]:
    """The bytes of each of the first layers at a length."""
    with FakeTensorMode(allow_non_fake_inputs=True), with_operator_rules(settings.device):
        with unset_fake_temporarily():
            model = bare_model(config, settings, depth)
        fakeify(model)
        base = base_model(model)
        base.enable_input_require_grads()
        recorder = Recorder("cpu", rules=RULES, scratch=kernel_scratch(settings.attention))
        with recorder:
            recorder.own([*model.parameters(), *model.buffers()], "weights")
            own_gradients(model, recorder)
            ids_1T = torch.zeros(1, length, dtype=torch.long)
            begun = len(recorder.events)
            run = partial(_passed, base, ids_1T, recorder, takes_layout=settings.attention != "transformers")
            with torch.no_grad():
                bare = run()
            trained = run()
            # A gradient that is added to one would be there twice.
            model.zero_grad()
            checkpoint_layers(base, 1)
            again = run()
        changes = _changes_of_layers(recorder)
    return [_of_layer(changes, begun, (bare, trained, again), at) for at in range(depth)]


def _of_layer(changes: Sequence[Change], begun: int, passes: tuple[Marks, Marks, Marks], at: int) -> Seen:
    """The bytes of a layer: in its own passes, of what came since it began.

    What was there before is the layers' before it, or everyone's: positions, and the layer's input.
    """
    bare, trained, again = passes
    here, after = trained.forward[at], trained.forward[at + 1]
    start, end = trained.backward[at + 1], trained.backward[at] + 1
    own = _live(changes, range(here, len(changes)))
    whole = _live(changes, range(here, len(changes)), gradients=range(start, end))
    highest = max(*range(here, after + 1), *range(start, end), key=own.__getitem__)
    forward = _live(changes, range(begun, len(changes)))[bare.forward[at] : bare.forward[at + 1] + 1]
    recomputed, recomputed_gradients = _recomputed(changes, again, at)
    return Seen(
        kept=_live(changes, range(here, after))[trained.done],
        backward=own[highest],
        gradients=whole[highest] - own[highest],
        forward=max(forward),
        recomputed=recomputed,
        recomputed_gradients=recomputed_gradients,
    )


def _recomputed(changes: Sequence[Change], again: Marks, at: int) -> tuple[int, int]:
    """(most that a layer holds when it is computed again, of what came since the backward pass began, its
    weights' gradients at that moment)."""
    turn = range(again.backward[at + 1], again.backward[at] + 1)
    own = _live(changes, range(again.done, len(changes)))
    whole = _live(changes, range(again.done, len(changes)), gradients=turn)
    highest = max(turn, key=own.__getitem__)
    return own[highest], whole[highest] - own[highest]


def _changes_of_layers(recorder: Recorder) -> list[Change]:
    """The changes in order; those of what is beside the layers weigh nothing."""

    def change(serial: int, num_bytes: int) -> Change:
        owner = recorder.owner_of(serial)
        size = 0 if owner == BESIDE else num_bytes or -recorder.origins[serial].num_bytes
        return Change(serial, size, owner == "gradients")

    return [change(*event) for event in recorder.events]


def _live(changes: Sequence[Change], born: range, gradients: range = range(0)) -> list[int]:
    """Live bytes after each change, from none on, of allocations that begin at these numbers; of gradients at
    those."""
    begins = {one.serial: number for number, one in reversed(list(enumerate(changes)))}
    asked = {one.serial: gradients if one.is_gradient else born for one in changes}
    sizes = (one.num_bytes if begins[one.serial] in asked[one.serial] else 0 for one in changes)
    return list(accumulate(sizes, initial=0))


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
            if hidden.requires_grad:
                hidden.register_hook(gradient_at(at))

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        marks.forward.append(now())
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(gradient_at(len(layers)))

    hooks = [one.register_forward_pre_hook(before(at), with_kwargs=True) for at, one in enumerate(layers)]
    hooks.append(layers[-1].register_forward_hook(after))
    asked = {"layout": packed_layout([ids_1T.shape[1]])} if takes_layout else {}
    hidden_1TD: Tensor = backbone(input_ids=ids_1T, use_cache=False, **asked)[0]  # noqa: N806
    marks.done = now()
    if hidden_1TD.requires_grad:
        gradient_1TD = torch.empty_like(hidden_1TD)  # noqa: N806
        recorder.own([hidden_1TD, gradient_1TD], BESIDE)
        hidden_1TD.backward(gradient_1TD)
    for hook in hooks:
        hook.remove()
    return marks
