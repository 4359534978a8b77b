"""The weights of the policy as vLLM loads them: full, merged, by the names of the checkpoint, in buckets."""

from __future__ import annotations

import base64
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from memtrain.errors import LaunchError, first_line_of
from memtrain.trainers.model.experts.adapters import merged_stacks
from memtrain.trainers.model.experts.forward import is_experts
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.quantized.linear import PackedLinear, unpacked
from memtrain.trainers.model.quantized.packed import parts_in
from memtrain.trainers.runtime.allocator import fixed_segments
from memtrain.trainers.runtime.namespaces import pid_namespace
from memtrain.trainers.runtime.own_trees import remove_half_written

ALIGNMENT = 64
"""Pieces of a bucket begin at multiples of it, so that a view of them has any dtype."""

MEMORY_FOLDER = Path("/dev/shm")
ROOM_FACTOR = 2
"""Buckets for which memory must be free: the next is written while the last is read."""

LAYER = re.compile(r"^(.*?\.\d+)\.")


class Piece(NamedTuple):
    """Some bytes of a tensor, and where they are in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte of the tensor that is in the bucket."""
    num_bytes: int
    offset: int
    """First byte of the bucket."""


class Bucket(NamedTuple):
    """Pieces with their bytes (uint8 tensors), on the device of the weights."""

    pieces: list[Piece]
    data: list[Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes from the first to the last."""
        return self.pieces[-1].offset + self.pieces[-1].num_bytes


@torch.no_grad()
def vllm_weights(model: PreTrainedModel | PeftModel) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all weights, layer by layer, a tied head left out.

    Adapters are added in float32, rounded once, into a tensor of its own: the model is not touched, and one
    merged tensor is there at a time. Names are those of the checkpoint: what transformers packs on loading
    (experts) is taken apart again, one layer at a time.
    """
    base = base_model(model)
    refuse_untied_head(base)
    layer: dict[str, Tensor] = {}
    at = None
    for name, tensor in _merged(base):
        found = LAYER.match(name)
        here = None if found is None else found[1]
        if here != at and layer:
            yield from revert_weight_conversion(base, layer).items()
            layer = {}
        at = here
        layer[name] = tensor
    yield from revert_weight_conversion(base, layer).items()


def refuse_untied_head(model: PreTrainedModel) -> None:
    """Refuse a model whose configuration ties the head to an embedding that training has set apart from it.

    Raises: LaunchError: vLLM would use the one for both.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not getattr(model.config, "tie_word_embeddings", False) or head is None:
        return
    adapted = [module for module in (head, embedding) if isinstance(module, BaseTunerLayer)]
    saved = [module for module in (head, embedding) if hasattr(module, "modules_to_save")]
    if adapted or saved or head.weight is not embedding.weight:
        raise LaunchError(
            "this model ties its head to its embedding, and the adapter trains only one of them; vLLM "
            "would use it for both",
            "model.adapter",
            "remove embed_tokens and lm_head from the adapter, or set generate.backend: native",
        )


def _merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of each parameter without its adapter's parts, which are added to it."""
    done: set[int] = set()
    for module_name, module in model.named_modules():
        if is_experts(module):
            outer = module_name.replace(".base_layer", "")
            for own_name, weight in merged_stacks(model.get_submodule(outer)):
                yield f"{outer}.{own_name}", weight
            continue
        beside = parts_in(module) - {"weight"}
        for own_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done or own_name in beside:
                continue
            done.add(id(parameter))
            name = f"{module_name}.{own_name}" if module_name else own_name
            parent = _parent(model, module_name)
            if isinstance(parent, LoraLayer):
                if module_name.endswith(".base_layer"):
                    merged = merged_weight(parent) if own_name == "weight" else parameter
                    yield name.replace(".base_layer.", "."), merged
                continue
            if ".lora_" in f".{name}":
                continue
            if ".original_module." in name:
                continue
            own = unpacked(module) if isinstance(module, PackedLinear) and own_name == "weight" else parameter
            yield re.sub(r"\.modules_to_save\.[^.]+\.", ".", name), own


def _parent(model: nn.Module, name: str) -> nn.Module | None:
    return model.get_submodule(name.rpartition(".")[0]) if "." in name else None


def merged_weight(layer: LoraLayer) -> Tensor:
    """The weight of an adapted layer with its update, in the dtype that it computes in.

    Source: W + scale * B A, arXiv:2106.09685, section 4.1; DoRA: m (W + scale * B A) / ||W + scale * B A||,
    arXiv:2402.09353, eq. 5.
    """
    base = layer.get_base_layer()
    is_quantized = hasattr(base.weight, "quant_state")
    weight = dequantize_module_weight(base) if is_quantized else base.weight
    if isinstance(base, PackedLinear):
        weight = unpacked(base)
    assert isinstance(weight, Tensor), "A layer has one weight."
    total = weight.float()
    for adapter in layer.active_adapters:
        total = total + layer.get_delta_weight(adapter).float()  # pyright: ignore[reportAttributeAccessIssue]
        if adapter in layer.lora_magnitude_vector:
            magnitude = layer.lora_magnitude_vector[adapter].weight.float()
            along = 0 if layer.fan_in_fan_out else 1  # pyright: ignore[reportAttributeAccessIssue]
            scale = magnitude / total.norm(dim=along)
            total = total * (scale if layer.fan_in_fan_out else scale[:, None])  # pyright: ignore[reportAttributeAccessIssue]
    return total.to(weight.dtype)


def in_buckets(weights: Iterator[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """The weights in buckets of at most `bucket_bytes`; a larger tensor goes in several."""
    pieces: list[Piece] = []
    data: list[Tensor] = []
    used = 0
    for name, tensor in weights:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        start = 0
        while start < len(flat):
            room = bucket_bytes - used
            count = min(room, len(flat) - start)
            # A tensor is taken apart only where it is larger than a bucket of its own.
            if used and count < len(flat) - start:
                yield Bucket(pieces, data)
                pieces, data, used = [], [], 0
                continue
            pieces.append(Piece(name, dtype, shape, start, count, used))
            data.append(flat[start : start + count])
            start += count
            used = min(bucket_bytes, -(-(used + count) // ALIGNMENT) * ALIGNMENT)
    if pieces:
        yield Bucket(pieces, data)


@dataclass(slots=True)
class Transport:
    """Transport of a bucket to the other process: a file of memory, or a buffer on the device (CUDA IPC)."""

    folder: Path
    """Of this sampler alone."""
    bucket_bytes: int
    buffer: Tensor | None = None
    """uint8 [bucket_bytes] on the device, shared; None: files."""
    handle: str | None = None
    """Handle by which the other process opens the buffer."""
    why_files: str = field(default="", kw_only=True)
    """Reason that buckets are files although both processes are on one device."""
    count: int = 0

    def put(self, bucket: Bucket) -> dict[str, Any]:
        """The frame that says where the bucket is. The last one has been read."""
        pieces: Sequence[Piece] = bucket.pieces
        if self.buffer is not None:
            for piece, data in zip(pieces, bucket.data, strict=True):
                self.buffer[piece.offset : piece.offset + piece.num_bytes].copy_(data)
            torch.cuda.synchronize(self.buffer.device)
            return {"pieces": pieces}
        path = self.folder / f"bucket-{self.count}"
        self.count += 1
        with path.open("wb") as file:
            for piece, data in zip(pieces, bucket.data, strict=True):
                file.seek(piece.offset)
                data.cpu().numpy().tofile(file)
        return {"pieces": pieces, "path": str(path), "bytes": bucket.num_bytes}

    def clear(self) -> None:
        """Remove buckets that were not read."""
        for path in self.folder.glob("bucket-*"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder, and let go of the buffer."""
        self.buffer = self.handle = None
        remove_half_written(self.folder)


def open_transport(
    run_dir: Path,
    bucket_bytes: int,
    device: torch.device,
    *,
    is_same_device: bool,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Transport:
    """CUDA IPC where both processes are on one CUDA device and a handle is seen to work, else files.

    Files of memory, or of the run folder where memory has no room for them (containers often give /dev/shm
    64 MiB). `python`, `environment` (all of it): those of the other process, which the handle is tried with.
    """
    is_roomy = (
        MEMORY_FOLDER.is_dir()
        and os.access(MEMORY_FOLDER, os.W_OK)
        and shutil.disk_usage(MEMORY_FOLDER).free >= ROOM_FACTOR * bucket_bytes
    )
    sweep(MEMORY_FOLDER)
    parent = MEMORY_FOLDER if is_roomy else run_dir
    transport = Transport(
        Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{pid_namespace()}-", dir=parent)), bucket_bytes
    )
    if device.type == "cuda" and is_same_device:
        # Handles of expandable segments fail on several drivers (pytorch#198305, OpenRLHF#957).
        with fixed_segments():
            buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        transport.why_files = try_handle(buffer, python, environment or {})
        if not transport.why_files:
            transport.buffer, transport.handle = buffer, shared_handle(buffer)
    return transport


PROBE_S = 120.0
"""Time in which the probe of a handle, which loads torch, must have read it. Taste."""

PROBE_VALUE = 0x5A
"""Every byte of the buffer while its handle is tried."""


def try_handle(buffer: Tensor, python: str, environment: Mapping[str, str]) -> str:
    """Let a process like the sampler's read the buffer through a handle; why it cannot, or nothing."""
    try:
        handle = shared_handle(buffer)
        buffer.fill_(PROBE_VALUE)
        torch.cuda.synchronize(buffer.device)
        ran = subprocess.run(
            [python, str(Path(__file__).with_name("worker.py")), "--probe-handle"],
            input=handle,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            env=dict(environment) or None,
            check=False,
        )
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return first_line_of(error)
    if ran.returncode:
        return (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
    read = ran.stdout.strip()
    return "" if read == str(PROBE_VALUE) else f"the other process reads {read}, not {PROBE_VALUE}"


def shared_handle(buffer: Tensor) -> str:
    """Arguments with which another process opens a CUDA tensor, as text."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    return base64.b64encode(pickle.dumps(arguments)).decode()


PREFIX = "memtrain-weights-"


def sweep(folder: Path) -> None:
    """Remove shared memory of killed trainers."""
    for path in folder.glob(f"{PREFIX}*-*"):
        pid, space, *_ = path.name.removeprefix(PREFIX).split("-")
        # A process of another container is not seen here, and may live.
        if space == pid_namespace() and pid.isdigit() and not Path("/proc", pid).exists():
            remove_half_written(path)
