"""A model for Hugging Face from any checkpoint of a run, whatever engine and layout wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from memtrain.errors import ResumeError
from memtrain.memory.plan.plan import Plan, plan_of_run
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.model import Model
from memtrain.trainers.build.components import build_model
from memtrain.trainers.checkpoints.checkpoint import Checkpoint, complete_steps, newest_complete
from memtrain.trainers.checkpoints.manifest import fault_of, read_manifest
from memtrain.trainers.checkpoints.row_shards import fill_from
from memtrain.trainers.data.store.token_store import META_FILE, TokenStore
from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of
from memtrain.trainers.model.heads.reward_head import head_of_rewards
from memtrain.trainers.model.loading.lazy_save import LazyWeights, lazy_weights
from memtrain.trainers.model.loading.load import DTYPES, load_model
from memtrain.trainers.model.loading.save import MOST_BYTES, refuse_to_overwrite, save_final
from memtrain.trainers.model.loading.sharded_init import NeedsWhole, kept_in_parts, kept_of
from memtrain.trainers.online.rewards.reading import reading_of, write_reading
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.tools.merge import known_dtype
from memtrain.trainers.tools.same_model import (
    Difference,
    Make,
    difference,
    outputs,
    refuse_another,
    row_of,
    unchecked_folder,
)
from memtrain.trainers.tools.trained_model import refuse_without_run, run_around


@dataclass(frozen=True, slots=True)
class Exported:
    """Model that was written."""

    folder: Path
    step: int
    dtype: str
    num_files: int
    """Files of weights."""
    is_adapter: bool
    compared: Difference
    """Distance from the weights of the checkpoint."""
    why_whole: str = ""
    """Reason why the host held the whole model, where it did."""


@torch.no_grad()
def export_run(
    run: Path,
    output: Path | None = None,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = MOST_BYTES,
) -> Exported:
    """Write `output` (`run/export` when not given): the model of the newest checkpoint, or of `step`'s.

    Works on the CPU, without the engine that trained it; the host holds one module at a time, where
    `why_whole` does not say otherwise. An adapter stays one. Weights are rounded once to `dtype` (the run's
    own when not given). The run is not touched. Then the checkpoint and what was written read a row of tokens
    (`same_model`), and what is not the same model is removed.

    Raises: LaunchError when there is no plan, `output` holds something, or what was written is another model
    than the checkpoint; ResumeError when there is no sound
    checkpoint of that step.
    """
    run = run_around(run)
    refuse_without_run(run, "`export` writes")
    plan = plan_of_run(run)
    output = output or run / "export"
    refuse_to_overwrite(output)
    to = known_dtype(dtype or plan.settings.dtype)
    checkpoint = _checkpoint(RunFolder(run), step)
    tokenizer = tokenizer_of(plan.recipe.model)

    is_score = METHODS[plan.recipe.method].head == "score"

    def built() -> PreTrainedModel | PeftModel:
        """The model of the plan; its trained weights are still to be read."""
        made = build_model(_on_host(plan), vocab_size=len(tokenizer))
        if is_score:
            head_of_rewards(_base(made)).float()
        return made

    why_whole = ""
    with unchecked_folder(output) as unchecked:
        try:
            with kept_in_parts(lambda shape: range(0)):
                model = built()
            state = _state(model, checkpoint, DTYPES[to])
            save_final(model, tokenizer, unchecked, state, max_shard_bytes=max_shard_bytes)
        except NeedsWhole as error:
            why_whole = str(error)
            model = built()
            fill_from(checkpoint, "weights", _trained(model), rank=0, world=1, may_hold_more=True)
            if not isinstance(model, PeftModel):
                model = model.to(DTYPES[to])  # pyright: ignore[reportArgumentType]
            save_final(model, tokenizer, unchecked, max_shard_bytes=max_shard_bytes)
        if is_score and (Path(plan.data.train.folder) / META_FILE).is_file():
            write_reading(reading_of(TokenStore.open(plan.data.train.folder).meta), unchecked)
        is_adapter = isinstance(model, PeftModel)
        del model
        compared = _compared(plan, built, checkpoint, unchecked, to, len(tokenizer), is_adapter=is_adapter)
        refuse_another(compared, "what was exported", "the checkpoint", checkpoint.path)
    return Exported(
        output,
        checkpoint.manifest.facts.step,
        "float32" if is_adapter else to,
        len(list(output.glob("*.safetensors"))),
        is_adapter,
        compared,
        why_whole,
    )


def _compared(
    plan: Plan,
    built: Make,
    checkpoint: Checkpoint,
    written: Path,
    dtype: str,
    vocab_size: int,
    *,
    is_adapter: bool,
) -> Difference:
    """Distance of the written model, or of the written adapter on its base, from a checkpoint."""

    def of_checkpoint(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
        """What reads each trained weight of the checkpoint."""

        def read(name: str, like: Tensor) -> Tensor:
            made = {f"model.{name}": torch.empty_like(like, device="cpu")}
            fill_from(checkpoint, "weights", made, rank=0, world=1, may_hold_more=True)
            return made[f"model.{name}"]

        return {name: partial(read, name, p) for name, p in model.named_parameters() if p.requires_grad}

    def read_back() -> PreTrainedModel:
        """The model that was written, or the base of the adapter."""
        named = plan.recipe.model if is_adapter else Model(path=str(written))
        settings = _on_host(plan).settings
        return load_model(
            named,
            settings if is_adapter else settings.model_copy(update={"dtype": dtype}),
            seed=plan.recipe.train.seed,
            vocab_size=vocab_size,
            head=METHODS[plan.recipe.method].head,
            is_new=is_adapter,
            drawn_on=plan.settings.device,
        )

    row = row_of(plan, vocab_size)
    expected, _ = outputs(built, row, read=of_checkpoint)
    return difference(
        plan,
        row,
        expected,
        read_back,
        (),
        "float32" if is_adapter else dtype,
        written if is_adapter else None,
    )


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained weights by their names in a checkpoint: as the scorer has them, which holds the model.

    PPO's has a value head besides.
    """
    return {f"model.{name}": p for name, p in model.named_parameters() if p.requires_grad}


def _state(
    model: PreTrainedModel | PeftModel, checkpoint: Checkpoint, dtype: torch.dtype
) -> Mapping[str, Tensor] | LazyWeights:
    """The weights of a model without data: an adapter's own, or all, read as they are written.

    Raises: NeedsWhole where one was not trained, and is in no file.
    """
    trained = _trained(model)

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        """Trained weights of the checkpoint."""
        made = {f"model.{name}": torch.empty_like(trained[f"model.{name}"], device="cpu") for name in names}
        fill_from(checkpoint, "weights", made, rank=0, world=1, may_hold_more=True)
        return {name.removeprefix("model."): tensor for name, tensor in made.items()}

    if isinstance(model, PeftModel):
        return read(name.removeprefix("model.") for name in trained)
    kept, frozen = kept_of(model), {name for name, p in model.named_parameters() if not p.requires_grad}
    if any(kept[name].here is not None for name in frozen):
        raise NeedsWhole("random weights that were not trained are drawn together")
    plain = model.to(dtype)  # pyright: ignore[reportArgumentType]

    def make(names: Sequence[str]) -> dict[str, Tensor]:
        """Weights as the checkpoint has them, or their files where they are frozen."""
        made = read(name for name in names if name not in frozen)
        for name in frozen.intersection(names):
            shape = kept[name].shape
            made[name] = kept[name].numbers(range(shape.numel())).view(shape)
        return {name: tensor.to(dtype) for name, tensor in made.items()}

    return lazy_weights(plain, make)


def _on_host(plan: Plan) -> Plan:
    """The plan for one process on a CPU, with nothing done to activations; trained weights are the
    checkpoint's, so that an adapter which the run went on from is not read."""
    adapter = plan.settings.adapter
    changes: dict[str, object] = {
        "adapter": adapter and adapter.model_copy(update={"path": None}),
        "device": "cpu",
        "num_processes": 1,
        "engine": "ddp",
        "quantize": "none",
        "attention": "transformers",
        "liger": False,
        "kernels": "transformers",
        "checkpoint_every": 0,
        "offload": "none",
    }
    return plan.model_copy(update={"settings": plan.settings.model_copy(update=changes)})


def _base(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel), "A run trains a transformers model."
    return base


def _checkpoint(folder: RunFolder, step: int | None) -> Checkpoint:
    """The newest sound checkpoint, or that of a step. Raises: ResumeError."""
    known = complete_steps(folder.checkpoints)
    there = f"give a step that it has: {', '.join(map(str, known))}" if known else "the run must save first"
    if step is None:
        found = newest_complete(folder).checkpoint
        if found is None:
            raise ResumeError("the run has no intact checkpoint", str(folder.checkpoints), there)
        return found
    if step not in known:
        raise ResumeError(f"the run has no checkpoint of step {step}", str(folder.checkpoints), there)
    reason = fault_of(known[step])
    if reason:
        raise ResumeError(f"the checkpoint of step {step} is damaged: {reason}", str(known[step]), there)
    return Checkpoint(known[step], read_manifest(known[step]))
