"""The vLLM sampler of a run, as the plan says: its folder, its arguments, its device."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from memtrain.errors import LaunchError
from memtrain.memory.generation.vllm import BLOCK_TOKENS
from memtrain.memory.plan.plan import Plan
from memtrain.recipes.sections.vllm import Vllm
from memtrain.trainers.build.components import Built
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.online.generation.protocol import Sampler
from memtrain.trainers.online.vllm.process import Launch, environment_of
from memtrain.trainers.online.vllm.sampler import VllmSampler
from memtrain.trainers.online.vllm.server_sampler import ServerSampler
from memtrain.trainers.online.vllm.weight_sync import open_transport
from memtrain.trainers.runtime.ranks import Ranks

FOLDER = "vllm"
"""In the run folder: the model's configuration, and the log of each engine."""

PREFILL_TOKENS = 8192
"""Prompt tokens that a CPU engine reads in one pass at least."""

SLEEP_LEVELS = {"none": 0, "level1": 1, "level2": 2}


def open_engine(
    plan: Plan,
    built: Built,
    ranks: Ranks,
    *,
    longest_prompt: int,
    version: Callable[[], int],
    emit: Callable[[str], None],
    native: Callable[[], Sampler],
) -> VllmSampler | ServerSampler:
    """The sampler of this rank: a process of its own, or a server that is there.

    `longest_prompt`: of training and held-out rows, in tokens. `version`: grows whenever the weights change.
    `native`: who may go on where it fails too often.
    Raises: LaunchError when there is no such interpreter.
    """
    generate = plan.recipe.generation
    section = generate.vllm or Vllm()
    if section.server is None:
        return open_vllm(
            plan, built, ranks, longest_prompt=longest_prompt, version=version, emit=emit, native=native
        )
    return ServerSampler(
        model=built.model,
        address=section.server,
        folder=Path(section.shared_dir or Path(plan.run_dir) / FOLDER),
        version=version,
        ranks=ranks,
        emit=emit,
        deadline_s=section.deadline_s,
        start_deadline_s=section.start_deadline_s,
        restarts=section.restarts,
        fallback=native if section.on_failure == "native" else None,
        has_logprobs=logprobs_mode(plan) is not None,
        limit=generate.max_logprob_gap,
    )


def open_vllm(
    plan: Plan,
    built: Built,
    ranks: Ranks,
    *,
    longest_prompt: int,
    version: Callable[[], int],
    emit: Callable[[str], None],
    native: Callable[[], Sampler],
) -> VllmSampler:
    """The sampler of this rank with a process of its own, which is started when it is first needed."""
    generate, settings = plan.recipe.generation, plan.settings
    section = generate.vllm or Vllm()
    device = next(built.model.parameters()).device
    folder = Path(plan.run_dir) / FOLDER
    if ranks.is_main:
        describe_model(built, folder, with_tokenizer=bool(generate.stop))
    ranks.barrier()
    context = max(settings.sampler_context, longest_prompt + generate.max_tokens)
    mode = logprobs_mode(plan)
    launch = Launch(
        python=interpreter(section.python),
        engine=engine_arguments(plan, section, folder, context=context, device=device)
        | {"logprobs_mode": mode or "raw_logprobs"},
        log=folder / f"engine-{ranks.rank}.log",
        deadline_s=section.deadline_s,
        start_deadline_s=section.start_deadline_s,
        environment=environment(section, settings.threads, ranks, device),
    )
    transport = open_transport(
        folder,
        section.bucket,
        device,
        is_same_device=device.type == "cuda" and not section.devices,
        python=launch.python,
        environment=environment_of(launch.environment),
    )
    if transport.why_files:
        emit(f"vLLM reads new weights from files, not from the GPU: {transport.why_files}")
    return VllmSampler(
        model=built.model,
        launch=launch,
        transport=transport,
        version=version,
        emit=emit,
        sleep_level=SLEEP_LEVELS[settings.sampler_sleep],
        restarts=section.restarts,
        fallback=native if section.on_failure == "native" else None,
        has_logprobs=mode is not None,
        limit=generate.max_logprob_gap,
    )


def describe_model(built: Built, folder: Path, *, with_tokenizer: bool) -> None:
    """Write the files that vLLM reads of a model whose weights it gets later: its configuration, for stop
    strings the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    base = base_model(built.model)
    was = base.config.architectures
    base.config.architectures = [type(base).__name__]
    base.config.save_pretrained(folder)
    base.config.architectures = was
    if with_tokenizer:
        tokenizer: PreTrainedTokenizerFast = built.tokenizer
        tokenizer.save_pretrained(folder)


def engine_arguments(
    plan: Plan, section: Vllm, folder: Path, *, context: int, device: torch.device
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`."""
    settings, generate = plan.settings, plan.recipe.generation
    arguments: dict[str, Any] = {
        "model": str(folder.resolve()),
        "load_format": "dummy",
        "skip_tokenizer_init": not generate.stop,
        "dtype": settings.dtype,
        "max_model_len": context,
        "max_num_seqs": max(1, settings.rollout_rows),
        "kv_cache_memory_bytes": settings.sampler_keys_bytes,
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "enforce_eager": section.eager,
        "disable_log_stats": True,
    }
    if device.type == "cpu":
        # Seeds of single requests need prompts that are read whole (vLLM 0.32: a CPU generator has no
        # offset); the CPU's blocks of 128 tokens would never be shared by short prompts.
        return arguments | {
            "block_size": BLOCK_TOKENS,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(context, PREFILL_TOKENS),
        }
    memory = torch.cuda.get_device_properties(device).total_memory
    return arguments | {
        "gpu_memory_utilization": min(1.0, settings.sampler_bytes / memory),
        "enable_sleep_mode": settings.sampler_sleep != "none",
    }


def logprobs_mode(plan: Plan) -> str | None:
    """Mode of vLLM with log-probs of softmax(logits / temperature); None: neither mode.

    Processed ones come after truncation and penalty, raw ones before the temperature.
    """
    generate = plan.recipe.generation
    if not generate.truncates and generate.repetition_penalty == 1:
        return "processed_logprobs"
    return "raw_logprobs" if generate.temperature == 1 else None


def interpreter(python: str | None) -> str:
    """The interpreter, as a path. Raises: LaunchError when it is not there."""
    if python is None:
        import sys

        return sys.executable
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise LaunchError(
            f"there is no interpreter {python}",
            "generate.vllm.python",
            "give the python of an environment with vLLM (docs/generation.md), or set generate.backend: "
            "native",
        )
    return found


def environment(section: Vllm, threads: int, ranks: Ranks, device: torch.device) -> dict[str, str]:
    """Variables of the process: as many threads as the trainer, which waits meanwhile; one device."""
    if device.type == "cpu":
        # vLLM's OpenMP threads spin while they wait.
        return {"OMP_NUM_THREADS": str(threads)}
    visible: Sequence[str] = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = section.devices[ranks.local_rank] if section.devices else device.index or 0
    is_renamed = any(visible) and not section.devices
    return {"CUDA_VISIBLE_DEVICES": visible[number] if is_renamed else str(number)}
