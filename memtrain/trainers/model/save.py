"""The trained model as a folder in the Hugging Face format; an adapter stays an adapter."""

from __future__ import annotations

import os
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from memtrain.errors import LaunchError
from memtrain.trainers.run.disk import disk_fault

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def save_final(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write `folder`: safetensors, config, generation config and tokenizer; or the adapter with its
    tokenizer.

    The folder is whole or, after a kill, not there: it is written beside and renamed. One that is there
    already is replaced. The special tokens that the model's configuration leaves open are the tokenizer's;
    generation also stops at the tokenizer's end-of-sequence token, which is the one that was learnt.

    Raises: LaunchError when the disk refuses.
    """
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        if isinstance(model, PeftModel):
            # "auto" would ask the hub for a vocabulary size; a trained embedding is in the adapter anyway.
            model.save_pretrained(str(unfinished), save_embedding_layers=False)
        else:
            model.save_pretrained(unfinished)
            _save_configs(model, tokenizer, unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise disk_fault(error, "the model cannot be saved", folder) from None


def refuse_to_overwrite(folder: Path) -> None:
    """Nothing when `folder` is free. Raises: LaunchError when something is in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LaunchError(
            f"{folder} is there already", str(folder), "remove it, or name another folder with -o"
        )


def _save_configs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The configurations of a model that is to be used, not trained: with its cache and the special
    tokens."""
    config = deepcopy(model.config)
    config.use_cache = True
    # A model that scores sequences writes none, and has no such configuration.
    generation = deepcopy(getattr(model, "generation_config", None))
    configs: list[Any] = [config] if generation is None else [config, generation]
    for one in configs:
        for name in SPECIAL:
            if getattr(one, name, None) is None:
                setattr(one, name, getattr(tokenizer, name, None))
    if generation is not None and isinstance(tokenizer.eos_token_id, int):
        known = generation.eos_token_id
        ends = list(known) if isinstance(known, list | tuple) else [known]
        if tokenizer.eos_token_id not in ends:
            generation.eos_token_id = [*ends, tokenizer.eos_token_id]
    for one in configs:
        one.save_pretrained(folder)
