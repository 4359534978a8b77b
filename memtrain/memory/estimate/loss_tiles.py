"""Tiles of the chunked loss: how many tokens and columns one holds. The planner and the loss ask here."""

from __future__ import annotations

from memtrain.memory.plan.units import MIB

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
