"""Sizes of what a step makes: buckets, tiles, blocks and buffers, which step and prediction both read here.

Numbers of the trainer's own code, and some of bitsandbytes'; no formula of memory is among them.
"""

from __future__ import annotations

from math import gcd

from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.units import MIB

# The optimizer's step (trainers/optim, trainers/distributed).

MASTER_BUCKET = 256 * MIB
"""Most bytes of float32 gradients that the master-weight optimizer makes at once (one tensor's may be more).
Taste: 128 kernel launches for 8 billion weights, and no second copy of all gradients."""

COMPRESSED_GROUP = 32
"""Numbers of a compressed moment that share a scale. Source: FlashOptim's."""

IN_BACKWARD_BUCKET = 32 * MIB
"""Gradients that are stepped together inside a backward pass, where they are a small part of all: norms and
adapters, each of which would take as long to start as a matrix. Taste."""

OFFLOAD_BUCKET = 256 * MIB
"""Most bytes of offloaded optimizer states that are on the device at once (one tensor's may be more). Taste:
copies of 128 MiB reach the bus's rate."""

SMALL_GRADIENT = MIB
"""Bytes below which a gradient is summed over the ranks together with others, at the end: a collective takes
tens of microseconds to start. Taste."""


def backward_bucket(all_bytes: int) -> int:
    """Bytes of gradients that wait for each other inside a backward pass, of `all_bytes` in all."""
    return min(IN_BACKWARD_BUCKET, all_bytes // 16)


# The chunked loss (trainers/losses/head).

TILE_BYTES = 64 * MIB
"""Scratch of the chunked loss where nothing else is said: 110 tokens of a 152k vocabulary. Taste."""
LARGE_TILE = 1024 * MIB
"""Scratch where a GPU has room. Each tile reads the LM head anew and starts its kernels, so fewer are faster:
1,700 tokens of a 152k vocabulary fill a GPU. Taste."""
MIN_COLUMNS = 256
"""Fewest vocabulary columns of a tile that is cut by columns. Taste."""


def tile_tokens(tile_bytes: int, num_columns: int, num_buffers: int, itemsize: int = 4) -> int:
    """Tokens whose logits over `num_columns`, `num_buffers` times, fill a tile; at least 1."""
    return max(1, tile_bytes // (num_columns * num_buffers * itemsize))


def tile_columns(tile_bytes: int, width: int, num_columns: int, itemsize: int = 4) -> int:
    """Columns, of `num_columns`, whose wide weight gradients of `width` numbers fill half of a tile."""
    return min(num_columns, max(MIN_COLUMNS, tile_bytes // (2 * width * itemsize)))


# Packed weights (trainers/model/quantized).

NF4_BLOCK = 64
"""Weights that share a scale. Source: bitsandbytes' default."""

SCALE_BLOCK = 256
"""Scales that share a scale of their own. Source: bitsandbytes."""

UNPACKED_BYTES = 256 * MIB
"""Most bytes of a stack of experts that are unpacked at once (one matrix may be more). Taste: a product with
a few experts' matrices is long enough to keep a GPU busy, and Qwen3-30B-A3B's gates need 768 MiB together."""


def packs_itself(settings: Settings) -> bool:
    """Whether linear maps are packed by memtrain's own code: on a CPU, and in shards.

    bitsandbytes keeps the scales of a weight beside it, where nothing cuts them.
    """
    return settings.device == "cpu" or shards_weights(settings)


def experts_at_once(num_experts: int, num_each: int, size: int) -> int:
    """Experts that are unpacked together: all that need at most `UNPACKED_BYTES`, in whole blocks of scales.

    `num_each`: weights of one matrix. `size`: bytes of an unpacked weight.
    """
    least = NF4_BLOCK // gcd(num_each, NF4_BLOCK)
    return min(num_experts, max(1, UNPACKED_BYTES // (num_each * size) // least) * least)


# Layers in slices, and weights on the host (trainers/model/streamed).

WIDENED_TOKENS = 256
"""Tokens whose numbers are widened at a time for a weight's gradient, where no kernel adds a product of half
precision to a float32 sum: 18 MiB for an 8B model's largest map, and products long enough. Taste."""

NUM_BUFFERS = 2
"""Layers on the device at once where weights live on the host: one at work, and the next on its way."""

ALIGN_BYTES = 256
"""Alignment in bytes of each weight in its layer's block, for kernels that need it."""


def moves_trained(settings: Settings) -> bool:
    """Whether the trained weights of layers live, and are stepped, on the host: all of a model's, or an
    adapter's."""
    return settings.weights_offload and (settings.adapter is None or settings.adapters_offload)


# Activations that travel (trainers/model/offload).

KEEP_LAST = {"boundaries": 1, "all": 8}
"""Storages that stay on the device while their copies run. `all` has many small ones between large ones.
Taste."""
MIN_BYTES = 2**16
"""Smaller storages stay: a copy of them takes longer to start than to run. Taste."""
ROUND_BYTES = 2 * MIB
"""Blocks are powers of two up to this and multiples of it above, so that sizes recur. Taste: a huge page."""


def block_bytes(num_bytes: int) -> int:
    """The size of the block of pinned memory that holds `num_bytes` of offloaded activations."""
    if num_bytes <= ROUND_BYTES:
        return 1 << max(0, num_bytes - 1).bit_length()
    return -(-num_bytes // ROUND_BYTES) * ROUND_BYTES


# Reward models (trainers/online/rewards).

READ_TOKENS = 8192
"""Tokens that a reward model reads at once, where no answer alone is longer."""

# bitsandbytes' optimizers, which memtrain runs and traces play.

STATE_BLOCK = 256
"""Numbers of a state that share a scale."""
LEAST_8BIT = 4096
"""Tensors with fewer numbers have float32 states."""
LEAST_PAGED = 100_000
"""States of tensors with fewer numbers are not paged."""
