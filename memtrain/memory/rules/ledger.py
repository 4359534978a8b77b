"""Decisions from recipe and machine alone: each setting with its reason, each refusal with a fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memtrain.errors import Fault, RecipeError
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.hardware.packages import installed, missing
from memtrain.memory.model_shape.config_file import asked_code
from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.plan import Decision
from memtrain.memory.rules.attention import (
    PACKAGES,
    AttentionBackend,
    AttentionChoice,
    AttentionFacts,
    choose_attention,
    model_facts,
)
from memtrain.memory.rules.float16 import AUTO_REASON, FLOAT16_REASON, float16_faults
from memtrain.recipes.recipe import Recipe

DEFAULT_BATCH_SIZE = 32
"""Rows of a step when nothing is given: the field's usual size for fine-tuning."""
NF4 = "NF4 with double quantization: 0.516 bytes a weight, the scales in 8 bits too"
"""Reason in the plan of weights in 4 bits."""


@dataclass(frozen=True, slots=True)
class SourcedRecipe:
    """A recipe, and where each of its values was set."""

    recipe: Recipe
    where: Callable[[str], str]
    """`file:line:column`, `from the command line: ...`, or `default`, by dotted path."""

    def is_set(self, dotted: str) -> bool:
        """Whether the user wrote it."""
        return self.where(dotted) != "default"

    def place(self, dotted: str) -> str:
        """Place of a fault: where the key was written, or the key, where nobody wrote it."""
        return self.where(dotted) if self.is_set(dotted) else f"{dotted} (not written: its default)"


@dataclass(slots=True)
class DecisionLog:
    """Decisions and refusals as they are made."""

    asked: SourcedRecipe
    presumed: frozenset[str] = frozenset()
    """Packages that the run's machine, another than this, is taken to have."""
    decisions: list[Decision] = field(default_factory=list[Decision])
    faults: list[Fault] = field(default_factory=list[Fault])

    def decide(self, setting: str, value: object, reason: str, path: str | None = None) -> None:
        """Note a decision; its source is the place in the recipe when `path` was written there."""
        source = self.asked.where(path) if path is not None else "rule"
        is_written = path is not None and self.asked.is_set(path)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        shown = reason if not is_written else f"asked for; {reason}" if reason else "asked for"
        self.decisions.append(
            Decision(setting=setting, value=text, reason=shown, source=source if is_written else "rule")
        )

    def decide_again(self, setting: str, value: object, reason: str, path: str | None = None) -> None:
        """Note a decision in place of an earlier one about the same setting."""
        self.decisions[:] = [one for one in self.decisions if one.setting != setting]
        self.decide(setting, value, reason, path)

    def has(self, package: str) -> bool:
        """Whether the run can import a package."""
        return package in self.presumed or bool(installed(package))

    def presumes(self, package: str) -> bool:
        """Whether the run's machine is only taken to have a package, which is not here."""
        return package in self.presumed and not installed(package)

    def refuse(self, what: str, path: str, fix: str) -> None:
        """Note a refusal at a place of the recipe."""
        self.faults.append(Fault(what, self.asked.place(path), fix))

    def raise_refusals(self) -> None:
        """Raises: RecipeError with every refusal, when there is one."""
        if self.faults:
            raise RecipeError(self.faults)


def decide_device(ledger: DecisionLog, hardware: Hardware) -> int:
    """Number of processes; the device kind is the hardware's."""
    cluster = ledger.asked.recipe.cluster
    if cluster.device == "cuda" and hardware.device != "cuda":
        ledger.refuse(
            "cluster.device is cuda, but no CUDA device is visible here",
            "cluster.device",
            "run on a machine with one (nvidia-smi lists them), or set cluster.device: cpu",
        )
    ledger.decide("device", hardware.device, hardware.words(), "cluster.device")
    nodes = hardware.num_nodes
    most = nodes * (hardware.num_devices if hardware.device == "cuda" else hardware.num_cores)
    if cluster.processes == "auto":
        sharing = cluster.sharing
        processes = nodes * (hardware.num_devices if hardware.device == "cuda" else sharing)
        is_shared = hardware.device == "cpu" and sharing > 1
        words = "the processes that share a row" if is_shared else "one for each device"
        ledger.decide("num_processes", processes, words, "cluster.processes")
        return processes
    if cluster.processes > most:
        kind = "CUDA devices" if hardware.device == "cuda" else "CPU cores"
        here = "this machine has" if nodes == 1 else f"{nodes} nodes have"
        ledger.refuse(
            f"cluster.processes is {cluster.processes}, and {here} {most} {kind}",
            "cluster.processes",
            f"set it to at most {most}",
        )
    ledger.decide("num_processes", cluster.processes, "", "cluster.processes")
    return cluster.processes


def decide_dtype(ledger: DecisionLog, hardware: Hardware) -> str:
    """Precision of weights and computation."""
    model = ledger.asked.recipe.model
    if model.dtype == "auto":
        if hardware.device == "cuda" and hardware.has_bfloat16:
            dtype, reason = "bfloat16", "fast on this device, at half the bytes of float32"
        elif hardware.device == "cuda" and not float16_faults(ledger.asked.recipe):
            dtype, reason = "float16", AUTO_REASON
        else:
            where = "on a CPU" if hardware.device == "cpu" else "this GPU has no fast bfloat16"
            dtype, reason = "float32", f"exact, and {where} bfloat16 is not faster"
        ledger.decide("dtype", dtype, reason, "model.dtype")
        return dtype
    if model.dtype == "float16":
        for what, path, fix in float16_faults(ledger.asked.recipe):
            ledger.refuse(f"model.dtype float16: {what}", path, fix)
        ledger.decide("dtype", "float16", FLOAT16_REASON, "model.dtype")
        return "float16"
    if model.dtype == "bfloat16" and not hardware.has_bfloat16:
        ledger.refuse(
            f"model.dtype bfloat16: {hardware.name} does not support it",
            "model.dtype",
            "leave it out (float16 with a scaled loss is taken), or use float32",
        )
    ledger.decide("dtype", model.dtype, "", "model.dtype")
    return model.dtype


def decide_attention(
    ledger: DecisionLog, hardware: Hardware, dtype: str, config: Mapping[str, object]
) -> AttentionChoice | None:
    """The attention back end, or None when it is refused."""
    recipe = ledger.asked.recipe
    is_named = recipe.model.attention != "auto"
    facts = AttentionFacts(
        device=hardware.device,
        dtype=dtype,
        compute_capability=hardware.compute_capability,
        packages=frozenset(
            name
            for name in PACKAGES
            # A package that another machine only may have is for those who name the back end: torch's own
            # kernels compute the same.
            if ledger.has(name) and (is_named or name == "triton" or not ledger.presumes(name))
        ),
        longest_row_tokens=recipe.length.max_length,
        # What is asked for by name is refused with the slices, which are as much of a wish.
        in_slices=not is_named and (streams(recipe) or recipe.cluster.sharing > 1),
        **model_facts(config),  # pyright: ignore[reportArgumentType]
    )
    wanted = recipe.model.attention
    wants_flat = recipe.length.padding_free or recipe.length.packing != "none"
    # In slices padded rows lie end to end too, padding and all: a layer has the tokens of one row.
    padded = "" if streams(recipe) else padded_by(recipe)
    if padded and wanted == "auto":
        wanted = "transformers"
    elif padded and wanted != "transformers":
        ledger.refuse(
            f"attention {wanted} needs concatenated rows, but rows are padded ({padded})",
            "model.attention",
            f"leave model.attention out, or {padded.partition(':')[0]}",
        )
    try:
        choice = choose_attention(facts, None if wanted == "auto" else AttentionBackend(wanted))
    except RecipeError as error:
        ledger.faults += [Fault(f.what, ledger.asked.place("model.attention"), f.fix) for f in error.faults]
        return None
    if wants_flat and not choice.can_pack:
        path = "length.packing" if recipe.length.packing != "none" else "length.padding_free"
        reasons = "; ".join(
            f"{', '.join(str(one) for one, other in choice.refused if other == why)}: {why}"
            for why in dict.fromkeys(why for _, why in choice.refused)
        )
        ledger.refuse(
            f"rows cannot be kept apart with {choice.backend} attention ({reasons or choice.reason})",
            path,
            "set length.packing to none and length.padding_free to false, or choose another model.attention",
        )
    asked = asked_code(config)
    not_taken = (
        f"; the model's config asks for {', '.join(asked)}, which no model may choose" if asked else ""
    )
    ledger.decide("attention", choice.backend, choice.reason + not_taken, "model.attention")
    return choice


def refuse_past_positions(ledger: DecisionLog, num_positions: int | None, longest_tokens: int) -> None:
    """Note rows that are longer than a model's table of learned positions."""
    multiple = ledger.asked.recipe.length.pad_to_multiple_of or 1
    padded = -(-longest_tokens // multiple) * multiple
    if num_positions is not None and padded > num_positions:
        ledger.refuse(
            f"the longest row has {padded:,} tokens, but the model has only {num_positions:,} positions",
            "length.max_length",
            f"set it to at most {num_positions // multiple * multiple}",
        )


def padded_by(recipe: Recipe) -> str:
    """The key that makes padded rows, as `name: value`; empty where rows may lie end to end."""
    length = recipe.length
    if recipe.cluster.sharing > 1 or length.packing != "none" or length.padding_free:
        return ""
    if length.padding_free is False:
        return "length.padding_free: false"
    return "length.group_by_length: true" if length.group_by_length else ""


def streams(recipe: Recipe) -> bool:
    """Whether a recipe asks for streamed layers."""
    return recipe.memory.streamed_layers == "on" or "streamed_layers" in recipe.memory.use


def refuse_what_cannot_run(ledger: DecisionLog, hardware: Hardware) -> None:
    """Pairs that no plan can honour, each with its reason."""
    recipe = ledger.asked.recipe
    optim, model = recipe.optim, recipe.model
    if OPTIMIZERS[optim.kind].is_bitsandbytes:
        _needs_bitsandbytes(ledger, hardware, f"optim.kind {optim.kind}", "optim.kind", "adamw or adafactor")
    if model.quantize != "none" and hardware.device == "cuda":
        _needs_bitsandbytes(ledger, hardware, f"model.quantize {model.quantize}", "model.quantize", "none")
    if model.quantize == "4bit":
        ledger.decide("quantize", "4bit", NF4, "model.quantize")
    if model.quantize == "8bit" and hardware.device == "cuda":
        reason = "LLM.int8 multiplies in float16: activations in another precision are cast for each product"
        ledger.decide("quantize", "8bit", reason, "model.quantize")
    if optim.master_weights is True and recipe.model.dtype == "float32":
        ledger.refuse(
            "optim.master_weights keeps float32 copies, but the weights are float32 already",
            "optim.master_weights",
            "remove it, or set model.dtype: bfloat16",
        )
    if hardware.device != "cuda" or not ledger.has("liger_kernel"):
        why = missing("liger_kernel") if hardware.device == "cuda" else "runs on CUDA only"
        get = "pip install 'memtrain[liger]' on a CUDA machine"
        if model.liger == "on":
            ledger.refuse(
                f"model.liger is on, but Liger {why}", "model.liger", f"{get}, or set model.liger: auto"
            )
        if recipe.memory.loss == "liger":
            ledger.refuse(
                f"memory.loss is liger, but Liger {why}",
                "memory.loss",
                f"{get}, or set memory.loss: chunked",
            )
    if recipe.memory.activation_checkpointing == "off" and recipe.memory.checkpoint_every != "auto":
        ledger.refuse(
            "memory.checkpoint_every has no effect with activation_checkpointing: off",
            "memory.checkpoint_every",
            "remove it, or set memory.activation_checkpointing: on",
        )


def _needs_bitsandbytes(ledger: DecisionLog, hardware: Hardware, what: str, path: str, instead: str) -> None:
    if hardware.device != "cuda":
        ledger.refuse(f"{what} needs bitsandbytes on a CUDA device", path, f"use {instead}")
    elif not ledger.has("bitsandbytes"):
        ledger.refuse(
            f"{what} needs bitsandbytes, which is not installed",
            path,
            f"pip install 'memtrain[quant]', or use {instead}",
        )
