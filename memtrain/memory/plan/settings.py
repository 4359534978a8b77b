"""Every resolved engine setting: what the worker obeys and the estimate is made for."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from memtrain.recipes.sections.base import Section
from memtrain.recipes.sections.length import Packing, RowLimits, Truncation
from memtrain.recipes.sections.model import Adapter


class Settings(Section):
    """What a run does, with nothing left open. Made by the resolver, never changed."""

    device: Literal["cpu", "cuda"]
    """Kind of device of every process."""
    num_processes: int
    """Processes over all nodes (the world size)."""
    threads: int
    """CPU threads of one process."""
    context_parallel: int = 1
    """Processes that hold each row together, a slice each."""
    context_by: Literal["keys", "heads"] = "keys"
    """What those send each other in attention; of no meaning with one."""

    engine: Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"] = "ddp"
    """What several processes share; of no meaning with one."""
    shard_offload: Literal["none", "optimizer", "parameters"] = "none"
    """Shards that wait in host memory between their uses."""
    loads_shards: bool = False
    """Each process reads its own rows of the model's files; else the whole model, before it is cut."""
    zero_bucket: int = 0
    """Numbers that DeepSpeed reduces, or gathers, at once; 0: it is not used."""
    checkpoint_layout: Literal["full", "sharded"] = "full"
    """Who writes checkpoints: the main process whole weights, or each its shards."""
    background_save: bool = False
    """What is saved is copied into host memory, and written from there while the run goes on."""

    dtype: Literal["float32", "bfloat16", "float16"]
    """Precision of the weights and of the computation."""
    attention: Literal["cpu", "cuda", "flash", "flex", "dense", "stock"]
    """Attention back end; `stock` is transformers' own on padded rows."""
    liger: bool
    """Liger kernels for norms, SwiGLU and RoPE."""
    adapter: Adapter | None
    """The adapter that is trained, or none."""
    quantize: Literal["none", "4bit", "8bit"]
    """How the frozen weights are stored."""

    max_length: int | None
    """Longest sequence in tokens."""
    truncation: Truncation
    """What a longer row loses: its end, its start, or all."""
    max_prompt: int | None = None
    """Longest prompt in tokens; where completions are written, with the room that they need."""
    max_completion: int | None = None
    """Longest answer of the data in tokens."""
    group_prompts: bool = False
    """Rows with the same prompt share a sequence."""
    packing: Packing
    """How rows fill sequences of `max_length`."""
    documents_see_each_other: bool
    """Packed rows of one sequence attend to each other."""
    padding_free: bool
    """Rows of a micro-batch lie end to end in one sequence."""
    positions_by_row: bool = False
    """Positions of padding stay at those of the row's last token, so that they tell each row's length."""
    shared_prompts: bool = False
    """A prompt is computed once for all its answers, in one flattened row."""
    sampler: Literal["none", "native", "transformers", "vllm", "vllm_server"] = "none"
    """Who writes completions; none: the method writes no completions."""
    sampler_bytes: int = 0
    """Memory of a device that a vLLM process of the run fills while it writes; 0: there is none."""
    sampler_keys_bytes: int = 0
    """Of these, for keys and values."""
    sampler_context: int = 0
    """Longest prompt with its completion that the process is made for, in tokens."""
    sampler_sleep: Literal["none", "level1", "level2"] = "none"
    """What the process gives back while the policy trains."""
    gather_weights: bool = True
    """Weights in shards are gathered once for a rollout; else layer by layer in every pass that writes."""
    rollout_rows: int = 0
    """Completions that one rank writes at a time."""
    pass_factor: int = 1
    """So many times larger are micro-batches without gradients over completions."""
    reference: Literal["none", "copy", "adapter_off", "precomputed", "synced"] = "none"
    """Where the log-probs of the reference model come from."""
    value: Literal["none", "shared", "own"] = "none"
    """The value model: none; a second head on the policy; or a model of its own."""
    pad_to_multiple_of: int | None
    group_by_length: bool

    batch_rows: int | None
    """Rows of one optimizer step over all ranks, or None when said in tokens."""
    batch_tokens: int | None
    """Tokens of one optimizer step over all ranks, or None when said in rows."""
    micro_rows: int
    """Most rows of one micro-batch of one rank."""
    micro_tokens: int | None
    """Most tokens of one micro-batch of one rank; None: only rows count."""
    max_steps: int
    """Optimizer steps of the whole run."""

    checkpoint_every: int
    """Activation checkpointing of every n-th layer; 0 is off."""
    slice_tokens: int = 0
    """Tokens of the slices in which each layer goes over a row, forward and backward; 0: the whole row."""
    offload: Literal["none", "boundaries", "all"]
    """Activations that wait in host memory: none, the checkpointed layer inputs, or every saved tensor."""
    offload_keep: int = 0
    """Last checkpointed layers whose inputs stay on the device."""
    offload_disk: str | None = None
    """Folder for offloaded activations that host memory has no room for."""
    offload_host_bytes: int | None = None
    """Most host memory of a process for them; the oldest go to the folder. None: no limit."""
    loss: Literal["chunked", "full", "liger"]
    loss_tile_bytes: int

    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit", "adafactor", "muon", "sgd"]
    master_weights: bool
    """Float32 copies of the weights in the optimizer."""
    expandable_segments: bool
    """CUDA caching allocator with expandable segments."""

    beside_bytes: int | None = None
    """What the device needs beside tensors, as measured here; None: typical values."""
    in_backward: bool = False
    """Each weight is stepped in the backward pass as soon as its gradient is whole, which is then freed."""
    optimizer_offload: bool = False
    """Optimizer states wait in host memory and travel to the device for the step, some at a time."""
    rehearse: bool = False
    """The heaviest batch is tried before the first step."""
    recovery: tuple[Literal["split", "slices", "checkpointing", "offloading", "loss_tile"], ...] = ()
    """What may be done when memory runs out during the run; nothing: the run ends."""

    @property
    def row_limits(self) -> RowLimits:
        """How rows are cut and packed."""
        said: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(RowLimits)}
        return RowLimits(**said)

    @property
    def num_replicas(self) -> int:
        """Into how many parts the rows of a step are dealt: processes, or groups of those that share rows."""
        return self.num_processes // self.context_parallel
