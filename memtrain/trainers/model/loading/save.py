"""The trained model as a folder in the Hugging Face format; an adapter stays an adapter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from memtrain.errors import LaunchError, first_line_of
from memtrain.trainers.model.loading.generation_config import storable
from memtrain.trainers.model.loading.lazy_save import LazyWeights, write_weights
from memtrain.trainers.model.loading.link_weights import linking
from memtrain.trainers.model.loading.scoring_pad import scores_sequences, with_scoring_pad
from memtrain.trainers.runtime.atomic_files import disk_fault, share_one_mode, system_errors
from memtrain.trainers.runtime.deepspeed_import import name_device
from memtrain.trainers.runtime.own_trees import put_in_place, remove_half_written

MOST_BYTES = 50 * 10**9
"""Bytes of one file of weights: transformers' own limit."""

TRIED = ".final-tried-"
"""Beginning of the name of a folder in which a save is tried."""

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_final(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state: Mapping[str, Tensor] | LazyWeights | None = None,
    *,
    max_shard_bytes: int = MOST_BYTES,
    saved: Path | None = None,
    beside: Callable[[Path], None] = lambda unfinished: None,
    is_ours: bool = False,
) -> Path | None:
    """Write `folder`: safetensors, config, generation config and tokenizer; or the adapter with its
    tokenizer.

    `state`: whole weights by name, where the model has only some rows of them, or weights that are made as
    they are written, where a full model has no data. A full model is written in files of at most
    `max_shard_bytes`, with an index where there are several. `saved`: weights of a checkpoint with the values
    of the model now; they are linked where names match (`link_weights`). `beside`: writes more files into the
    folder that it is given, before that has its name.

    The folder is whole or, after a kill, not there: it is written beside and renamed. One that is there
    already is replaced where memtrain wrote all of it (`is_ours`). Anything else, and a link, is set aside
    whole, and its new name is returned. The special tokens that the model's configuration leaves open are the
    tokenizer's; generation also stops at the tokenizer's end-of-sequence token, which is the one that was
    learned. A model that scores sequences pads with a token that ends none (`scoring_pad`).

    Raises: LaunchError when the disk refuses, or there are no weights in what was written.
    """
    least = _least_bytes(model, state)
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if scores_sequences(whole):
        tokenizer = with_scoring_pad(tokenizer, whole.get_input_embeddings().num_embeddings)
    # transformers takes entries out of the state as it writes them.
    is_lazy = isinstance(state, LazyWeights)
    given: dict[str, Any] = {} if state is None else {"state_dict": {} if is_lazy else dict(state)}
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    remove_half_written(unfinished)
    name_device()
    try:
        unfinished.mkdir(parents=True)
        with system_errors(), linking(saved):
            if isinstance(model, PeftModel):
                # "auto" would ask the hub for a vocabulary size; a trained embedding is in the adapter.
                model.save_pretrained(str(unfinished), save_embedding_layers=False, **given)
                _save_generation(model.get_base_model(), unfinished)
            else:
                with _storable_generation(model) as generation:
                    model.save_pretrained(unfinished, max_shard_size=max_shard_bytes, **given)
                if is_lazy:
                    write_weights(model, state, unfinished, max_shard_bytes)
                _save_configs(model, generation, tokenizer, unfinished)
        tokenizer.save_pretrained(unfinished)
        _refuse_empty(unfinished, least)
        share_one_mode(unfinished)
        beside(unfinished)
        return put_in_place(unfinished, folder, is_ours=is_ours)
    except OSError as error:
        remove_half_written(unfinished)
        raise disk_fault(error, "the model cannot be saved", folder) from None


def _least_bytes(model: nn.Module, state: Mapping[str, Tensor] | LazyWeights | None) -> int:
    """Bytes of the weights that must be in the files: all, or the trained beside frozen weights."""
    if isinstance(state, LazyWeights):
        return state.num_bytes
    if state is not None:
        return sum(tensor.nbytes for tensor in state.values())
    is_adapter = isinstance(model, PeftModel)
    return sum(p.nbytes for p in model.parameters() if p.requires_grad or not is_adapter)


def _refuse_empty(folder: Path, least: int) -> None:
    """Raise LaunchError when the files hold less than that: a save that wrote nothing says so nowhere."""
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not 0 < least <= written:
        raise LaunchError(
            f"the model was written with {written:,} bytes of weights, and the model has {least:,}",
            str(folder),
            "the last checkpoint is intact: memtrain export makes a model of it; please report this",
        )


def refuse_to_overwrite(folder: Path) -> None:
    """Nothing when `folder` is free. Raises: LaunchError when something is in it, or it is a link."""
    if folder.is_symlink():
        raise LaunchError(
            f"{folder} is a link, and a model is not written through one",
            str(folder),
            f"remove it, or give the folder itself with -o: {folder.resolve()}",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LaunchError(
            f"{folder} exists already", str(folder), "remove it, or give another folder with -o"
        )


def _save_generation(model: nn.Module, folder: Path) -> None:
    """Save the generation configuration where an adapter learned another end token than its model's
    configuration names."""
    if _ends_otherwise(model):
        made, _ = storable(model)
        assert made is not None, "What ends otherwise has such a configuration."
        made.save_pretrained(folder)


def _ends_otherwise(model: nn.Module) -> bool:
    generation, config = getattr(model, "generation_config", None), getattr(model, "config", None)
    return generation is not None and generation.eos_token_id != getattr(config, "eos_token_id", None)


def stop_at(model: PreTrainedModel, token_id: int) -> None:
    """Let generation stop at the token that ends a turn too, here and in the saved model."""
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        _add_end(generation, token_id)


def _add_end(generation: Any, token_id: int) -> None:
    known = generation.eos_token_id
    ends = [] if known is None else list(known) if isinstance(known, list | tuple) else [known]
    if token_id not in ends:
        generation.eos_token_id = [*ends, token_id] if ends else token_id


def try_final(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, run_dir: Path
) -> list[str]:
    """Save the model once without its weights, and remove it: all that can refuse at the end refuses now.

    Returns what of its configuration will be saved otherwise than it was read, in words.

    Raises: LaunchError when the disk refuses, or transformers does.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    adapted = [name for name in names if "lora_" in name]
    # PEFT looks for every module that is trained whole beside the adapter.
    beside = [name for name in names if "modules_to_save" in name]
    stub = {name: torch.zeros(1) for name in [(adapted or names)[0], *beside]}
    try:
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        notes = storable(base)[1] if base is model or _ends_otherwise(base) else []
        with TemporaryDirectory(dir=run_dir, prefix=TRIED) as place:
            save_final(model, tokenizer, Path(place) / "final", stub)
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError, NotImplementedError) as error:
        raise LaunchError(
            f"the model could not be saved at the end of the run: {first_line_of(error)}",
            "model.path",
            "fix its configuration files; nothing was trained",
        ) from error
    return notes


@contextmanager
def _storable_generation(model: PreTrainedModel) -> Iterator[GenerationConfig | None]:
    """The model has a generation configuration that transformers writes, inside."""
    made, _ = storable(model)
    if made is None:
        yield None
        return
    given = model.generation_config
    model.generation_config = made
    try:
        yield made
    finally:
        model.generation_config = given


def _save_configs(
    model: PreTrainedModel,
    generation: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> None:
    """The configurations of a model that is to be used, not trained: with its cache and the special
    tokens."""
    config = deepcopy(model.config)
    config.use_cache = True
    # A model that scores sequences writes none, and has no such configuration.
    configs: list[Any] = [config] if generation is None else [config, generation]
    for one in configs:
        for name in SPECIAL:
            if getattr(one, name, None) is None:
                setattr(one, name, getattr(tokenizer, name, None))
    if scores_sequences(model):
        # By it transformers finds the token that is scored.
        for one in {id(held): held for held in (config, config.get_text_config())}.values():
            one.pad_token_id = getattr(tokenizer, "pad_token_id", None)
    if generation is not None and isinstance(tokenizer.eos_token_id, int):
        _add_end(generation, tokenizer.eos_token_id)
    for one in configs:
        one.save_pretrained(folder)
