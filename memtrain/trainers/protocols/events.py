"""The lines of `metrics.jsonl`: one JSON object for each event of a run; no torch.

Every line has `kind`, `step` (optimizer steps made when it was written) and `time` (seconds since 1970). The
kinds and their fields are the classes below. A number that JSON cannot say is the string NaN, Infinity or
-Infinity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from memtrain.recipes.sections import evaluation

REWARD = evaluation.REWARD
"""Key of the mean reward of completions, among the `extra` of an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """`step`: one optimizer step, summed over its micro-batches and all ranks."""

    step: int
    loss: float
    """Mean over the loss tokens of the step."""
    lr: float
    grad_norm: float | None = None
    """Norm of the gradients before clipping."""
    tokens: int
    """Tokens that entered the model, without padding."""
    loss_tokens: int
    """Tokens that were trained on."""
    seconds: float
    """Wall time of the step, evaluation and saving not counted."""
    rollout_s: float = 0.0
    """Online methods: wall time of the rollout that was made for this step and those after it."""
    peak_bytes: int | None = None
    """Highest peak of a rank during the step: CUDA allocator, or resident memory on a CPU."""
    epoch: float = 0.0
    """Passes over the data so far, this step included: 1.5 in the middle of the second."""
    sequences: int = 0
    """Sequences (rows, or packed ones) of the step."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further metrics of the method (accuracy, entropy, ...); in the line, each is a field of its own."""

    @property
    def wall_s(self) -> float:
        """Wall time of the step with its rollout."""
        return self.seconds + self.rollout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEvent:
    """`eval`: one pass over the held-out rows, before the checkpoint of the same step is written."""

    step: int
    loss: float
    """Mean over the loss tokens."""
    tokens: int
    """Tokens that were trained on, were these training rows."""
    seconds: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEvent:
    """`data`: effects of truncation and packing on the rows of a split, written at the start."""

    step: int = 0
    split: str = "train"
    rows: int
    """Rows read."""
    tokens: int
    """Tokens of these rows."""
    loss_tokens: int
    """Loss tokens of these rows."""
    sequences: int
    """Sequences that enter the model in one pass."""
    fill: float | None = None
    """Share of the sequences' tokens that are not padding or left empty."""
    rows_skipped: int = 0
    """Bad rows that were left out."""
    rows_cut: int = 0
    rows_dropped: int = 0
    tokens_cut: int = 0
    """Tokens lost by cutting rows."""
    loss_tokens_cut: int = 0
    loss_tokens_cut_by_answer: tuple[int, ...] = ()
    """Of pairs: `learnt_cut` of the chosen and of the rejected answers."""
    tokens_dropped: int = 0
    """Tokens lost by leaving rows out."""
    loss_tokens_dropped: int = 0
    tokens_idle: int = 0
    """Tokens left out with pieces of split rows in which nothing is trained on."""
    rows_split: int = 0
    """Rows that go on in another sequence."""
    fragments: int = 0
    """Pieces that split rows were made into."""
    sources: tuple[tuple[str, int, int, int], ...] = ()
    """Of a mixture: (source, rows, tokens, loss tokens) of each source in the first epoch."""
    lengths: tuple[tuple[int, int], ...] = ()
    """Histogram of the row lengths: (longest length of the bin in tokens, rows), in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvent:
    """`memory`: measured peak of one phase on the rank that needed most. The highest of a phase counts."""

    step: int
    phase: str
    """Named as in the plan: load, first step, steady step, evaluation, saving."""
    allocated: int
    """Peak bytes of live tensors (CUDA), or the growth of resident memory since the start (CPU)."""
    reserved: int | None = None
    """Peak bytes that the caching allocator held (CUDA)."""
    rss: int = 0
    """Peak resident bytes of the process."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """Bytes by owner at the peak, where they were told apart."""
    tokens: int = 0
    """Of a step: tokens of its largest micro-batch, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEvent:
    """`host`: the host's share of one step, or of the end of it, that was looked at closely."""

    step: int
    waited: float
    """Share of the step in which a GPU had nothing to do; on a CPU, in which no operator was at work."""
    seconds: float
    """Wall time that was looked at: of the step's last micro-batch and its update."""
    micro_batches: int = 1
    """Of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryEvent:
    """`host_memory`: peak resident memory of the run's processes, those of all nodes added up."""

    step: int
    resident: int
    """Bytes: each process's own peak, pages of libraries that they share counted in each."""
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvent:
    """`save`: a checkpoint was written."""

    step: int
    seconds: float
    """Wall time of writing it, for the ranks together."""
    held_s: float | None = None
    """Time that the steps waited for the save: all of its time, or the rest of a save in the background."""
    waited_s: float = 0.0
    """Of this, for the save before, which was still being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsEvent:
    """`experts`: tokens that a mixture's experts were sent, written before a checkpoint."""

    step: int
    steps: int
    """Logged steps since the last such line, whose tokens these are."""
    tokens: tuple[tuple[int, ...], ...]
    """Tokens of each expert of each layer, of all micro-batches and ranks; without padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEvent:
    """`sample`: the model's completions of the prompts of `eval.samples`, in their order."""

    step: int
    texts: tuple[str, ...]
    seconds: float = 0.0
    """Wall time of writing them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEvent:
    """`note`: something a reader of the report must know: resumed, checkpoint rejected, not bit-identical."""

    step: int
    text: str
    is_in_plan: bool = False
    """The plan's words before the run have it: the terminal is spared it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalEvent:
    """`final`: the run is over."""

    step: int
    state: str
    """State as in status.json."""
    seconds: float
    """Wall time since the run was started, or last continued."""
    model: str = ""
    """Folder of the trained model."""
    best_step: int | None = None
    """Step whose weights are the final ones, where the best are kept and are not the last."""
    sample: str = ""
    """Beginning of a row, and the text that the trained model writes after it."""
    sample_prompt: str = ""
    """The first part of `sample`: the beginning of the row. Empty in runs by earlier versions."""
    stopped_early: str = ""
    """Reason that a run ended before its last step, with `eval.early_stopping`."""


Event = (
    StepEvent
    | EvalEvent
    | DataEvent
    | MemoryEvent
    | HostEvent
    | HostMemoryEvent
    | SaveEvent
    | ExpertsEvent
    | SampleEvent
    | NoteEvent
    | FinalEvent
)

KINDS: dict[str, type[Event]] = {
    "step": StepEvent,
    "eval": EvalEvent,
    "data": DataEvent,
    "memory": MemoryEvent,
    "host": HostEvent,
    "host_memory": HostMemoryEvent,
    "save": SaveEvent,
    "experts": ExpertsEvent,
    "sample": SampleEvent,
    "note": NoteEvent,
    "final": FinalEvent,
}
NAMES = {kind: name for name, kind in KINDS.items()}
COMMON = ("kind", "step", "time")
_ENCODER = json.JSONEncoder(allow_nan=False)


def to_line(event: Event, time_s: float) -> str:
    """The event as one line of JSON, without the line's end."""
    # `asdict` copies each value.
    values = {one.name: getattr(event, one.name) for one in fields(event)}
    values.update(values.pop("extra", {}))
    line = {"kind": NAMES[type(event)], "step": values.pop("step"), "time": round(time_s, 3)} | values
    return _ENCODER.encode({key: _speakable(value) for key, value in line.items()})


def from_line(line: str) -> Event:
    """The event of a line.

    Raises: ValueError when the line is no event.
    """
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("not an event")
    return from_values(values)


def from_values(values: Mapping[str, Any]) -> Event:
    """The event that is spelled out, with its `kind`; fields of a method's own are its `extra`.

    Raises: ValueError when there is no such kind, or a field is missing or unknown.
    """
    if values.get("kind") not in KINDS:
        raise ValueError(f"there is no event of kind {values.get('kind')!r}")
    kind = KINDS[values["kind"]]
    known = {one.name for one in fields(kind)}
    heard = {key: _heard(value) for key, value in values.items()}
    taken = {key: value for key, value in heard.items() if key in known}
    if kind is ExpertsEvent and "tokens" in taken:
        taken["tokens"] = tuple(tuple(layer) for layer in taken["tokens"])
    if "lengths" in taken:
        taken["lengths"] = tuple((bound, count) for bound, count in taken["lengths"])
    if "texts" in taken:
        taken["texts"] = tuple(taken["texts"])
    if "sources" in taken:
        taken["sources"] = tuple(tuple(one) for one in taken["sources"])
    if "loss_tokens_cut_by_answer" in taken:
        taken["loss_tokens_cut_by_answer"] = tuple(taken["loss_tokens_cut_by_answer"])
    unknown = {key: heard[key] for key in heard if key not in known and key not in COMMON}
    if "extra" in known:
        taken["extra"] = unknown
    elif unknown:
        raise ValueError(f"a {values['kind']} event has no {', '.join(unknown)}")
    try:
        return kind(**taken)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _speakable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _heard(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
