"""The sections about the run itself: `train:`, `save:`, `log:` and `cluster:`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from memtrain.recipes.sections.base import PositiveInt, Section, one_or_many
from memtrain.recipes.sections.slurm import Slurm


class LossWatchdog(Section):
    """Early end, with an error, of a run whose training loss stays high."""

    threshold: Annotated[float, Field(gt=0)]
    """Loss of a step above which it counts as high."""

    patience: PositiveInt = 3
    """High steps in a row after which the run ends. The count goes on in a resumed run."""


class Train(Section):
    """Length of the run and size of an optimizer step. The batch size is set once; the rest is derived and
    shown."""

    batch_size: PositiveInt | None = None
    """Rows of one optimizer step over all devices. A row is an example, or a packed sequence."""

    batch_tokens: PositiveInt | None = None
    """Tokens of one optimizer step over all devices, in place of `batch_size`. If neither is set: 32 rows."""

    micro_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Rows that one device takes at once. Higher: faster, more activation memory. Same numbers."""

    micro_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens that one device takes at once (padding-free runs)."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data. If neither this nor `max_steps` is set: 1."""

    max_steps: PositiveInt | None = None
    """Optimizer steps, in place of `epochs`."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of shuffling, sampling, dropout and random weights. The same seed gives the same run, on a GPU to
    rounding (`deterministic`)."""

    deterministic: bool = False
    """Sums in one order, by torch's deterministic algorithms: on a GPU too the same recipe on the same
    machine gives the same bits, and a killed run resumes bit for bit. Backward passes of attention are
    slower, and what has no such kernels is refused: on a GPU completions (online methods, `eval.samples`,
    `eval.metrics`) and layers with a state."""

    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Record the forward and the backward pass of each shape of rows as CUDA graphs, and replay them: the
    host launches no kernel of a layer any more. Same numbers. Rows are padded to one of a few lengths.
    `auto`: off until it ran on a GPU, which it has not yet; `on` is refused where the plan's strategies or
    the model do not allow it."""

    shuffle: bool = True
    """New order of the rows in every epoch."""

    router_aux_loss_coef: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """Weight of the load-balancing loss of a mixture of experts, over all tokens of a step; 0.001 is
    usual. `auto`: the model's own, where its configuration asks for it (output_router_logits: true), else
    0. Costs one more forward pass a step, without gradients."""

    loss_watchdog: LossWatchdog | None = None
    """End the run when its loss stays high: `{threshold: 5.0, patience: 3}`. A loss that is not finite ends a
    run in any case."""

    @model_validator(mode="after")
    def _set_once(self) -> Train:
        if self.batch_size is not None and self.batch_tokens is not None:
            raise ValueError(
                "the batch size is set twice; set train.batch_size or train.batch_tokens, not both"
            )
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError(
                "the length of the run is set twice; set train.epochs or train.max_steps, not both"
            )
        return self


class Save(Section):
    """Checkpoints: complete or not there at all, verified before they are used."""

    every_steps: PositiveInt | None = None
    """Save every n optimizer steps. If not set: at the end of every epoch."""

    per_epoch: PositiveInt | None = None
    """Save n times an epoch, after equal parts of it, the last at its end. In place of `every_steps`."""

    keep: PositiveInt = 2
    """Number of checkpoints to keep; older ones are removed."""

    layout: Literal["auto", "sharded", "full"] = "auto"
    """`sharded`: each process writes its own shards, all at once. `full`: the main process gathers and
    writes whole weights, which takes host memory for all of them. `auto`: sharded where the engine shards.
    A run can continue from either with any number of processes, and `memtrain export` makes a model of it."""

    async_save: bool = False
    """Write checkpoints in the background: a save blocks training only while weights and states are copied
    into host memory, which the plan counts. A save waits for the one before it. Same numbers; a disk error
    is reported after a later step."""

    allow_changed_keys: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ()
    """Keys or sections (`optim.lr`, `data`) that may differ from those in the checkpoint: from there it is
    another run, and says so. Not keys that decide the shapes of states: method, model, optim.kind."""

    keep_best: bool = False
    """Also save and keep the weights with the best held-out loss so far (or reward, or the metric of
    `eval.early_stopping`), and make them the final model. `eval.early_stopping` does so too."""

    @model_validator(mode="after")
    def _one_interval(self) -> Save:
        if self.every_steps is not None and self.per_epoch is not None:
            raise ValueError("saves are set twice; set save.every_steps or save.per_epoch, not both")
        return self


class Log(Section):
    """Output during the run. `metrics.jsonl` has every step in any case."""

    every_steps: PositiveInt = 10
    """Print a line every n optimizer steps (a file or a pipe; a terminal shows every step)."""

    final_sample: bool = True
    """Generate 48 tokens with the trained model at the end of the run, for the report (a few seconds)."""

    trackers: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], BeforeValidator(one_or_many)
    ] = ()
    """Also report to these trackers."""

    project: str = "memtrain"
    """Project name in the trackers."""


class Cluster(Section):
    """Devices and processes. The plan decides the rest."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device. `auto`: CUDA when there is one."""

    processes: PositiveInt | Literal["auto"] = "auto"
    """Processes (one a device). `auto`: one for every CUDA device, one on a CPU."""

    threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads of one process. `auto`: the cores, divided by the processes."""

    context_parallel: PositiveInt | Literal["auto"] = 1
    """Processes that share each row, one slice each (context parallelism), for rows too long for one
    device. Activations of a process shrink accordingly; keys and values are gathered in every layer. Same
    numbers: packed documents stay apart. It must divide the processes. `auto`: the fastest of 1, 2, 4, ...
    that fits."""

    context_parallel_mode: Literal["all_gather", "ulysses"] = "all_gather"
    """Exchange in attention between processes that share a row. `all_gather`: the keys and values of
    documents that cross slices. `ulysses`: all of them, twice; each process attends for some heads of
    whole rows, so the processes must divide the heads. Same numbers."""

    engine: Literal["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = "auto"
    """Division of the run over several processes. `ddp`: only rows are divided; each process holds all
    weights. `fsdp2`: weights, gradients and optimizer states too, in shards; a layer is gathered while it
    computes. `zero1`, `zero2`, `zero3`: DeepSpeed divides optimizer states; also gradients; also weights.
    `auto`: the fastest that fits, and the simplest of equally fast ones; DeepSpeed only where it is
    installed and gives the same result."""

    cpu_offload: Literal["auto", "none", "optimizer", "parameters"] = "auto"
    """State kept in host memory between uses. `optimizer`: optimizer states, with a DeepSpeed engine;
    `parameters`: shards of weights, gradients and states (fsdp2, zero3). Less device memory, much slower
    steps. `auto`: what makes the run fit, where nothing else does."""

    stop_grace_s: PositiveInt = 600
    """Seconds without progress in any process after which a run that was asked to stop is killed. Anything
    computed or saved counts as progress."""

    slurm: Slurm | None = None
    """The job that `memtrain slurm` writes and submits."""

    @property
    def sharing(self) -> int:
        """Processes that hold each row together, as far as the recipe says it."""
        return 1 if self.context_parallel == "auto" else self.context_parallel
