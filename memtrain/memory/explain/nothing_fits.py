"""The refusal when no plan fits: who holds the memory, and the nearest ways out, each planned in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from memtrain.errors import OR, DoesNotFit, Fault
from memtrain.memory.estimate.peaks import estimate
from memtrain.memory.estimate.pricing import (
    MARGIN_BYTES,
    MARGIN_SHARE,
    PlannerInputs,
    Priced,
    budget_of,
    heaviest,
)
from memtrain.memory.estimate.static import usable
from memtrain.memory.explain.suggestions import LEAST_LENGTH, Change, Suggestion, suggestions
from memtrain.memory.generation.vllm import shares_device
from memtrain.memory.hardware.devices import Hardware, known_names, presumed_host
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import gib
from memtrain.memory.rules.context_parallel import PATH as CONTEXT
from memtrain.memory.rules.context_parallel import context_faults, held_by
from memtrain.memory.rules.engines import layout_of
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.memory.strategies.registry import STRATEGIES
from memtrain.recipes.edit import with_key
from memtrain.recipes.sections.model import Adapter

MOST = 3
"""Ways out that are reported."""
GPU_COUNTS = (2, 4, 8, 16, 32, 64)
TRIED = {
    "cuda": "up to three changes of the recipe, up to 64 GPUs, and every known card were tried",
    "cpu": "up to three changes of the recipe were tried",
}
NODE = 8
"""GPUs of a node where more are counted."""
FULL = (
    Change("optim.max_grad_norm: null", {}, {"optim.max_grad_norm": None}),
    Change(
        "optim.kind: paged_adamw_8bit", {"optimizer": "paged_adamw_8bit"}, {"optim.kind": "paged_adamw_8bit"}
    ),
    Change("optim.master_weights: false", {"master_weights": False}, {"optim.master_weights": False}),
    Change("train.batch_size: 1", {"micro_batch_size": 1}, {"train.batch_size": 1}),
)
"""Changes by which all weights are trained on one small card: each is stepped in the backward pass, which no
norm of all gradients and no second micro-batch waits for."""
SPLIT = Change("optim.copies: split", {}, {"optim.copies": "split"})
AT_ONCE = Change("save.async_save: false", {}, {"save.async_save": False})
UNCLIPPED = Change("optim.max_grad_norm: null", {}, {"optim.max_grad_norm": None})
ON_HOST = ((SPLIT,), (AT_ONCE,), (SPLIT, AT_ONCE), (SPLIT, UNCLIPPED), (SPLIT, AT_ONCE, UNCLIPPED))
"""Changes by which the host holds less: the bits of float32 copies that weights lack, no second copy for
a save in the background, and gradients of one layer in place of all, as nothing waits for their norm."""
ADAPTER_TOO = Change(
    "memory.weights_offload: all", {"adapters_offload": True}, {"memory.weights_offload": "all"}
)
UNASKED = Change("memory.weights_offload: auto", {}, {"memory.weights_offload": "auto"})
LORA = Change("model.adapter: {kind: lora}", {"adapter": Adapter()}, {"model.adapter": Adapter()})
PACKED = Change(
    "model: {adapter: {kind: lora}, quantize: 4bit}",
    {},
    {"model.adapter": Adapter(), "model.quantize": "4bit", "optim.copies": "auto"},
)
LESS_IN_ALL = ((PACKED,),)
"""Changes where the host is too small for what the device can do without."""

NATIVE = (
    Change("generate.backend: native", {}, {"generate.backend": "native"}),
    Change("generate.vllm: null", {}, {"generate.vllm": None}),
)
"""Changes by which no engine beside the run holds a part of the device."""

Plan = Callable[[SourcedRecipe, PlannerInputs], Priced | None]
"""The planner: the fastest plan that fits; None where none does, or the request is refused."""


class NoPlan(DoesNotFit):
    """No plan fits, and nobody has looked for ways out yet."""

    def __init__(
        self,
        closest: Priced,
        budget: int,
        asked: SourcedRecipe,
        facts: PlannerInputs,
        shortage: DoesNotFit | None = None,
    ) -> None:
        """`shortage`: the refusal of plans that would fit the device, and not the host."""
        self.closest, self.budget, self.asked, self.facts = closest, budget, asked, facts
        self.shortage = shortage
        super().__init__([Fault(self.what, self.where, "memtrain plan --gpu NAME")])

    @property
    def fits_device(self) -> bool:
        """Whether the host alone is short, and the device has room."""
        return self.shortage is not None and self.closest.need_bytes <= self.budget

    @property
    def what(self) -> str:
        """Memory that is short, of the device or the host, and its largest owners."""
        on_host = "" if self.shortage is None else self.shortage.faults[0].what
        if self.fits_device:
            return on_host
        beyond = f"; smaller ones wait in host memory: {on_host}" if on_host else ""
        recipe = self.asked.recipe
        taken = budget_of(recipe, self.facts.hardware) - self.budget if shares_device(recipe) else 0
        beside = f", {gib(taken)} of which vLLM holds while weights are trained" if taken > 0 else ""
        return _what(self.closest, self.budget + taken, self.facts.hardware, beside) + beyond

    @property
    def where(self) -> str:
        """Key of the limit, or the machine."""
        if self.fits_device and self.shortage is not None:
            return self.shortage.faults[0].where
        return _where(self.asked)


def nothing_fits(found: NoPlan, plan: Plan) -> DoesNotFit:
    """The error: the smallest plan there is, its largest owners, and three ways out that were planned."""
    closest = found.closest
    search = _Search(found, plan)
    ways = search.nearest()
    whole = search.all_weights()
    fix = OR.join(way.words() for way in (*ways, *(() if whole is None else (whole,))))
    if not ways and found.fits_device and found.shortage is not None:
        fix = found.shortage.faults[0].fix
    elif not ways:
        (lowest,) = search.arithmetic[:1]
        fix = f"a larger device; the furthest that changes of the recipe go is {lowest.words()}"
    elif len(ways) < MOST:
        fix += f"; nothing else was found to fit: {TRIED[closest.settings.device]}"

    return DoesNotFit([Fault(found.what, found.where, fix)])


def nearest_ways(
    closest: Priced, budget: int, facts: PlannerInputs, *, can_slice: bool = False
) -> list[Suggestion]:
    """At most three changes of the recipe that fit a budget with margin by arithmetic, the fewest first.

    `can_slice`: nothing forbids that processes hold rows together.
    """
    settings, limit = closest.settings, _limit(closest.settings, budget)
    return suggestions(settings, facts.shape, heaviest(settings, facts), limit, can_slice=can_slice)


class _Search:
    """Ways out of one recipe."""

    def __init__(self, found: NoPlan, plan: Plan) -> None:
        self.closest, self.budget, self.asked, self.plan = found.closest, found.budget, found.asked, plan
        self._lacks_host, self._fits_device = found.shortage is not None, found.fits_device
        # A way that needs bitsandbytes is one, whether or not it is installed here.
        self.facts = replace(found.facts, presumed=found.facts.presumed | {"bitsandbytes"})

    @cached_property
    def arithmetic(self) -> list[Suggestion]:
        """Changes of the recipe by arithmetic; the change that goes furthest where none fits.

        Where the host alone is short: those that hold less on both.
        """
        if self._fits_device:
            return [Suggestion(changes, 0) for changes in LESS_IN_ALL if not any(map(self._has, changes))]
        return nearest_ways(self.closest, self.budget, self.facts, can_slice=self._can_slice)

    @cached_property
    def _can_slice(self) -> bool:
        return not context_faults(self.asked.recipe, self.facts.config)

    def nearest(self) -> list[Suggestion]:
        """At most three, of different kinds where there are: the recipe, more GPUs, a larger card, two of
        these together."""
        found: list[Suggestion] = []
        for way in self._each():
            if way is not None and way.words() not in [one.words() for one in found]:
                found.append(way)
            if len(found) == MOST:
                break
        return found

    def _each(self) -> Iterator[Suggestion | None]:
        changes = self._changes()
        if shares_device(self.asked.recipe):
            news = tuple(one for one in NATIVE if not self._has(one))
            yield self._planned(news, {}, self.facts)
        if self._lacks_host:
            yield self._host()
        if self._fits_device and self.asked.recipe.memory.weights_offload in ("on", "all"):
            yield self._planned((UNASKED,), {}, self.facts)
        elif self.closest.settings.weights_offload and self.asked.recipe.memory.weights_offload == "on":
            yield self._planned((ADAPTER_TOO,), {}, self.facts)
        yield next(changes, None)
        yield self._gpus(None) or self._gpus(None, shares_rows=True)
        yield self._card(None)
        yield next(changes, None)
        if self.closest.settings.adapter is None:
            yield self._gpus(LORA)
            yield self._card(LORA)
        yield from changes

    def all_weights(self) -> Suggestion | None:
        """The run with all its weights trained still, on one GPU; rows of full length, of a half, of a
        quarter. None where adapters are trained, or no such plan fits."""
        hardware, closest = self.facts.hardware, self.closest
        several = hardware.num_devices * hardware.num_nodes > 1
        if hardware.device != "cuda" or several or closest.settings.adapter is not None:
            return None
        longest = heaviest(closest.settings, self.facts).longest
        for length in (longest, longest // 2, longest // 4):
            changes, facts = FULL, self.facts
            if length < longest:
                if facts.at_length is None or length < LEAST_LENGTH:
                    return None
                key = "length.max_length"
                changes = (*FULL, Change(f"{key}: {length}", {"max_length": length}, {key: length}, length))
                facts = facts.at_length(length)
            made = self._planned(changes, {}, facts)
            if made is not None:
                return made
        return None

    def _host(self) -> Suggestion | None:
        """The fewest changes by which plans that fit the device fit the host too."""
        for changes in ON_HOST:
            news = tuple(one for one in changes if not self._has(one))
            made = self._planned(news, {}, self.facts, stays_asked=True) if news else None
            if made is not None:
                return made
        return None

    def _has(self, change: Change) -> bool:
        """Whether the recipe says so already."""
        recipe = self.asked.recipe
        return all(with_key(recipe, key, value) == recipe for key, value in change.keys.items())

    def _changes(self) -> Iterator[Suggestion]:
        for way in self.arithmetic:
            facts, length = self.facts, min((c.length for c in way.changes if c.length), default=None)
            if length is not None and facts.at_length is not None:
                facts = facts.at_length(length)
            made = self._planned(way.changes, {}, facts)
            if made is not None:
                yield made

    def _gpus(self, change: Change | None, *, shares_rows: bool = False) -> Suggestion | None:
        """The fewest GPUs that hold the run in FSDP2's shards; `shares_rows`: and each row together."""
        hardware = self.facts.hardware
        here = hardware.num_devices * hardware.num_nodes
        if hardware.device != "cuda" or (shares_rows and not self._can_slice):
            return None
        for count in GPU_COUNTS:
            size = count if shares_rows else 1
            extra = {"cluster.processes": "auto", "cluster.engine": "fsdp2", CONTEXT: size}
            updates = {"num_processes": count, "engine": "fsdp2"} | held_by(size)
            if count <= here or not self._may_fit(change, updates):
                continue
            words = f"{count} GPUs with cluster.engine: fsdp2"
            words += f" and {CONTEXT}: {size}" if shares_rows else ""
            a_node = min(count, NODE)
            machine = replace(hardware, num_devices=a_node, num_nodes=count // a_node)
            if hardware.presumes_host:
                machine = replace(machine, host_bytes=presumed_host(hardware.sold_bytes, a_node))
            made = self._planned(
                (Change(words), *_one(change)),
                extra,
                replace(self.facts, hardware=machine),
            )
            if made is not None:
                return made
        return None

    def _card(self, change: Change | None) -> Suggestion | None:
        """The smallest known card that holds the run, as many of it as there are here."""
        hardware = self.facts.hardware
        if hardware.device != "cuda":
            return None
        cards = [Hardware.named(name, hardware.num_devices) for name in known_names()]
        # A budget that is asked for stands for a card of that size.
        here = self.budget if self.asked.is_set("memory.budget") else hardware.memory_bytes
        larger = [card for card in cards if card.memory_bytes > max(here, self.budget)]
        for card in sorted(larger, key=lambda card: card.memory_bytes):
            if not card.has_bfloat16 or not self._may_fit(change, {}, card.memory_bytes):
                continue
            size = f"{card.name} of {gib(card.memory_bytes)}"
            words = f"a larger card, {size}" if card.num_devices == 1 else f"larger cards, {size} each"
            machine = replace(card, num_nodes=hardware.num_nodes)
            if self._fits_device or not hardware.presumes_host:
                machine = replace(machine, host_bytes=hardware.host_bytes)
            made = self._planned(
                (Change(words), *_one(change)),
                {"memory.budget": "auto"},
                replace(self.facts, hardware=machine),
            )
            if made is not None:
                return made
        return None

    def _may_fit(
        self, change: Change | None, updates: Mapping[str, object], budget: int | None = None
    ) -> bool:
        """Whether the smallest plan would fit by arithmetic, at a thousandth of a plan's cost."""
        settings = self.closest.settings
        if settings.offload == "all" and "engine" in updates:
            # Whole layers do not travel with shards; their inputs do.
            settings = settings.model_copy(update={"offload": "boundaries", "checkpoint_every": 1})
        changed = {**updates, **(change.settings if change is not None else {})}
        settings = settings.model_copy(update={**changed, "in_backward": False, "loads_shards": True})
        layout = layout_of(self.asked.recipe, settings)
        settings = settings.model_copy(update={"checkpoint_layout": layout})
        peak = estimate(settings, self.facts.shape, heaviest(settings, self.facts)).peak.num_bytes
        return peak <= _limit(settings, budget or self.budget)

    def _planned(
        self,
        changes: tuple[Change, ...],
        extra: Mapping[str, object],
        facts: PlannerInputs,
        *,
        stays_asked: bool = False,
    ) -> Suggestion | None:
        """The way with the peak of the plan that is made for it; None where no plan fits.

        Where the host alone is short, weights need not wait there, unless it `stays_asked`.
        """
        recipe = self.asked.recipe
        if self._fits_device and not stays_asked and UNASKED not in changes and not self._has(UNASKED):
            changes = (*changes, UNASKED)
        keys = {key: value for change in changes for key, value in change.keys.items()} | dict(extra)
        for key, value in keys.items():
            recipe = with_key(recipe, key, value)
        updates = {key: value for change in changes for key, value in change.settings.items()}
        changed = self.closest.settings.model_copy(update=updates)
        if any(STRATEGIES[name].is_used(changed) for name in recipe.memory.never):
            return None
        made = self.plan(SourcedRecipe(recipe, self.asked.where), facts)
        return None if made is None else Suggestion(changes, made.prediction.peak.num_bytes)


def _one(change: Change | None) -> tuple[Change, ...]:
    return () if change is None else (change,)


def _what(closest: Priced, budget: int, hardware: Hardware, beside: str) -> str:
    peak = closest.prediction.peak
    # A budget in GiB that cards are sold with is for a card of that size, which has a little less.
    card = f" of {hardware.name}" if hardware.sold_bytes and budget == hardware.memory_bytes else ""
    owners = ", ".join(f"{owned.owner} {gib(owned.num_bytes)}" for owned in peak.owners[:3])
    return (
        f"no plan fits {gib(budget)}{card}{beside}: the smallest needs {gib(closest.need_bytes)} (margin "
        f"included), {gib(peak.num_bytes)} of it live tensors in the {peak.phase} ({owners})"
    )


def _where(asked: SourcedRecipe) -> str:
    return asked.where("memory.budget") if asked.is_set("memory.budget") else ""


def _limit(settings: Settings, budget: int) -> int:
    """Bytes of live tensors that fit a budget with margin."""
    return usable(int((budget - MARGIN_BYTES) / (1 + MARGIN_SHARE)), settings)
