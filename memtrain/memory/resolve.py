"""From what is asked to what is done: every setting decided, priced and explained, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from memtrain.errors import DoesNotFit, Fault
from memtrain.memory.activations import HeaviestBatch
from memtrain.memory.batching import Micro, decide_batch, micro_candidates, worked_line
from memtrain.memory.budget import needed
from memtrain.memory.estimate import estimate
from memtrain.memory.hardware import Hardware
from memtrain.memory.host import host_bytes, host_shortage
from memtrain.memory.lengths import LengthProfile
from memtrain.memory.plan import Decision, Prediction
from memtrain.memory.preferences import (
    decide_reference,
    decide_shared_prompts,
    explain_reference,
    whole_batch,
)
from memtrain.memory.rules import (
    Asked,
    Ledger,
    decide_attention,
    decide_device,
    decide_dtype,
    installed,
    refuse_what_cannot_run,
)
from memtrain.memory.settings import Settings
from memtrain.memory.shape import ModelShape
from memtrain.memory.survival import decide_recovery, decide_rehearsal, in_backward_choices
from memtrain.memory.units import gib
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS

MARGIN_SHARE = 0.02
MARGIN_BYTES = 256 * 2**20
"""What a plan leaves of the budget for what it cannot see: no false "fits" is the aim."""

CPU_SHARE = 0.8
"""Share of a machine's free memory that a CPU run takes as its budget; others need some. Taste."""

CountSteps = Callable[[int | None, int | None, float], int]
"""Optimizer steps of (rows of a step, tokens of a step, epochs)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the resolver knows beside the recipe."""

    hardware: Hardware
    shape: ModelShape
    config: Mapping[str, object]
    """The model's configuration, as in config.json."""
    profile: LengthProfile
    count_steps: CountSteps
    method: str = "sft"
    apart: tuple[LengthProfile, CountSteps] | None = None
    """The same where a prompt is computed for each of its answers; None where rows have no answers."""

    def with_prompts_apart(self) -> Facts:
        """These facts, with a prompt for each answer."""
        assert self.apart is not None, "These rows have no answers that could share a prompt."
        profile, count_steps = self.apart
        return replace(self, profile=profile, count_steps=count_steps)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The answer."""

    settings: Settings
    decisions: tuple[Decision, ...]
    prediction: Prediction
    plain: Prediction


def resolve(asked: Asked, facts: Facts) -> Resolved:
    """The settings of a run that fits, with the reason of each.

    Raises: RecipeError with every refusal; DoesNotFit when no choice that is left open fits the budget.
    """
    ledger = Ledger(asked)
    base, micros = _base(ledger, facts)
    wholes: tuple[Micro | None, ...] = (None,)
    if base is not None:
        wholes = in_backward_choices(ledger, (base.batch_rows, base.batch_tokens), base.num_processes)
    ledger.settle()
    assert base is not None, "A refusal was not noted."
    budget = _budget(asked.recipe, facts.hardware)
    tried = [(settings, _predict(settings, facts)) for settings in _open(asked.recipe, base, micros, wholes)]
    fitting = [pair for pair in tried if _fits(*pair, budget)]
    if not fitting:
        raise _does_not_fit(tried[-1], budget, asked)
    shortages = [_host_shortage(*pair, facts) for pair in fitting]
    if shortages[0] is not None and None not in shortages:
        raise shortages[0]
    settings, prediction = fitting[shortages.index(None)]
    settings = settings.model_copy(
        update={
            "recovery": decide_recovery(ledger, settings),
            "rehearse": decide_rehearsal(ledger, facts.hardware),
        }
    )
    _explain(ledger, settings, prediction, facts, budget)
    return Resolved(
        settings=settings,
        decisions=tuple(ledger.decisions),
        prediction=prediction.model_copy(update={"budget_bytes": budget}),
        plain=_predict(plain(settings, facts.profile), facts).model_copy(update={"budget_bytes": budget}),
    )


def plain(settings: Settings, profile: LengthProfile) -> Settings:
    """The same run without any memory strategy: padded rows, every activation kept, logits held whole.

    As many examples in a step and in a micro-batch as the planned run has on average: a packed sequence holds
    several.
    """
    per_sequence = profile.report.pieces / max(1, profile.report.num_sequences)
    sequences = min(settings.micro_rows, profile.report.num_sequences)
    if settings.micro_tokens is not None:
        sequences = min(sequences, max(1, int(settings.micro_tokens / profile.mean_tokens)))
    rows = None if settings.batch_rows is None else round(settings.batch_rows * per_sequence)
    return settings.model_copy(
        update={
            "attention": "stock",
            "padding_free": False,
            "shared_prompts": False,
            "packing": "none",
            "batch_rows": rows,
            "micro_rows": max(1, round(sequences * per_sequence)),
            "micro_tokens": None,
            "checkpoint_every": 0,
            "offload": "none",
            "loss": "full",
        }
    )


def _base(ledger: Ledger, facts: Facts) -> tuple[Settings | None, list[Micro]]:
    """Settings with everything decided that does not depend on memory, and the micro-batches to try."""
    recipe, hardware = ledger.asked.recipe, facts.hardware
    refuse_what_cannot_run(ledger, hardware)
    processes = decide_device(ledger, hardware)
    dtype = decide_dtype(ledger, hardware)
    attention = decide_attention(ledger, hardware, dtype, facts.config)
    rows, tokens = batch = decide_batch(ledger, processes)
    if attention is None:
        return None, []
    padding_free = _padding_free(ledger, can_pack=attention.can_pack)
    shares = decide_shared_prompts(ledger, attention, padding_free=padding_free)
    if facts.apart is not None and not shares:
        facts = facts.with_prompts_apart()
    micros = whole_batch(ledger, batch, processes) or micro_candidates(
        ledger,
        facts.profile,
        batch,
        num_processes=processes,
        padding_free=padding_free,
        device=hardware.device,
    )
    max_steps = _max_steps(ledger, facts, rows, tokens)
    passes = max_steps / max(1, facts.count_steps(rows, tokens, 1.0))
    threads = recipe.cluster.threads
    settings = Settings.model_validate(
        _said(recipe)
        | {
            "device": hardware.device,
            "num_processes": processes,
            "threads": max(1, hardware.num_nodes * hardware.num_cores // processes)
            if threads == "auto"
            else threads,
            "dtype": dtype,
            "attention": str(attention.backend),
            "liger": _uses_liger(ledger, hardware),
            "truncation": recipe.length.truncation or ("keep_end" if facts.apart else "keep_start"),
            "padding_free": padding_free,
            "shared_prompts": shares,
            "reference": decide_reference(ledger, passes=passes),
            "batch_rows": rows,
            "batch_tokens": tokens,
            "micro_rows": micros[0].rows,
            "micro_tokens": micros[0].tokens,
            "max_steps": max_steps,
            "checkpoint_every": 0,
            "offload": "none",
            "loss": "chunked" if recipe.memory.loss == "auto" else recipe.memory.loss,
        }
    )
    return settings, micros


def _said(recipe: Recipe) -> dict[str, object]:
    """The settings that say again what the recipe says."""
    return {
        "adapter": recipe.model.adapter,
        "quantize": recipe.model.quantize,
        "max_length": recipe.length.max_length,
        "packing": recipe.length.packing,
        "documents_see_each_other": recipe.length.documents_see_each_other,
        "pad_to_multiple_of": recipe.length.pad_to_multiple_of,
        "group_by_length": recipe.length.group_by_length,
        "loss_tile_bytes": recipe.memory.loss_tile,
        "optimizer": recipe.optim.kind,
        "master_weights": recipe.optim.master_weights,
        "expandable_segments": recipe.memory.expandable_segments,
        "optimizer_offload": recipe.memory.optimizer_offload == "on",
    }


def _padding_free(ledger: Ledger, *, can_pack: bool) -> bool:
    length = ledger.asked.recipe.length
    if length.packing != "none" or length.padding_free:
        return can_pack
    return length.padding_free is None and can_pack and not length.group_by_length


def _uses_liger(ledger: Ledger, hardware: Hardware) -> bool:
    wanted = ledger.asked.recipe.model.liger
    if wanted == "off":
        ledger.decide("liger", False, "", "model.liger")
        return False
    runs = hardware.device == "cuda" and bool(installed("liger_kernel"))
    reason = "installed, and the device is CUDA" if runs else "not installed"
    ledger.decide("liger", runs, reason if hardware.device == "cuda" else "CUDA only", "model.liger")
    return runs


def _max_steps(ledger: Ledger, facts: Facts, rows: int | None, tokens: int | None) -> int:
    train = ledger.asked.recipe.train
    if train.max_steps is not None:
        ledger.decide("max_steps", train.max_steps, "", "train.max_steps")
        return train.max_steps
    epochs = train.epochs if train.epochs is not None else 1.0
    steps = max(1, facts.count_steps(rows, tokens, epochs))
    count = facts.profile.report.num_sequences
    reason = f"{epochs:g} epoch{'s' if epochs != 1 else ''} over {count:,} sequences"
    ledger.decide("max_steps", steps, reason, "train.epochs")
    return steps


def _open(
    recipe: Recipe, base: Settings, micros: list[Micro], wholes: tuple[Micro | None, ...]
) -> Iterator[Settings]:
    """Every choice that the recipe leaves open, the fastest first. `wholes`: see `in_backward_choices`."""
    memory = recipe.memory
    every = memory.checkpoint_every
    checkpoints = {"on": (every,), "off": (0,), "auto": (0, every)}[memory.activation_checkpointing]
    offloads = {"on": (True,), "off": (False,), "auto": (False, True)}[memory.activation_offloading]
    for whole, checkpoint, offload, micro in product(wholes, checkpoints, offloads, micros):
        if whole is not None and micro is not micros[0]:
            continue
        kind = "none" if not offload else "boundaries" if checkpoint else "all"
        yield base.model_copy(
            update={
                "checkpoint_every": checkpoint,
                "offload": kind,
                "micro_rows": (whole or micro).rows,
                "micro_tokens": (whole or micro).tokens,
                "in_backward": whole is not None,
            }
        )


def _predict(settings: Settings, facts: Facts) -> Prediction:
    return estimate(settings, facts.shape, _heaviest(settings, facts))


def _heaviest(settings: Settings, facts: Facts) -> HeaviestBatch:
    """The heaviest micro-batch of the data under some settings."""
    profile = facts.profile if settings.shared_prompts or facts.apart is None else facts.apart[0]
    sequences, tokens = profile.heaviest(settings.micro_rows, settings.micro_tokens)
    rows = sequences * profile.rows_per_sequence
    longest = profile.longest[0] if profile.longest else 1
    if profile.rows_per_sequence > 1:
        longest = profile.longest_piece
    scored = 0 if METHODS[facts.method].head == "score" else tokens
    return HeaviestBatch(rows, tokens, scored, longest)


def _host_shortage(settings: Settings, prediction: Prediction, facts: Facts) -> DoesNotFit | None:
    num_rows = facts.profile.report.num_rows
    owners = host_bytes(settings, facts.shape, _heaviest(settings, facts), num_rows, prediction)
    return host_shortage(owners, facts.hardware)


def _budget(recipe: Recipe, hardware: Hardware) -> int:
    if recipe.memory.budget != "auto":
        return recipe.memory.budget
    return int(hardware.free_bytes * (CPU_SHARE if hardware.device == "cpu" else 1.0))


def _fits(settings: Settings, prediction: Prediction, budget: int) -> bool:
    return needed(prediction.peak.num_bytes, settings) * (1 + MARGIN_SHARE) + MARGIN_BYTES <= budget


def _does_not_fit(closest: tuple[Settings, Prediction], budget: int, asked: Asked) -> DoesNotFit:
    settings, prediction = closest
    peak = prediction.peak
    owners = ", ".join(f"{owned.owner} {gib(owned.num_bytes)}" for owned in peak.owners[:3])
    ways: list[str] = []
    if settings.adapter is None:
        ways.append("train an adapter (model.adapter: {kind: lora})")
    if settings.checkpoint_every == 0:
        ways.append("memory.activation_checkpointing: on")
    if settings.max_length is not None:
        ways.append(f"lower length.max_length from {settings.max_length}")
    if settings.optimizer == "adamw":
        ways.append("optim.kind: adafactor")
    return DoesNotFit(
        [
            Fault(
                f"no plan fits {gib(budget)}: the smallest needs {gib(peak.num_bytes)} in the {peak.phase} "
                f"({owners})",
                asked.where("memory.budget") if asked.said("memory.budget") else "",
                "; or ".join(ways),
            )
        ]
    )


def _explain(ledger: Ledger, settings: Settings, chosen: Prediction, facts: Facts, budget: int) -> None:
    batch = (settings.batch_rows, settings.batch_tokens)
    micro = Micro(settings.micro_rows, settings.micro_tokens)
    line = worked_line(batch, micro, settings.num_processes, facts.profile)
    path = "train.micro_tokens" if settings.micro_tokens is not None else "train.micro_rows"
    ledger.decide("micro_batch", settings.micro_tokens or settings.micro_rows, line, path)
    length = "length.packing" if settings.packing != "none" else "length.padding_free"
    flat = "rows of a micro-batch lie end to end; none attends to another" if settings.padding_free else ""
    ledger.decide("padding_free", settings.padding_free, flat or "rows are padded on the right", length)
    ledger.decide(
        "activation_checkpointing",
        f"every {settings.checkpoint_every}" if settings.checkpoint_every else "off",
        _gain(settings, {"checkpoint_every": 0, "offload": "none"}, chosen, facts),
        "memory.activation_checkpointing",
    )
    ledger.decide("loss", settings.loss, _gain(settings, {"loss": "full"}, chosen, facts), "memory.loss")
    if settings.offload != "none":
        gain = _gain(settings, {"offload": "none"}, chosen, facts)
        ledger.decide("activation_offloading", settings.offload, gain, "memory.activation_offloading")
    _explain_optimizer(ledger, settings, chosen, facts)
    explain_reference(ledger, settings, lambda without: _gain(settings, without, chosen, facts))
    source = "memory.budget" if ledger.asked.said("memory.budget") else None
    ledger.decide("budget", gib(budget), f"free on {facts.hardware.name}" if not source else "", source)


def _explain_optimizer(ledger: Ledger, settings: Settings, chosen: Prediction, facts: Facts) -> None:
    if settings.in_backward:
        gain = _gain(settings, {"in_backward": False}, chosen, facts)
        ledger.decide("in_backward", "on", gain, "optim.in_backward")
    if settings.optimizer_offload:
        gain = _gain(settings, {"optimizer_offload": False}, chosen, facts)
        ledger.decide("optimizer_offload", "on", gain, "memory.optimizer_offload")


def _gain(settings: Settings, without: dict[str, object], chosen: Prediction, facts: Facts) -> str:
    """What a setting saves, as the peak without it."""
    other = _predict(settings.model_copy(update=without), facts)
    if other == chosen:
        return ""
    return f"peak {gib(chosen.peak.num_bytes)}, without it {gib(other.peak.num_bytes)}"
