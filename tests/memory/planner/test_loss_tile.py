"""Tiles of the chunked loss: large on a GPU with room, small on a CPU, or as the recipe says."""

from collections.abc import Callable
from typing import Any

import pytest

from memtrain.memory.hardware.devices import Hardware, cpu
from memtrain.memory.model_shape.known_models import known_config
from memtrain.memory.plan.sizes import LARGE_TILE, TILE_BYTES, tile_columns, tile_tokens
from memtrain.memory.plan.units import MIB
from memtrain.memory.planner.resolve import Resolved

Ask = Callable[..., Resolved]
QWEN = dict(known_config("qwen3-0.6b") or {})


@pytest.mark.parametrize(
    ("hardware", "said", "size"),
    [
        (Hardware.named("h100"), {}, LARGE_TILE),
        (Hardware.named("h100"), {"memory__loss_chunk_size": "32MiB"}, 32 * MIB),
        (cpu(24 << 30, 2), {}, TILE_BYTES),
    ],
    ids=["gpu", "said", "cpu"],
)
def test_the_size_of_the_tiles(ask: Ask, facts_of: Callable[..., Any], hardware, said, size):
    found = ask(facts_of(hardware, config=QWEN), memory__loss="chunked", **said)
    assert found.settings.loss_tile_bytes == size
    reported = [one.value for one in found.decisions if one.setting == "loss_chunk_size"]
    assert bool(reported) == (hardware.device == "cuda")


def test_tiles_are_as_large_as_what_is_free(ask: Ask, facts_of: Callable[..., Any], profile_of: Any):
    """A budget of 300 MiB above the plan with small tiles: 1 GiB is too large, 128 MiB is not."""
    facts = facts_of(Hardware.named("h100"), profile_of(*[2048] * 40), QWEN)
    said = {
        "memory__loss": "chunked",
        "memory__activation_checkpointing": "off",
        "train__micro_batch_size": 4,
    }
    small = ask(facts, memory__loss_chunk_size="64MiB", **said)
    budget = small.chosen.need_bytes + 300 * MIB
    tight = ask(facts, memory__budget=f"{budget}B", **said)
    assert TILE_BYTES < tight.settings.loss_tile_bytes < LARGE_TILE
    assert small.chosen.need_bytes <= tight.chosen.need_bytes <= budget


def test_tokens_and_columns_of_a_tile():
    """64 MiB: 110 tokens of 151,936 float32 logits, 55 twice; 8,192 columns of width 1,024 fill half."""
    assert tile_tokens(TILE_BYTES, 151_936, 1) == 110
    assert tile_tokens(TILE_BYTES, 151_936, 2) == 55
    assert tile_tokens(1, 151_936, 1) == 1
    assert tile_columns(TILE_BYTES, 1024, 151_936) == 8192
    assert tile_columns(TILE_BYTES, 1024, 500) == 500
