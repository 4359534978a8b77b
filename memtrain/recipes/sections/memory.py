"""The `memory:` section: allowed strategies, the budget, and the user's pins."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from memtrain.recipes.sections.base import Bytes, NonNegativeInt, PositiveInt, Section, one_or_many

StrategyName = Literal[
    "padding_free",
    "packing",
    "shared_prompts",
    "context_parallel",
    "smaller_micro_batch",
    "activation_checkpointing",
    "checkpoint_every_n",
    "streamed_layers",
    "boundary_offloading",
    "full_offloading",
    "chunked_loss",
    "liger_loss",
    "weights_offload",
    "optimizer_offload",
    "optimizer_in_backward",
    "precomputed_reference",
    "adapter_off_reference",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "adafactor",
    "split_copies",
    "master_weights",
    "stochastic_rounding",
    "compressed_moments",
    "pure_bfloat16",
    "lora",
    "qlora",
]
"""Every strategy; a page each in memory/strategies."""

Changing = Literal[
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "adafactor",
    "stochastic_rounding",
    "compressed_moments",
    "pure_bfloat16",
    "liger_loss",
    "lora",
    "qlora",
    "shorter_sequences",
]
"""Strategies that change what is learned."""


class Memory(Section):
    """Memory of the run, and strategies to fit into it. Every setting has a reason in the plan."""

    budget: Bytes | Literal["auto"] = "auto"
    """Memory of one device that the run may use. `auto`: what is free on the device at the start."""

    headroom: Annotated[float, Field(ge=0.0, le=0.5)] = 0.05
    """Share of the budget that a plan leaves free where that costs less than 10 % of its speed. 0: the
    fastest plan that fits, however full."""

    use: Annotated[tuple[StrategyName, ...], BeforeValidator(one_or_many)] = ()
    """Strategies that must be used, by name (`memtrain methods --strategies` lists them)."""

    never: Annotated[tuple[StrategyName, ...], BeforeValidator(one_or_many)] = ()
    """Strategies that must not be used."""

    allow: Annotated[tuple[Changing, ...], BeforeValidator(one_or_many)] = ()
    """Strategies that change the result of training, allowed where no exact plan fits."""

    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Keep one tensor a layer and recompute the rest in the backward pass: much less memory, about a third
    more time. Same numbers. `auto`: where the run does not fit without."""

    checkpoint_every: PositiveInt | Literal["auto"] = "auto"
    """Checkpoint every n-th layer. Higher: faster, more memory. `auto`: every layer; where
    checkpointing is `auto` too, the distance that fits."""

    streamed_layers: Literal["auto", "on", "off"] = "auto"
    """Each layer processes a long row in slices, forward and backward, and keeps only its input: the
    memory of one slice instead of a whole row, about as fast as checkpointing. Same numbers up to
    rounding; dropout draws by slice. `auto`: where checkpointing does not fit."""

    slice_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens of a slice. Higher: faster, more memory. `auto`: the longest of 32,768, 8,192 and 2,048 that
    fits."""

    activation_offloading: Literal["auto", "on", "off"] = "auto"
    """Move the kept tensors to host memory between forward and backward. Same numbers. `auto`: where nothing
    faster fits."""

    offload_keep: NonNegativeInt | Literal["auto"] = "auto"
    """Number of last checkpointed layers whose input stays on the device instead of being offloaded: less
    to copy, more memory. Same numbers. `auto`: as many as make the step faster and fit."""

    offload_disk: str | None = None
    """Folder for what `activation_offloading` moves out and `offload_host` has no room for. How long a disk
    takes is not in the plan. Same numbers."""

    offload_host: Bytes | None = None
    """Largest host memory of a process for offloaded activations; beyond it the oldest, which are needed
    last, go to `offload_disk`."""

    loss: Literal["auto", "chunked", "full", "liger"] = "auto"
    """`chunked`: LM head and loss in chunks; the logits are never whole in memory. `full`: the plain
    computation. `auto`: the faster one that fits; if both are equally fast, the smaller. `liger`: Liger's
    kernel for cross-entropy (CUDA, `pip install 'memtrain[liger]'`)."""

    loss_chunk_size: Bytes | Literal["auto"] = "auto"
    """Size of one tile of logits in the chunked loss. Higher: fewer launches, the LM head is read less often,
    more memory. `auto`: on a GPU up to 1 GiB of what the plan leaves free, else 64 MiB."""

    expandable_segments: bool = True
    """CUDA's caching allocator grows its segments instead of fragmenting them."""

    optimizer_offload: Literal["auto", "on", "off"] = "auto"
    """Keep optimizer states (moments, float32 copies) in host memory and copy them to the device for the
    step, some at a time: 2 or 3 numbers less on the device for each trained weight; steps are slower by
    the copies. Same numbers. `auto`: where nothing faster fits."""

    weights_offload: Literal["auto", "on", "all", "off"] = "auto"
    """Keep the layers' weights in host memory and copy them to the device when their layer runs, two
    buffers at a time; with full fine-tuning the optimizer steps on the host. Same numbers; a step waits
    for the bus where micro-batches are short. `on`: an adapter stays on the device. `all`: an adapter is
    kept, and stepped, on the host too. Several processes: `on`, under an adapter and DDP. `auto`: where
    nothing faster fits."""

    preflight: Literal["auto", "on", "off"] = "auto"
    """Try the heaviest batch, an evaluation and a save before the first step, then restore the state
    exactly: a run that would run out of memory later fails in its first minute instead. `auto`: on a GPU."""

    oom_recovery: Literal["on", "off"] = "on"
    """Recovery when memory runs out: repeat the step in smaller parts, then with the strategies that the
    recipe does not rule out. Same numbers up to rounding. `off`: the run ends."""

    measure_peaks: bool = True
    """Measure the peak of every phase and report it beside the prediction."""

    @model_validator(mode="after")
    def _streams_somehow(self) -> Memory:
        if self.slice_tokens != "auto" and self.streamed_layers == "off":
            raise ValueError(
                "memory.slice_tokens is for streamed layers, which are off; remove it, or set "
                "memory.streamed_layers: on"
            )
        if self.streamed_layers == "on" and self.activation_checkpointing == "on":
            raise ValueError(
                "streamed layers keep only their inputs, as checkpointed layers do, and are recomputed in "
                "slices; remove memory.activation_checkpointing: on, or memory.streamed_layers: on"
            )
        return self

    @model_validator(mode="after")
    def _passes_one_layer_at_a_time(self) -> Memory:
        if self.weights_offload not in ("on", "all") or self.streamed_layers == "on":
            return self
        if self.activation_checkpointing == "off" or self.checkpoint_every not in ("auto", 1):
            raise ValueError(
                f"memory.weights_offload: {self.weights_offload} brings one layer's weights at a time, and "
                "layers keep only their inputs; remove memory.activation_checkpointing and "
                "memory.checkpoint_every, or set "
                "memory.streamed_layers: on"
            )
        return self

    @model_validator(mode="after")
    def _waits_somewhere(self) -> Memory:
        given = {
            "offload_keep": self.offload_keep != "auto",
            "offload_disk": self.offload_disk is not None,
            "offload_host": self.offload_host is not None,
        }
        named = " and ".join(f"memory.{name}" for name, is_given in given.items() if is_given)
        if named and self.activation_offloading == "off":
            raise ValueError(
                f"{named} is for offloaded activations, but none are offloaded; remove it, or set "
                "memory.activation_offloading: on"
            )
        if given["offload_disk"] != given["offload_host"]:
            raise ValueError(
                "memory.offload_disk takes activations beyond memory.offload_host; set both, or neither"
            )
        return self
