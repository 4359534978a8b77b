"""A backbone's passes of training as recordings: forward and backward are replayed, the loss stays outside.

A model's hidden states are a pass of fixed operators over fixed buffers, once its rows have one of a few
shapes. So rows are padded to a capacity: tokens behind the last row attend to themselves alone and get no
gradient, and `cu_seqlens` ends in segments of no tokens. What depends on numbers of Python (denominators,
norms, clipping, a reference) is the loss; it runs between the two recordings, while the device works on the
first, and is the same code for every method.

The first pass of a shape is computed by hand on the buffers, then recorded, and its replay compared with it.

Source: CUDA graphs over one pool, inputs copied in, gradients accumulated in place: torchtitan's trainer
(2026), there of a whole micro-batch.
"""

# B rows, T tokens of a row (C with padding), D hidden size, S segments

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtrain.errors import first_line_of
from memtrain.trainers.model.attention.row_layout import Layout, Part
from memtrain.trainers.runtime.cuda_graphs import CudaGraphs, Recorder, Recording
from memtrain.trainers.runtime.oom_errors import is_out_of_memory
from memtrain.trainers.runtime.operator_tape import OperatorTape
from memtrain.trainers.runtime.seed import random_state, restore_random_state

MOST_SHAPES = 16
"""Shapes that are recorded; others are computed by hand. Each keeps its hidden states. Taste."""
LEAST_TOKENS = 128
"""Rows are padded to a multiple of this, and of a sixteenth of the power of two above: an eighth at most."""
LEAST_SEGMENTS = 8
BY_BOUNDS_ON_DEVICE = ("memtrain_torch_varlen", "memtrain_fa2", "memtrain_fa3")
"""Attention that reads where segments begin from tensors alone; that of others is made of Python's numbers,
and is recorded for rows of the very same segments."""
ROUNDING = 4.0
"""Of two passes by hand of which one is recorded, how many times their difference a replay may be away:
kernels with atomic sums differ from themselves. Taste."""


def make_recorder(device: str) -> Recorder:
    """Records on the current stream of a GPU; on a CPU by a tape of operators, in tests."""
    return CudaGraphs(torch.cuda.current_stream()) if device == "cuda" else OperatorTape()


Inputs = dict[str, Any]
Run = Callable[[Inputs], Tensor]
"""A backbone's hidden states [B, T, D] of its inputs."""


def capacity(num_tokens: int) -> int:
    """Tokens that a row of `num_tokens` is padded to."""
    step = max(LEAST_TOKENS, (1 << max(0, num_tokens - 1).bit_length()) // 16)
    return -(-num_tokens // step) * step


def _power(number: int, least: int) -> int:
    return max(least, 1 << max(0, number - 1).bit_length())


class Unknown(tuple[int, ...]):
    """Bounds that nothing recorded may depend on: the next row's are others."""

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("its attention is made from where the segments of one row begin")

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("its attention is made from where the segments of one row begin")

    def __hash__(self) -> int:
        raise RuntimeError("its attention is made from where the segments of one row begin")


@dataclass(frozen=True, slots=True, eq=False)
class BufferedLayout(Layout):
    """A layout of a capacity, whose bounds are known to the device alone."""

    capacity: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return self.capacity


@dataclass(frozen=True, slots=True)
class Padded:
    """A backbone's inputs at their capacity."""

    inputs: Inputs
    numbers: tuple[object, ...]
    """Numbers of Python that a recording holds of them."""
    kept: tuple[tuple[int, int], ...]
    """Ranges of the padded places that are places of the rows, in their order."""

    def cut(self, hidden_BCD: Tensor) -> Tensor:
        """[B, T, D] without padding."""
        parts = [hidden_BCD[:, first:end] for first, end in self.kept]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def padded(inputs: Inputs, *, repeats_positions: bool, by_bounds: bool) -> Padded:
    """A backbone's inputs at their capacity.

    `repeats_positions`: padded rows repeat their last position. `by_bounds`: attention is made of Python's
    bounds, which the numbers then name.
    """
    layout: Layout | None = inputs.get("layout")
    if layout is None:
        return _padded_rows(inputs, repeats_positions=repeats_positions)
    num_prompt, num_tokens, to_prompt = layout.num_prompt_tokens, layout.num_tokens, layout.to_prompt
    num_own = num_tokens - num_prompt
    # Padding behind shared prompts is a group of its own: a prompt and a completion, of a token at least.
    ahead = 0 if to_prompt is None else capacity(num_prompt + 1) - num_prompt
    behind = capacity(num_own + (to_prompt is not None)) - num_own
    places = torch.arange(ahead + behind, device=inputs["position_ids"].device)[None]
    apart = {"input_ids": torch.zeros_like(places), "position_ids": places}
    own = {
        name: torch.cat(
            [
                inputs[name][:, :num_prompt],
                behind_rows[:, :ahead],
                inputs[name][:, num_prompt:],
                behind_rows[:, ahead:],
            ],
            1,
        )
        for name, behind_rows in apart.items()
    }
    num_prompts = 0 if to_prompt is None else len(to_prompt.key_bounds) - 1
    within = _with_segment(_with_segment(layout.within, num_prompts, ahead, ahead), None, behind, behind)
    parts = [within] if to_prompt is None else [within, _with_segment(to_prompt, None, behind, ahead)]
    span = max(layout.longest_span, ahead + behind)
    if by_bounds:
        numbers = [(part.query_bounds, part.key_bounds) for part in parts]
    else:
        parts, span = [_on_device(part) for part in parts], _power(span, LEAST_TOKENS)
        numbers = [(len(part.cu_query), part.max_query, part.max_key) for part in parts]
    row = BufferedLayout(
        within=parts[0],
        to_prompt=parts[1] if len(parts) > 1 else None,
        num_prompt_tokens=num_prompt + ahead,
        position_ids=own["position_ids"],
        longest_span=span,
        capacity=num_tokens + ahead + behind,
    )
    kept = ((0, num_prompt), (num_prompt + ahead, num_tokens + ahead)) if ahead else ((0, num_tokens),)
    return Padded(inputs | own | {"layout": row}, (row.capacity, row.num_prompt_tokens, *numbers), kept)


def _padded_rows(inputs: Inputs, *, repeats_positions: bool) -> Padded:
    """Rows beside each other: padding stands on the right, where no token attends to it."""
    ids, positions = inputs["input_ids"], inputs["position_ids"]
    B, T = ids.shape
    more = capacity(T) - T
    behind = torch.zeros(more, dtype=positions.dtype, device=positions.device)
    if not repeats_positions:
        behind = torch.arange(1, more + 1, device=positions.device)
    places = torch.cat([positions, positions[:, -1:] + behind], 1)
    own = {"input_ids": F.pad(ids, (0, more)), "position_ids": places}
    return Padded(inputs | own, (B, T + more), ((0, T),))


def _with_segment(part: Part, at: int | None, num_queries: int, num_keys: int) -> Part:
    """The part with a segment more after its first `at` (None: after all), and those behind it moved."""
    if not (num_queries or num_keys):
        return replace(part, calls={})
    count = len(part.query_bounds) - 1 if at is None else at
    query_bounds, key_bounds = (
        (*bounds[: count + 1], bounds[count] + more, *(one + more for one in bounds[count + 1 :]))
        for bounds, more in ((part.query_bounds, num_queries), (part.key_bounds, num_keys))
    )
    cu_query, cu_key = (
        torch.cat([cu[: count + 1], cu[count : count + 1] + more, cu[count + 1 :] + more])
        for cu, more in ((part.cu_query, num_queries), (part.cu_key, num_keys))
    )
    longest = max(part.max_query, num_queries), max(part.max_key, num_keys)
    return Part(query_bounds, key_bounds, cu_query, cu_key, *longest, part.is_causal)


def _on_device(part: Part) -> Part:
    """The part with segments of no tokens up to a number of them, and lengths of their class."""
    empty = _power(len(part.cu_query), LEAST_SEGMENTS) - len(part.cu_query)
    cu_query, cu_key = (torch.cat([one, one[-1:].expand(empty)]) for one in (part.cu_query, part.cu_key))
    longest = (_power(most, LEAST_TOKENS) for most in (part.max_query, part.max_key))
    most_query, most_key = longest
    return Part(Unknown(), Unknown(), cu_query, cu_key, most_query, most_key, part.is_causal)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors of a backbone's inputs, in a fixed order."""
    layout: Layout | None = inputs.get("layout")
    found = [inputs["input_ids"], inputs["position_ids"]]
    for part in () if layout is None else (layout.within, layout.to_prompt):
        found += [] if part is None else [part.cu_query, part.cu_key]
    return found


def own_buffers(inputs: Inputs) -> Inputs:
    """The inputs with tensors of their own, which later ones are copied into."""
    layout: Layout | None = inputs.get("layout")
    positions = inputs["position_ids"].clone()
    made = inputs | {"input_ids": inputs["input_ids"].clone(), "position_ids": positions}
    if layout is None:
        return made
    parts = [
        None if part is None else replace(part, cu_query=part.cu_query.clone(), cu_key=part.cu_key.clone())
        for part in (layout.within, layout.to_prompt)
    ]
    return made | {"layout": replace(layout, within=parts[0], to_prompt=parts[1], position_ids=positions)}


@dataclass(slots=True, eq=False)
class Shape:
    """The recordings of rows of one shape, with their buffers."""

    inputs: Inputs
    run: Run
    weights: list[nn.Parameter]
    """Trained weights of the backbone."""
    hidden: Tensor | None = None
    """[B, C, D], where a replay of the first recording leaves its hidden states."""
    gradient: Tensor | None = None
    """The same, from which a replay of the second goes back."""
    forward: Recording | None = None
    backward: Recording | None = None
    expected: Tensor | None = None
    """Hidden states of the pass by hand, until they are compared."""
    before: dict[nn.Parameter, Tensor | None] = field(default_factory=dict)
    """Gradients on the host before the backward pass by hand."""
    random: dict[str, Any] = field(default_factory=dict)
    """Random states with which the pass by hand began."""
    is_compared: bool = False
    """A replay was the pass by hand."""
    is_under_way: bool = False
    """Its forward pass waits for its backward pass: the buffers are taken."""

    @property
    def is_recorded(self) -> bool:
        """Whether it is replayed."""
        return self.backward is not None


@dataclass(slots=True, eq=False)
class CapturedPasses:
    """The training passes of the backbones of one model, replayed from recordings where there are some."""

    make: Callable[[], Recorder]
    emit: Callable[[str], None] = lambda text: None
    """Takes notes."""
    is_deterministic: bool = True
    """Kernels give the same bits for the same numbers: a replay is compared to the bit."""
    repeats_positions: bool = False
    """Positions of padding are those of a row's last token."""
    is_on: bool = True
    num_passes: int = 0
    num_replayed: int = 0
    num_shapes: int = 0
    _recorder: Recorder | None = None
    _shapes: dict[tuple[object, ...], Shape] = field(default_factory=dict)
    _new: list[Shape] = field(default_factory=list)
    """Shapes that were met first, and computed by hand on their buffers."""
    _homes: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """The places of gradients, in which recordings accumulate."""
    _weights: dict[nn.Module, list[nn.Parameter]] = field(default_factory=dict)
    _has_made_room: bool = False
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def hidden(self, base: Any, backbone: nn.Module, run: Run, inputs: Inputs) -> Tensor:
        """[B, T, D] of a model's backbone by its pass `run`, differentiable: weights get their gradients."""
        self.num_passes += 1
        self.settle()
        name = base.config._attn_implementation
        made = padded(
            inputs, repeats_positions=self.repeats_positions, by_bounds=name not in BY_BOUNDS_ON_DEVICE
        )
        given = made.inputs
        weights = self._weights_of(backbone)
        wide = {str(one.grad_dtype) for one in weights}
        key = (id(backbone), *made.numbers, *sorted(wide))
        shape = self._shapes.get(key)
        if shape is not None and shape.is_under_way:
            shape = None
        elif shape is None and self.is_on and len(self._shapes) < MOST_SHAPES and not self._waits():
            # A pass by hand takes its memory beside no recording: they are made again behind it.
            self._let_go()
            shape = self._shapes[key] = Shape(own_buffers(given), run, weights)
            self._new.append(shape)
        if shape is None:
            return made.cut(_by_hand(self, run, given, None))
        for buffer, now in zip(tensors_of(shape.inputs), tensors_of(given), strict=True):
            buffer.copy_(now)
        shape.is_under_way = True
        if not shape.is_recorded:
            shape.random = random_state()
            return made.cut(_by_hand(self, run, shape.inputs, shape))
        self.num_replayed += 1
        hidden: Any = _Replayed.apply(self._anchor, shape)
        return made.cut(hidden)

    def _weights_of(self, backbone: nn.Module) -> list[nn.Parameter]:
        if backbone not in self._weights:
            self._weights[backbone] = [one for one in backbone.parameters() if one.requires_grad]
        return self._weights[backbone]

    def settle(self) -> None:
        """Gradients lie where recordings accumulate; those that are not there yet begin at 0."""
        missing = [(one, home) for one, home in self._homes.items() if one.grad is None]
        if missing:
            torch._foreach_zero_([home for _, home in missing])
        for one, home in missing:
            one.grad = home
        for one, home in self._homes.items():
            if one.grad is not home:
                assert one.grad is not None, "Those without were given theirs."
                home.copy_(one.grad)
                one.grad = home

    def record_new(self) -> None:
        """Record the shapes that were met since. Called between micro-batches.

        Raises: OutOfMemoryError.
        """
        met, self._new = self._new, []
        for shape in met:
            if not self.is_on or shape.gradient is None:
                continue
            try:
                self._record(shape)
                for known in self._shapes.values():
                    if known.is_compared and not known.is_recorded:
                        self._capture(known)
            except RuntimeError as error:
                first = _first_of(error)
                if is_out_of_memory(first):
                    raise first from None
                self.give_up(first_line_of(first))

    def give_up(self, reason: str) -> None:
        """Record nothing from now on, replay nothing, and tell it."""
        self.is_on = False
        self.release()
        self.emit(
            "the passes of this model cannot be captured as CUDA graphs, and are computed one operator at a "
            f"time: the numbers are the same, and take longer ({reason})"
        )

    def release(self) -> None:
        """Free all recordings: shapes are recorded anew as they are met."""
        self._let_go()
        self._shapes.clear()
        self._new.clear()
        self._homes.clear()

    def made_room(self) -> bool:
        """Whether memory that ran out was freed by letting recordings go; a second time for good."""
        if not any(shape.is_recorded for shape in self._shapes.values()):
            return False
        if self._has_made_room:
            self.give_up("memory ran out beside their recordings, twice")
        self._has_made_room = True
        self.release()
        return True

    def _waits(self) -> bool:
        """Whether a replayed pass waits for its backward pass: a value model's, while the policy's begins."""
        return any(shape.is_under_way and shape.is_recorded for shape in self._shapes.values())

    def _let_go(self) -> None:
        for shape in self._shapes.values():
            shape.forward = shape.backward = shape.hidden = None
        if self._recorder is not None:
            self._recorder.release()

    def words(self) -> str:
        """How many passes were replayed."""
        return (
            f"{self.num_replayed:,} of {self.num_passes:,} passes were replayed from CUDA graphs of "
            f"{self.num_shapes} shape{'s' if self.num_shapes != 1 else ''} of rows"
        )

    def _record(self, shape: Shape) -> None:
        """Record a shape, and compare a replay with the pass by hand, whose gradients stay in every case.

        Raises: RuntimeError where it cannot be recorded, or the replay is another pass.
        """
        after = {one: on_host(one.grad) for one in shape.before}
        homes = {one: one.grad for one in shape.before if one.grad is not None}
        random = random_state()
        try:
            self._try(shape, homes, after)
        except BaseException:
            with torch.no_grad():
                for one, home in homes.items():
                    one.grad = home.copy_(_there(after[one]))
            raise
        finally:
            restore_random_state(random)
            shape.expected, shape.before, shape.random = None, {}, {}
        self._homes |= homes
        self.num_shapes += 1

    def _try(
        self,
        shape: Shape,
        homes: dict[nn.Parameter, Tensor],
        after: dict[nn.Parameter, Tensor | None],
    ) -> None:
        recorder = self._recorder = self._recorder or self.make()
        run = shape.run

        def begin() -> None:
            """The state before the backward pass by hand, and before its draws."""
            with torch.no_grad():
                for one, home in homes.items():
                    was = shape.before[one]
                    one.grad = home.zero_() if was is None else home.copy_(was)
            restore_random_state(shape.random)

        def apart(hidden: Tensor) -> float:
            """How far a pass is off the one by hand."""
            of_weights = (_apart(home.cpu(), _there(after[one])) for one, home in homes.items())
            return max(_apart(hidden, _there(shape.expected)), *of_weights)

        def whole() -> None:
            hidden = run(shape.inputs)
            torch.autograd.backward(hidden, shape.gradient)
            again.append(hidden.detach())

        again: list[Tensor] = []
        begin()
        if reason := recorder.rehearse(whole):
            raise RuntimeError(reason)
        allowed = 0.0 if self.is_deterministic else ROUNDING * apart(again[0])
        again.clear()
        begin()
        self._capture(shape)
        begin()
        for half in (shape.forward, shape.backward):
            assert half is not None, "It was recorded."
            half.replay()
        found = apart(_there(shape.hidden))
        if not found <= allowed:
            raise RuntimeError(
                f"a replay is off by {found:.2g} of what it was recorded from, more than {allowed:.2g}"
            )
        shape.is_compared = True

    def _capture(self, shape: Shape) -> None:
        """Record both halves of a shape, which computes nothing."""
        recorder = self._recorder = self._recorder or self.make()
        forward, backward = recorder.recording(), recorder.recording()
        with _recording(forward):
            hidden = shape.run(shape.inputs)
        with _recording(backward):
            torch.autograd.backward(hidden, shape.gradient)
        shape.hidden, shape.forward, shape.backward = hidden.detach(), forward, backward


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "The pass by hand has made it."
    return tensor


def _apart(found: Tensor, expected: Tensor) -> float:
    """Length of the difference over that of the expected, in float64; 0 where all bits are the same."""
    found, expected = found.detach(), expected.detach()
    if torch.equal(found, expected):
        return 0.0
    size = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / max(size, 1e-300)


def on_host(gradient: Tensor | None) -> Tensor | None:
    """A copy of a gradient, where it takes no memory of the device."""
    return None if gradient is None else gradient.detach().to("cpu", copy=True)


@contextmanager
def _recording(recording: Recording) -> Iterator[None]:
    recording.begin()
    try:
        yield
    except BaseException:
        recording.abandon()
        raise
    recording.end()


def _first_of(error: BaseException) -> BaseException:
    """The error that began it: the end of a broken capture raises another over it."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


def _by_hand(passes: CapturedPasses, run: Run, inputs: Inputs, shape: Shape | None) -> Tensor:
    made: Any = _ByHand.apply(passes._anchor, run, inputs, shape)
    return made


class _ByHand(torch.autograd.Function):
    """A backbone's pass, whose backward pass begins when the loss's is over, as that of a recording does."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Run, inputs: Inputs, shape: Shape | None) -> Tensor:
        """Hidden states."""
        with torch.enable_grad():
            ctx.hidden = run(inputs)
        ctx.shape = shape
        made: Tensor = ctx.hidden.detach()
        if shape is not None:
            shape.expected = made.clone()
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        """Gradients of the weights, accumulated."""
        hidden, ctx.hidden = ctx.hidden, None
        shape: Shape | None = ctx.shape
        if shape is not None:
            shape.gradient = grads[0].clone(memory_format=torch.contiguous_format)
            shape.before = {one: on_host(one.grad) for one in shape.weights}
            shape.is_under_way = False
        torch.autograd.backward(hidden, grads[0])
        return None, None, None, None


class _Replayed(torch.autograd.Function):
    """A backbone's pass from its recordings."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: Shape) -> Tensor:
        """Hidden states."""
        assert shape.forward is not None, "The shape is recorded."
        assert shape.hidden is not None, "The shape is recorded."
        shape.forward.replay()
        ctx.shape = shape
        return shape.hidden.view_as(shape.hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        """Gradients of the weights, accumulated."""
        shape: Shape = ctx.shape
        assert shape.backward is not None, "The shape is recorded."
        assert shape.gradient is not None, "The shape is recorded."
        shape.gradient.copy_(grads[0])
        shape.backward.replay()
        shape.is_under_way = False
        return None, None
