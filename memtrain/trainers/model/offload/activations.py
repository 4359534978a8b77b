"""Treatment of a model's activations: kept, recomputed, made in slices, or moved to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import KEEP_LAST
from memtrain.trainers.model.loading.compiled_layers import recompute_compiled
from memtrain.trainers.model.loading.lora_layers import round_together
from memtrain.trainers.model.offload.checkpointing import Checkpointing, checkpoint_layers, recomputing
from memtrain.trainers.model.offload.copy_engines import CopyEngine, engine_for
from memtrain.trainers.model.offload.host_pool import DiskTier
from memtrain.trainers.model.offload.offloader import Offloader
from memtrain.trainers.model.offload.weights import weights_on_host
from memtrain.trainers.model.streamed.apply import stream_layers
from memtrain.trainers.model.streamed.layer_weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Activations:
    """Parts put on a model. `checkpointing` is None when nothing is recomputed and nothing travels."""

    checkpointing: Checkpointing | None
    offloader: Offloader | None
    weights: LayerWeights | None = None


def apply_checkpointing_and_offload(
    model: nn.Module, settings: Settings, engine: CopyEngine | None = None
) -> Activations:
    """Checkpoint, stream and offload the layers of `model`, in place. A second call replaces the first.

    Exact: losses and gradients are the same bits; of streamed layers the same up to the order of sums.
    Weights that live on the host are brought in by the same pass over one layer: it is the checkpointing.

    boundaries: only the inputs of checkpointed layers travel, twice tokens x width bytes a layer. Compute of
        about 24 x tokens x width^2 operations hides that from a width of about 1,000 on, however many tokens.
        The hooks see nothing else, so kernels that change what they saved are safe. So with streamed layers.
    all: what the layers save travels, the head and the loss do not. About 17 times the traffic, not hidden.

    `engine` is chosen by `settings.device` when not given.

    Source: measured: 12-layer model of width 128, CPU, 2,048 tokens: 511 MiB of activations held after the
    forward pass, 30 with checkpointing, 8 with `boundaries` besides.

    Raises: LaunchError when `boundaries` is asked for without checkpointing, or the model has no such layers.
    """
    every, slice_tokens = settings.checkpoint_every, settings.slice_tokens
    stream_layers(model, 0)
    weights = weights_on_host(model, settings, engine)
    is_passed = bool(slice_tokens) or weights is not None
    # Copies of all adapters beside packed weights are much to hold, and unpacking takes longer than rounding.
    round_together(model, not is_passed and not settings.compiled and settings.quantize == "none")
    plain = recompute_compiled() if settings.compiled else recomputing(model)
    if is_passed:
        # A layer that was checkpointed before would be computed a third time around its pass.
        checkpoint_layers(model, 0)
    if settings.offload == "none":
        if is_passed:
            stream_layers(model, slice_tokens, weights=weights)
        checkpoints = every and not is_passed
        return Activations(checkpoint_layers(model, every, plain) if checkpoints else None, None, weights)
    if settings.offload == "boundaries" and not every and not slice_tokens:
        raise LaunchError(
            "activation offloading needs activation checkpointing, whose layers' inputs it moves",
            "memory.activation_offloading",
            "set memory.activation_checkpointing to on, or offloading to off",
        )
    offloader = Offloader(
        engine or engine_for(settings),
        # A streamed layer takes long, and the input of a long row is much to hold beside the loss.
        keep_last=0 if settings.slice_tokens else KEEP_LAST[settings.offload],
        keeps=is_part_of(model),
        disk=disk_of(settings),
        host_limit_bytes=settings.offload_host_bytes or 0,
        fetches_ahead=not settings.slice_tokens,
        recompute=plain,
    )
    if is_passed:
        stream_layers(model, slice_tokens, offloader.leaving, keep=settings.offload_keep, weights=weights)
        return Activations(None, offloader, weights)
    kept = offloader.run_kept if settings.offload == "all" else None
    keep = settings.offload_keep if settings.offload == "boundaries" else 0
    treated = checkpoint_layers(model, every, plain, kept, keep=keep, run_away=offloader.run_recomputed)
    return Activations(treated, offloader)


def disk_of(settings: Settings) -> DiskTier | None:
    """Disk tier for activations that the host has no room for; its files are gone when the run is.

    Raises: LaunchError when nothing can be written there.
    """
    if settings.offload_disk is None:
        return None
    folder = Path(settings.offload_disk)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return DiskTier(folder)
    except OSError as error:
        raise LaunchError(
            f"activations cannot be written to {folder}: {error.strerror}",
            "memory.offload_disk",
            "give a writable folder on a fast disk",
        ) from None


def is_part_of(model: nn.Module) -> Callable[[Tensor], bool]:
    """Whether a tensor is a weight or buffer of `model`, or a view of one: these never travel."""

    def check(tensor: Tensor) -> bool:
        return bool(references) and tensor.untyped_storage()._cdata in storages

    owned = (*model.parameters(), *model.buffers())
    # Weak references keep the address of a weight that is replaced (by a shard, or on another device) from
    # being given to an activation, which would then stay.
    references = [StorageWeakRef(one.untyped_storage()) for one in owned]
    storages = {one.cdata for one in references}
    return check
