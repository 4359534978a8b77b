"""The traceback of a run that ran out of memory: the bytes of its message, and the moment of its frames."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 2**10,
    "MB": 2**20,
    "GB": 2**30,
}
_SIZE = r"([\d.]+) ?(B|[KMGT]i?B)\b"

MOST_LETTERS = 2**20
"""Letters of a traceback that are read, its end. Taste."""

MOMENTS: tuple[tuple[str, str], ...] = (
    (r"merge_and_unload|merge_adapter", "merging"),
    (
        r"save_model|save_pretrained|_save_checkpoint|state_dict_hook|full_tensor\(\)|_save_optimizer",
        "saving",
    ),
    (r"_load_from_checkpoint|load_optimizer|_load_optimizer_and_scheduler|resume_from", "load"),
    (r"evaluation_loop|prediction_step|prediction_loop|evaluate\(|compute_metrics", "evaluation"),
    (r"gpu_worker|wake_up|vllm|sglang|LLM\(", "generation"),
    (r"\.generate\(|_generate_and_score|generate_completion", "generation"),
    (
        r"optimizer\.step|optim/adam|_init_group|exp_avg|bitsandbytes/optim|initialize_optimizer_states",
        "optimizer step",
    ),
    (r"loss\.backward|run_backward|_engine_run_backward|\.backward\(", "backward pass"),
    (r"cross_entropy|logits|lm_head|log_softmax|logsumexp|get_batch_logps|selective_log_softmax", "loss"),
    (r"ref_model|reference_forward|compute_reference", "reference's pass"),
    (
        r"from_pretrained|_load_pretrained_model|load_state_dict|prepare_model|\.to\(device|_apply\(|cuda\(",
        "load",
    ),
    (r"\bforward\b|compute_loss|training_step", "forward pass"),
)
"""Words of frames, and the moment that they are of; the first that is there is taken."""

CONTEXT_BYTES = 2**30
"""Memory of a card that a process holds beside torch's segments, at most: context, kernels, cuBLAS. Taste."""

HOST = (
    r"DefaultCPUAllocator|not enough memory: you|Cannot allocate memory|oom-kill|exitcode: -9|SIGKILL|Killed"
)
"""Words of a process that the host had no memory for."""


@dataclass(frozen=True, slots=True)
class OomReport:
    """Facts of a traceback; None where it does not say them."""

    moment: str | None
    """`load`, `forward pass`, `loss`, `backward pass`, `optimizer step`, `evaluation`, ..."""
    asked_bytes: int | None
    """Bytes that were asked for, and were not there."""
    capacity_bytes: int | None
    """Of the card, as torch sees it."""
    allocated_bytes: int | None
    """In live tensors."""
    idle_bytes: int | None
    """Reserved by the allocator, and in no tensor."""
    free_bytes: int | None
    others_bytes: int | None
    """Bytes of the card that other processes had taken."""
    on_host: bool
    """The host's memory ran out, not the card's."""


NOTHING = OomReport(None, None, None, None, None, None, None, False)
"""No traceback."""


def read_traceback(text: str) -> OomReport:
    """Facts of a run's death from the end of its output."""
    text = text[-MOST_LETTERS:]
    is_cuda = re.search(r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", text, re.I) is not None
    on_host = not is_cuda and re.search(HOST, text) is not None
    capacity = _size(text, rf"total capacity of {_SIZE}", rf"{_SIZE} total capacity", rf"{_SIZE} capacity")
    allocated = _size(text, rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated")
    idle = _size(text, rf"{_SIZE} is reserved by PyTorch but unallocated")
    reserved = _size(text, rf"{_SIZE} reserved in total by PyTorch")
    if idle is None and reserved is not None and allocated is not None:
        idle = max(0, reserved - allocated)
    free = _size(text, rf"of which {_SIZE} is free", rf"{_SIZE} free")
    mine = _size(text, rf"this process has {_SIZE} memory in use", rf"this process has {_SIZE}")
    others = None
    if capacity is not None and free is not None:
        held = mine if mine is not None else reserved
        # Where a message does not say what the process holds, its CUDA context is in the rest.
        own = 0 if mine is not None else CONTEXT_BYTES
        others = None if held is None else max(0, capacity - free - held - own)
    return OomReport(
        moment=_moment(text),
        asked_bytes=_size(text, rf"[Tt]ried to allocate {_SIZE}", rf"you tried to allocate {_SIZE}"),
        capacity_bytes=capacity,
        allocated_bytes=allocated,
        idle_bytes=idle,
        free_bytes=free,
        others_bytes=others,
        on_host=on_host,
    )


def _size(text: str, *patterns: str) -> int | None:
    for pattern in patterns:
        found = re.search(pattern, text)
        if found is not None:
            number, unit = found.groups()[:2]
            return round(float(number) * _UNITS[unit]) if unit in _UNITS and number.count(".") < 2 else None
    return None


def _moment(text: str) -> str | None:
    """The moment by the frames before the message; a message alone tells none."""
    frames = "\n".join(line for line in text.splitlines() if not re.search(r"[Tt]ried to allocate", line))
    if not re.search(r"Traceback|File \"|line \d+", frames):
        return None
    return next((moment for words, moment in MOMENTS if re.search(words, frames)), None)
