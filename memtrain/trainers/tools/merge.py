"""A run's adapter folded into the weights it was trained on, as a full model."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from transformers import PreTrainedModel

from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import PLAN_FILE, read_plan
from memtrain.recipes.registry import METHODS
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.model.loading.adapters import load_adapter
from memtrain.trainers.model.loading.load import DTYPES, load_model
from memtrain.trainers.model.loading.locate import ADAPTER_FILE
from memtrain.trainers.model.loading.save import refuse_to_overwrite, save_final, stop_at
from memtrain.trainers.online.rewards.reading import READING_FILE
from memtrain.trainers.run_folder.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Merged:
    """The written files, with notes for the user."""

    folder: Path
    dtype: str
    num_modules: int
    """Modules whose weight took an update in."""
    was_quantized: str
    """`4bit` or `8bit` when the adapter was trained on quantized weights; the full ones were merged."""


def merge_run(run: Path, output: Path | None = None, dtype: str | None = None) -> Merged:
    """Write `output` (`run/merged` when not given): the base model of a run with its adapter folded in.

    Works on the CPU. Weights are taken as the run had them (its dtype, unquantized), the update is added in
    float32, and the sum is rounded once, to `dtype` (the run's own when not given). The run is not touched.

    Source: W + scale * B A, arXiv:2106.09685, section 4.1; rounding: TRL issue 6688 (merging in bfloat16
    drifts).

    Raises: LaunchError when the run has no plan or no finished adapter, or `output` holds something.
    """
    folder = RunFolder(run)
    plan = read_plan(run / PLAN_FILE)
    if not (folder.final / ADAPTER_FILE).is_file():
        is_full = (folder.final / "config.json").is_file()
        raise LaunchError(
            f"{folder.final} is already a full model" if is_full else f"{run} has no finished adapter",
            str(run),
            "use it as it is" if is_full else "the run must finish first",
        )
    output = output or run / "merged"
    refuse_to_overwrite(output)
    to = dtype or plan.settings.dtype
    if to not in DTYPES:
        raise LaunchError(
            f"unknown precision of weights: {to}", "--dtype", f"give one of {', '.join(DTYPES)}"
        )
    tokenizer = load_tokenizer(str(folder.final))
    settings = plan.settings.model_copy(
        update={"device": "cpu", "quantize": "none", "attention": "transformers"}
    )
    head = METHODS[plan.recipe.method].head
    seed = plan.recipe.train.seed
    base = load_model(
        plan.recipe.model,
        settings,
        seed=seed,
        vocab_size=len(tokenizer),
        head=head,
        drawn_on=plan.settings.device,
    )
    if plan.data.turn_end is not None:
        stop_at(base, plan.data.turn_end.token_id)
    adapted = load_adapter(base, str(folder.final))
    model, num_modules = fold(adapted, DTYPES[to])
    save_final(model, tokenizer, output)
    if (folder.final / READING_FILE).is_file():
        shutil.copy(folder.final / READING_FILE, output)
    return Merged(output, to, num_modules, plan.settings.quantize if plan.settings.quantize != "none" else "")


@torch.no_grad()
def fold(adapted: PeftModel, dtype: torch.dtype) -> tuple[PreTrainedModel, int]:
    """The model inside `adapted` in `dtype`, with every update added in float32, and how many there were.

    One layer at a time is float32, so that the host holds little more than the model itself.
    """
    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        base = layer.get_base_layer()
        base.to(torch.float32)
        layer.merge(safe_merge=True)  # pyright: ignore[reportCallIssue] every kind of LoRA layer has it
        base.to(dtype)
    model = adapted.unload()
    assert isinstance(model, PreTrainedModel), "A run adapts a transformers model."
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False
    return model.to(dtype), len(layers)  # pyright: ignore[reportArgumentType]
