"""Suggestions where nothing fits: the fewest changes of a recipe with a low enough peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from memtrain.memory.estimate.peaks import estimate
from memtrain.memory.model_shape.shape import MLP_NAMES, ModelShape
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import MIB, gib
from memtrain.memory.rules.attention import MERGED
from memtrain.memory.rules.context_parallel import PATH as CONTEXT
from memtrain.memory.rules.context_parallel import held_by, row_multiple
from memtrain.memory.rules.precision import WITHOUT_COPIES
from memtrain.recipes.sections.model import Adapter

MOST_CHANGES = 3
"""Changes that are tried together; whoever needs more needs another machine. Taste."""

LEAST_LENGTH = 256
"""Tokens below which a shorter `length.max_length` is not proposed. Taste."""


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """A change of a recipe."""

    words: str
    """The change as written: `optim.kind: adafactor`."""
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    """Changed settings."""
    keys: Mapping[str, object] = field(default_factory=dict[str, object])
    """Changed keys of the recipe, by dotted key."""
    length: int | None = None
    """Longest sequence after it."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Changes that go together, and the peak of live tensors predicted for them."""

    changes: tuple[Change, ...]
    peak_bytes: int

    def words(self) -> str:
        """The changes as written into the recipe, with the peak."""
        return f"{' and '.join(change.words for change in self.changes)} (peak {gib(self.peak_bytes)})"


def suggestions(
    settings: Settings,
    shape: ModelShape,
    heaviest: HeaviestBatch,
    limit_bytes: int,
    *,
    most: int = 3,
    can_slice: bool = False,
) -> list[Suggestion]:
    """At most `most` ways to stay below `limit_bytes` of live tensors, fewest changes first.

    None contains another. Where none fits: the one way with the lowest peak, alone. `can_slice`: nothing in
    recipe and model forbids that processes hold rows together.
    """
    changes = [*_changes(settings, heaviest), *_without_experts(settings, shape)]
    changes += _slices(settings) if can_slice else ()
    fitting: list[Suggestion] = []
    lowest: Suggestion | None = None
    for count in range(1, MOST_CHANGES + 1):
        for chosen in combinations(changes, count):
            if any(set(way.changes) <= set(chosen) for way in fitting) or not _compatible(chosen):
                continue
            way = Suggestion(chosen, _peak(settings, shape, heaviest, chosen))
            if lowest is None or way.peak_bytes < lowest.peak_bytes:
                lowest = way
            if way.peak_bytes <= limit_bytes:
                fitting.append(way)
        if len(fitting) >= most:
            break
    return fitting[:most] if fitting else [lowest] if lowest is not None else []


def _changes(settings: Settings, heaviest: HeaviestBatch) -> Iterator[Change]:
    """Changes that this run has not made yet: exact changes first, then the others."""
    if settings.checkpoint_every != 1:
        yield _change("memory.activation_checkpointing", "on", {"checkpoint_every": 1})
    is_apart = settings.device == "cuda"
    if settings.offload == "none" and settings.checkpoint_every and is_apart:
        yield _change("memory.activation_offloading", "on", {"offload": "boundaries"})
    if settings.loss == "full":
        yield _change("memory.loss", "chunked", {"loss": "chunked"})
    elif settings.loss == "chunked" and settings.loss_tile_bytes > 16 * MIB:
        tile = {"memory.loss_chunk_size": 16 * MIB}
        yield Change("memory.loss_chunk_size: 16MiB", {"loss_tile_bytes": 16 * MIB}, tile)
    if _at_once(settings, heaviest) > 1:
        yield _change("train.micro_batch_size", 1, {"micro_batch_size": 1})
    if not settings.optimizer_offload and settings.optimizer in ("adamw", "muon") and is_apart:
        yield _change("memory.optimizer_offload", "on", {"optimizer_offload": True})
    for kind, facts in OPTIMIZERS.items():
        if settings.optimizer in facts.smaller_than and (is_apart or not facts.is_bitsandbytes):
            yield _change("optim.kind", kind, {"optimizer": kind})
    if settings.adapter is None:
        lora = {"adapter": Adapter()}
        yield Change("model.adapter: {kind: lora}", lora, {"model.adapter": Adapter()})
    if settings.quantize == "none" and is_apart:
        for bits in ("4bit", "8bit"):
            yield _quantized(settings, bits)
    length = heaviest.longest // 2
    if length >= LEAST_LENGTH:
        shorter = {"length.max_length": length}
        yield Change(f"length.max_length: {length}", {"max_length": length}, shorter, length)


def _change(key: str, value: str | int, settings: Mapping[str, object]) -> Change:
    """A change of one key, as it is written."""
    return Change(f"{key}: {value}", settings, {key: value})


def _quantized(settings: Settings, bits: str) -> Change:
    """Frozen weights in so many bits below an adapter."""
    adapter = settings.adapter or Adapter()
    updates = {"adapter": adapter, "quantize": bits, **WITHOUT_COPIES}
    keys = {"model.adapter": adapter, "model.quantize": bits}
    both = f"model: {{adapter: {{kind: lora}}, quantize: {bits}}}"
    return Change(f"model.quantize: {bits}" if settings.adapter else both, updates, keys)


def _without_experts(settings: Settings, shape: ModelShape) -> Iterator[Change]:
    """Adapters on everything but the experts: rank 16 on 128 experts a layer is a billion trained weights."""
    adapter = settings.adapter
    if adapter is None or not shape.num_stack_adapter(adapter):
        return
    names = tuple(dict.fromkeys(part.name for part in shape.linears if part.name not in MLP_NAMES))
    if names:
        fewer = adapter.model_copy(update={"target_modules": names, "target_parameters": ()})
        words = f"model.adapter.target_modules: [{', '.join(names)}], without the experts"
        yield Change(words, {"adapter": fewer}, {"model.adapter": fewer})


def _slices(settings: Settings) -> Iterator[Change]:
    """Rows held by two or more of the processes that the run has anyway."""
    if settings.context_parallel > 1 or settings.attention not in MERGED or settings.loss == "liger":
        return
    for size in (2, 4, 8):
        if settings.num_processes % size == 0:
            multiple = row_multiple(settings.pad_to_multiple_of, size)
            yield _change(CONTEXT, size, held_by(size) | {"pad_to_multiple_of": multiple})


def _at_once(settings: Settings, heaviest: HeaviestBatch) -> int:
    """Sequences of a micro-batch: where tokens limit it, as many of the longest as that leaves room for."""
    if settings.micro_tokens is None:
        return heaviest.rows
    return max(1, min(heaviest.rows, heaviest.tokens // max(1, heaviest.longest)))


def _compatible(chosen: tuple[Change, ...]) -> bool:
    """No key is given twice."""
    keys = [key for change in chosen for key in change.settings]
    return len(keys) == len(set(keys))


def _peak(settings: Settings, shape: ModelShape, heaviest: HeaviestBatch, chosen: tuple[Change, ...]) -> int:
    updates = {key: value for change in chosen for key, value in change.settings.items()}
    rows, longest = _at_once(settings, heaviest), heaviest.longest
    if updates.get("micro_batch_size") == 1:
        rows = 1
    for change in chosen:
        longest = min(longest, change.length or longest)
    tokens = min(heaviest.tokens, rows * longest)
    batch = HeaviestBatch(rows, tokens, min(heaviest.scored_tokens, tokens), longest)
    return estimate(settings.model_copy(update=updates), shape, batch).peak.num_bytes
