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
_SIZE = r"([\d.]{1,20}) ?(bytes?|B|[KMGT]i?B)\b"

MOST_LETTERS = 2**20
"""Letters of a traceback that are read, its end. Taste. Every repetition in this file's patterns is bounded:
otherwise blank lines, digits or a word without end are read anew from each of their letters."""

MOMENTS: tuple[tuple[str, str], ...] = (
    (r"merge_and_unload|merge_adapter", "merging"),
    (
        r"save_model|save_pretrained|_save_checkpoint|state_dict_hook|full_tensor\(\)|_save_optimizer",
        "saving",
    ),
    (r"get_peft_model", "load"),
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
        r"from_pretrained|_move_model_to_device|_load_pretrained_model|load_state_dict|prepare_model|\.to\(device|_apply\(|cuda\(",
        "load",
    ),
    (r"\bforward\b|compute_loss|training_step", "forward pass"),
)
"""Words of frames, and the moment that they are of; the first that is there is taken."""

CONTEXT_BYTES = 2**30
"""Memory of a card that a process holds beside torch's segments, at most: context, kernels, cuBLAS. Taste."""

MESSAGE_LETTERS = 1500
"""Letters of one message of torch, at most. Taste."""

_MARK = re.compile(
    r"^[^\S\n]{0,80}(?:\[?rank:?\s{0,9}(\d{1,9})\]?:|"
    r"\([\w.:]{1,80}(?: [\w.:]{1,80}){0,9} pid=\d{1,9}[^)]{0,80}\)(?: ERROR [^\]]{0,200}\])?)\s?"
)
"""Marks of launchers before each line of a process: torchrun `[rank3]:`, Ray and vLLM `(Worker pid=7)`."""

_FRAME = r"Traceback|File \"|line \d"
"""Words of frames."""

_RANK = re.compile(
    r"^[^\S\n]{0,80}\[rank(\d{1,9})\]:|\blocal_rank: (\d{1,9})|^[^\S\n]{0,80}rank\s{0,20}:\s{0,20}(\d{1,9}) ",
    re.M,
)

_DEVICE = re.compile(
    r"(?:CUDA|HIP|torch\.\S{0,80}) (?:out of memory|error: out of memory)|"
    r"Tried to allocate [\d.]{1,20} ?[KMGT]i?B\b|"
    r"torch\.(?:cuda\.)?OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|cumem_allocator|"
    r"cuda\w{0,40} failure (?:2\b|'out of)",
    re.I,
)
"""Words of a card that had no memory."""

_NCCL = re.compile(
    r"(?:NCCL|nccl\w{0,40}Error)[\s\S]{0,2000}?(?:Cuda failure 2\b|Cuda failure 'out of memory'|"
    r"Failed to CUDA (?:calloc|malloc))",
    re.I,
)
"""Words of NCCL's where the card has no memory for its buffers."""

HOST = (
    r"DefaultCPUAllocator|not enough memory: you|Cannot allocate memory|oom[-_ ]kill|exitcode\s{0,20}: -9|"
    r"SIGKILL|Killed|node running low on memory|Unable to allocate .{0,200} for an array|MemoryError\b"
)
"""Words of a process that the host had no memory for."""

_HOST_MOMENTS = {
    "load": r"Loading checkpoint shards|Loading weights|Loading safetensors",
    "saving": r"Saving model checkpoint|save_checkpoint|save_pretrained",
}
"""The last progress that a killed process printed, by moment."""

_VLLM: tuple[tuple[str, str], ...] = (
    (r"Free memory on device .{0,200} is less than desired GPU memory utilization", "start"),
    (r"No available memory for the cache blocks", "cache"),
    (r"KV cache is needed, which is larger than the available KV cache memory", "length"),
)
"""Words of vLLM where its share of the card is too large, or too small."""


_ENGINES: tuple[tuple[str, str], ...] = (
    (r"deepspeed/runtime/zero/(?:stage3|partition)", "zero3"),
    (r"deepspeed/runtime/zero/stage_1_and_2", "zero2"),
    (r"torch/distributed/(?:_composable/)?fsdp/", "fsdp2"),
)
"""Files of frames, and the engine that they are of."""


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
    ranks: int | None = None
    """Processes that the output names: its highest rank, and one."""
    device: int | None = None
    """The card's number in the message."""
    is_of_amd: bool = False
    """The message is of ROCm."""
    vllm: str | None = None
    """vLLM's own refusal: `start`, `cache` or `length`."""
    engine: str | None = None
    """The engine that its frames are of: `zero2`, `zero3` or `fsdp2`."""
    in_nccl: bool = False
    """NCCL found no memory on the card for its own buffers."""


NOTHING = OomReport(None, None, None, None, None, None, None, False)
"""No traceback."""


def read_traceback(text: str) -> OomReport:
    """Facts of a run's death from the end of its output."""
    text = text[-MOST_LETTERS:]
    vllm = next((kind for words, kind in _VLLM if re.search(words, text)), None)
    on_host = vllm is None and _DEVICE.search(text) is None and re.search(HOST, text) is not None
    frames, message = _first_death(text)
    capacity = _size(
        message,
        rf"total capaci?ty of {_SIZE}",
        rf"{_SIZE} total capaci?ty",
        rf"{_SIZE} capacity",
        rf"device \([\d.]{{1,20}}/{_SIZE}\)",
    )
    allocated = _size(message, rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated")
    idle = _size(message, rf"{_SIZE} is reserved by PyTorch but unallocated")
    reserved = _size(message, rf"{_SIZE} reserved in total by PyTorch")
    if idle is None and reserved is not None and allocated is not None:
        idle = max(0, reserved - allocated)
    if reserved is None and idle is not None and allocated is not None:
        reserved = allocated + idle
    free = _size(
        message, rf"of which {_SIZE} is free", rf"{_SIZE} free", r"device \(([\d.]{1,20})/[\d.]{1,20} (GiB)\)"
    )
    others = None if capacity is None or free is None else _others(message, capacity - free, reserved)
    ranks = [int(next(filter(None, one))) for one in _RANK.findall(text)]
    device = re.search(r"\bGPU (\d{1,9})(?: has a total|;)", message)
    return OomReport(
        moment=_last_progress(text) if on_host else _moment(frames),
        asked_bytes=_size(message, rf"[Tt]ried to allocate {_SIZE}"),
        capacity_bytes=capacity,
        allocated_bytes=allocated,
        idle_bytes=idle,
        free_bytes=free,
        others_bytes=others,
        on_host=on_host,
        ranks=max(ranks) + 1 if ranks else None,
        device=None if device is None else int(device[1]),
        is_of_amd=re.search(r"\bHIP (?:out of memory|error)", text) is not None,
        vllm=vllm,
        in_nccl=_NCCL.search(text) is not None,
        engine=next((engine for words, engine in _ENGINES if re.search(words, text)), None),
    )


def _others(message: str, taken: int, reserved: int | None) -> int | None:
    """Bytes of other processes, of those that are taken of a card; None where nothing tells this one's."""
    mine = _size(message, rf"this process has {_SIZE} memory in use", rf"this process has {_SIZE}")
    listed = re.findall(r"\bProcess \d{1,9} has ", message)
    if mine is None and reserved is not None and len(listed) == 1:
        # One process on the card that holds what torch reserved is this one.
        alone = _size(message, rf"\bProcess \d{{1,9}} has {_SIZE} memory in use") or 0
        mine = alone if alone >= reserved else None
    held = mine or reserved
    # Where a message does not say what the process holds, its CUDA context is in the rest.
    return None if held is None else max(0, taken - held - (0 if mine else CONTEXT_BYTES))


def _first_death(text: str) -> tuple[str, str]:
    """(the frames before the first message that asks for bytes, the message), without launchers' marks.

    Lines of one process alone, where several write into one another.
    """
    lines = text.splitlines()
    at = next((place for place, line in enumerate(lines) if re.search(r"ried to allocate", line)), None)
    if at is None:
        plain = [_MARK.sub("", line) for line in lines]
        return "\n".join(_frames(plain)), " ".join(plain)
    mark = _mark(lines[at])
    before = [_MARK.sub("", line) for line in lines[:at] if _mark(line) == mark]
    after = [_MARK.sub("", line).strip() for line in lines[at : at + 12] if _mark(line) == mark]
    found = " ".join(after)
    found = found[found.index("ried to allocate") - 1 :][:MESSAGE_LETTERS]
    more = found.find("ried to allocate", 2)
    if not any(re.search(_FRAME, line) for line in before):
        # Ranks write into one another: the frames of the next stand behind the message of the first.
        before = [_MARK.sub("", line) for line in lines[at + 1 :]]
        end = next((place for place, line in enumerate(before) if "ried to allocate" in line), len(before))
        before = before[:end]
    frames = [*_frames(before), lines[at] if "File" in lines[at] else ""]
    return "\n".join(frames), found[:more] if more > 0 else found


def _mark(line: str) -> str:
    found = _MARK.match(line)
    return "" if found is None else found[0].strip()


def _frames(lines: list[str]) -> list[str]:
    """The lines from the last beginning of a traceback on; all of them where there is none."""
    starts = [at for at, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    return lines[starts[-1] :] if starts else lines


def _size(text: str, *patterns: str) -> int | None:
    for pattern in patterns:
        found = re.search(pattern, text)
        if found is not None:
            number, unit = found.groups()[:2]
            unit = "B" if unit in ("bytes", "byte") else unit
            return round(float(number) * _UNITS[unit]) if unit in _UNITS and number.count(".") < 2 else None
    return None


def _moment(frames: str) -> str | None:
    """The moment by the frames before the message; a message alone tells none."""
    if not re.search(_FRAME, frames):
        return None
    return next((moment for words, moment in MOMENTS if re.search(words, frames)), None)


def _last_progress(text: str) -> str | None:
    """The moment of the last line of progress: a killed process leaves no frames."""
    at = {
        moment: max((found.end() for found in re.finditer(words, text)), default=-1)
        for moment, words in _HOST_MOMENTS.items()
    }
    moment = max(at, key=lambda one: at[one])
    return moment if at[moment] >= 0 else _moment(text)
