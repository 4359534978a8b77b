"""Every resolved engine setting, which the worker obeys and the estimate reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from memtrain.memory.plan.row_form import RowForm
from memtrain.recipes.sections.base import Section
from memtrain.recipes.sections.length import Packing, RowLimits, Truncation
from memtrain.recipes.sections.methods.distill import TeacherKind
from memtrain.recipes.sections.model import Adapter
from memtrain.recipes.sections.optim import OptimizerKind

Resumed = Literal[
    "bits",
    "sums",
    "recipe",
    "length",
    "train.batch_size",
    "train.batch_tokens",
    "model.dtype",
    "generate.backend",
]
"""The meaning of another value for a run that goes on: the same numbers bit for bit; sums in another order;
another run, named by its own recipe key; a run of another length; or another run, named by the key listed."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Facts about a setting that the rest of memtrain needs, stated once where the setting stands."""

    resumed: Resumed
    not_of_kind: str = ""
    """Reason that runs which differ in it correct one another's predictions; empty: they err apart, because
    the setting changes which tensors are there, or where."""


class Settings(Section):
    """Decided settings of a run, with nothing left open. Made by the resolver, never changed."""

    device: Annotated[Literal["cpu", "cuda"], Mark("sums")]
    """Kind of device of every process."""
    num_processes: Annotated[int, Mark("sums")]
    """Processes over all nodes (the world size)."""
    threads: Annotated[int, Mark("sums", "threads of the CPU hold no tensors")]
    """CPU threads of one process."""
    deterministic: Annotated[
        bool, Mark("sums", "which kernels sum in one order; they keep the same tensors")
    ] = False
    """Every sum has one order, or its operator raises."""
    context_parallel: Annotated[int, Mark("sums")] = 1
    """Processes that hold each row together, a slice each."""
    context_by: Annotated[Literal["all_gather", "ulysses"], Mark("sums")] = "all_gather"
    """Exchange in attention between processes of a row; of no meaning with one."""

    engine: Annotated[Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"], Mark("sums")] = "ddp"
    """State that several processes share; of no meaning with one."""
    shard_offload: Annotated[Literal["none", "optimizer", "parameters"], Mark("bits")] = "none"
    """Shards that wait in host memory between their uses."""
    loads_shards: Annotated[bool, Mark("bits")] = False
    """Each process reads its own rows of the model's files; else the whole model, before it is cut."""
    zero_bucket: Annotated[
        int, Mark("sums", "a size, given by the model; whether there is one is the engine's")
    ] = 0
    """Numbers that DeepSpeed reduces, or gathers, at once; 0 without DeepSpeed."""
    checkpoint_layout: Annotated[Literal["full", "sharded"], Mark("bits")] = "full"
    """Writers of checkpoints: the main process whole weights, or each its shards."""
    background_save: Annotated[bool, Mark("bits")] = False
    """Whether a save is copied into host memory, and written from there while the run goes on."""

    dtype: Annotated[Literal["float32", "bfloat16", "float16"], Mark("model.dtype")]
    """Precision of the weights and of the computation."""
    attention: Annotated[
        Literal[
            "torch_cpu",
            "torch_varlen",
            "flash",
            "flash3",
            "flex",
            "torch_efficient",
            "masked",
            "transformers",
        ],
        Mark("sums"),
    ]
    """Attention back end; `transformers` is transformers' own on padded rows."""
    liger: Annotated[bool, Mark("sums")]
    """Liger kernels for norms, SwiGLU and RoPE."""
    kernels: Annotated[Literal["transformers", "fused"], Mark("sums")] = "transformers"
    """Norms, SwiGLU and RoPE as transformers computes them, or in few kernels."""
    loss_kernel: Annotated[Literal["torch", "triton"], Mark("sums")] = "torch"
    """Kernels of a tile of the chunked loss."""
    compiled: Annotated[bool, Mark("sums")] = False
    """Decoder layers are compiled, each by itself."""
    adapter: Annotated[Adapter | None, Mark("recipe")]
    """The adapter that is trained, or none."""
    quantize: Annotated[Literal["none", "4bit", "8bit"], Mark("recipe")]
    """Storage of the frozen weights."""

    max_length: Annotated[int | None, Mark("recipe", "a size of the rows")]
    """Longest sequence in tokens."""
    truncation: Annotated[Truncation, Mark("recipe", "which rows and tokens are kept")]
    """Part that a longer row loses: its end, its start, or all."""
    max_prompt: Annotated[int | None, Mark("recipe", "a size of the rows")] = None
    """Longest prompt in tokens; where completions are written, with the room that they need."""
    max_completion: Annotated[int | None, Mark("recipe", "a size of the rows")] = None
    """Longest answer of the data in tokens."""
    group_prompts: Annotated[
        bool, Mark("recipe", "how many answers share a prompt; that they share one is shared_prompts")
    ] = False
    """Rows with the same prompt share a sequence."""
    packing: Annotated[
        Packing, Mark("recipe", "how full the rows are; that they lie end to end is padding_free's")
    ]
    """Layout of rows in sequences of `max_length`."""
    cross_document_attention: Annotated[bool, Mark("recipe", "the range of attention, not its kept tensors")]
    """Packed rows of one sequence attend to each other."""
    padding_free: Annotated[bool, Mark("sums")]
    """Rows of a micro-batch lie end to end in one sequence."""
    positions_by_row: Annotated[bool, Mark("recipe", "which positions padding has, not how many")] = False
    """Positions of padding repeat the row's last position, and so mark each row's length."""
    shared_prompts: Annotated[bool, Mark("sums")] = False
    """A prompt is computed once for all its answers, in one flattened row."""
    sampler: Annotated[
        Literal["none", "native", "transformers", "vllm", "vllm_server"], Mark("generate.backend")
    ] = "none"
    """Sampler of completions; none: the method writes no completions."""
    sampler_bytes: Annotated[int, Mark("sums", "a size, beside the tensors of the run")] = 0
    """Memory of a device that a vLLM process of the run fills while it writes; 0: there is none."""
    sampler_keys_bytes: Annotated[int, Mark("sums", "a part of sampler_bytes")] = 0
    """Of these, for keys and values."""
    sampler_context: Annotated[int, Mark("sums", "a size, of another process")] = 0
    """Longest prompt with its completion that the process is made for, in tokens."""
    sampler_sleep: Annotated[Literal["none", "level1", "level2"], Mark("bits")] = "none"
    """Memory that the sampler's process gives back while the policy trains."""
    gather_weights: Annotated[bool, Mark("bits")] = True
    """Weights in shards are gathered once for a rollout; else layer by layer in every pass that writes."""
    rollout_rows: Annotated[int, Mark("sums", "a size of the rollout")] = 0
    """Completions that one rank writes at a time."""
    sample_rows: Annotated[int, Mark("bits")] = 0
    """Completions of `eval.samples` and `eval.metrics` that one rank writes at a time; 0: none are asked."""
    cuda_graphs: Annotated[bool, Mark("sums", "which kernels are started together")] = False
    """The native sampler captures its passes as CUDA graphs."""
    step_graphs: Annotated[bool, Mark("sums", "which kernels are started together")] = False
    """Forward and backward passes of a step are recorded as CUDA graphs, and replayed."""
    pass_factor: Annotated[int, Mark("sums", "a size of the passes without gradients")] = 1
    """Factor by which micro-batches without gradients over completions are larger."""
    reference: Annotated[
        Literal["none", "copy", "adapter_off", "adapter_start", "precomputed", "synced"], Mark("sums")
    ] = "none"
    """Source of the reference model's log-probs."""
    teacher: Annotated[TeacherKind, Mark("sums")] = "none"
    """Source of a teacher's distribution."""
    teacher_top_k: Annotated[int, Mark("recipe")] = 0
    """Likeliest tokens of the teacher that its file has for each token; 0: there is no file."""
    value: Annotated[Literal["none", "shared", "own"], Mark("recipe")] = "none"
    """The value model: none; a second head on the policy; or a model of its own."""
    pad_to_multiple_of: Annotated[int | None, Mark("recipe", "a size of the rows")]
    group_by_length: Annotated[bool, Mark("recipe", "the order of the rows")]

    batch_size: Annotated[int | None, Mark("train.batch_size", "a size of the step")]
    """Rows of one optimizer step over all ranks, or None when given in tokens."""
    batch_tokens: Annotated[int | None, Mark("train.batch_tokens", "a size of the step")]
    """Tokens of one optimizer step over all ranks, or None when given in rows."""
    micro_batch_size: Annotated[int, Mark("sums", "a size of the micro-batch")]
    """Most rows of one micro-batch of one rank."""
    micro_tokens: Annotated[int | None, Mark("sums", "a size of the micro-batch")]
    """Most tokens of one micro-batch of one rank; None: only rows count."""
    max_steps: Annotated[int, Mark("length", "how long the run is")]
    """Optimizer steps of the whole run."""

    checkpoint_every: Annotated[int, Mark("bits")]
    """Activation checkpointing of every n-th layer; 0 is off."""
    slice_tokens: Annotated[int, Mark("sums")] = 0
    """Tokens of the slices in which each layer goes over a row, forward and backward; 0: the whole row."""
    weights_offload: Annotated[bool, Mark("bits")] = False
    """The layers' weights live in host memory, and are on the device for their layer's turn."""
    adapters_offload: Annotated[bool, Mark("bits")] = False
    """Adapters live there with their layers, and are stepped there; without an adapter all weights are."""
    offload: Annotated[Literal["none", "boundaries", "all"], Mark("bits")]
    """Activations that wait in host memory: none, the checkpointed layer inputs, or every saved tensor."""
    offload_keep: Annotated[int, Mark("bits")] = 0
    """Last checkpointed layers whose inputs stay on the device."""
    offload_disk: Annotated[
        str | None,
        Mark("bits", "the folder for overflow of host memory; no prediction of a peak reads it"),
    ] = None
    """Folder for offloaded activations that host memory has no room for."""
    offload_host_bytes: Annotated[
        int | None, Mark("bits", "a size, in host memory; no prediction of a peak reads it")
    ] = None
    """Most host memory of a process for them; the oldest go to the folder. None: no limit."""
    loss: Annotated[Literal["chunked", "full", "liger"], Mark("sums")]
    loss_tile_bytes: Annotated[int, Mark("sums", "a size of the loss")]

    optimizer: Annotated[OptimizerKind, Mark("recipe")]
    master_weights: Annotated[bool, Mark("recipe")]
    """Half-precision weights are stepped in float32."""
    copies: Annotated[Literal["float32", "split", "stochastic"], Mark("recipe")] = "float32"
    """Form of the float32 numbers between steps: copies, the bits a weight has lost, or nothing."""
    compressed_moments: Annotated[bool, Mark("recipe")] = False
    """AdamW's moments wait in 8 bits between steps."""
    expandable_segments: Annotated[bool, Mark("bits", "the allocator's slack, which is beside the peak")]
    """CUDA caching allocator with expandable segments."""

    beside_bytes: Annotated[
        int | None, Mark("bits", "the device's own bytes beside tensors, and so beside the peak")
    ] = None
    """Memory that the device needs beside tensors, as measured here; None: typical values."""
    in_backward: Annotated[bool, Mark("bits")] = False
    """Each weight is stepped in the backward pass as soon as its gradient is whole, which is then freed."""
    router_aux_loss_coef: Annotated[float, Mark("recipe")] = 0.0
    """Weight of the load-balance loss of a mixture's routers; 0: there is none."""
    router_replay: Annotated[bool, Mark("recipe")] = False
    """The update sends tokens to the experts that the sampler chose."""
    optimizer_offload: Annotated[bool, Mark("bits")] = False
    """Optimizer states wait in host memory and travel to the device for the step, some at a time."""
    preflight: Annotated[
        bool,
        Mark("bits", "noted with every run: a run without a dry run only raises a prediction"),
    ] = False
    """The heaviest batch is tried before the first step."""
    recovery: Annotated[
        tuple[Literal["split", "slices", "checkpointing", "offloading", "loss_tile", "weights"], ...],
        Mark("bits", "permitted later changes; the peak is the plan's until then"),
    ] = ()
    """Steps that are allowed when memory runs out during the run; nothing: the run ends."""

    @property
    def row_form(self) -> RowForm:
        """Layout of the rows in a micro-batch."""
        return RowForm(self.padding_free, self.positions_by_row, self.shared_prompts)

    @property
    def row_limits(self) -> RowLimits:
        """Limits and packing of rows."""
        limits: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(RowLimits)}
        return RowLimits(**limits)

    @property
    def num_replicas(self) -> int:
        """Into how many parts the rows of a step are dealt: processes, or groups of processes that share
        rows."""
        return self.num_processes // self.context_parallel


def mark_of(name: str) -> Mark:
    """The mark of a setting."""
    return next(one for one in Settings.model_fields[name].metadata if isinstance(one, Mark))


MARKS: dict[str, Mark] = {name: mark_of(name) for name in Settings.model_fields}
"""The mark of every setting, by its name."""
