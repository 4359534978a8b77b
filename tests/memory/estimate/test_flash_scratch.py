"""Scratch of flash attention's backward kernels, against numbers worked out from their sources by hand."""

from dataclasses import replace
from typing import Any

import pytest

from memtrain.memory.estimate.flash_scratch import flash_scratch
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.flash_kernels import Call, flash_bytes, hopper_bytes
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings

CALL = Call(tokens=1000, keys=1000, segments=3, longest=700, heads=4, key_heads=2, head_dim=80, itemsize=2)


@pytest.mark.parametrize(
    ("changes", "sums", "expanded"),
    [
        # dq_accum [1000 + 128 * 3, 4, 96], softmax_d [4, 1000 + 128 * 3]; dk, dv_expanded [1000, 4, 80].
        ({}, 4 * 1384 * 4 * 97, 2 * 2 * 1000 * 4 * 80),
        ({"key_heads": 4}, 4 * 1384 * 4 * 97, 0),
        ({"segments": 1}, 4 * 1128 * 4 * 97, 2 * 2 * 1000 * 4 * 80),
        ({"head_dim": 128, "key_heads": 4}, 4 * 1384 * 4 * 129, 0),
        # Above 128 numbers a head the width is a multiple of 64.
        ({"head_dim": 136, "key_heads": 4}, 4 * 1384 * 4 * 193, 0),
        ({"head_dim": 200, "key_heads": 4}, 4 * 1384 * 4 * 257, 0),
        # A hundred rows of ten tokens: more padding than rows.
        ({"segments": 100, "longest": 10, "key_heads": 4}, 4 * 13800 * 4 * 97, 0),
    ],
)
def test_every_segment_is_padded_by_a_block_of_128_rows(changes: dict[str, Any], sums: int, expanded: int):
    assert flash_bytes(CALL._replace(**changes)) == sums + expanded


@pytest.mark.parametrize(
    ("changes", "rows", "wide", "keys", "blocks"),
    [
        # 80 becomes 96: blocks of 64 rows and 128 keys. 1000 + 3 * 64 = 1192, and 1000 + 3 * 128 = 1384.
        ({}, 1216, 96, 1408, 11),
        ({"head_dim": 64}, 1408, 64, 1408, 6),
        ({"head_dim": 128}, 1216, 128, 1408, 11),
        ({"head_dim": 128, "is_causal": False}, 1280, 128, 1408, 9),
        ({"head_dim": 160}, 1216, 192, 1344, 11),
        ({"head_dim": 256}, 1216, 256, 1280, 11),
    ],
)
def test_flash_attention_3_pads_to_whole_blocks(
    changes: dict[str, Any], rows: int, wide: int, keys: int, blocks: int
):
    turns = 4 * blocks * 3 * 4
    by_hand = 4 * rows * 4 * (wide + 2) + 2 * 4 * keys * 2 * wide + turns
    assert hopper_bytes(CALL._replace(**changes)) == by_hand


LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 512, "hidden_size": 128}
LLAMA |= {"intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE = shape_of(LLAMA | {"num_key_value_heads": 4, "head_dim": 32})
FLAT = {"device": "cuda", "attention": "torch_varlen", "dtype": "bfloat16", "padding_free": True}


def rows_of(num_bytes: int) -> float:
    """Rows of the float32 sums of four heads of 32 numbers, and of their row sums."""
    return num_bytes / (4 * 4 * 33)


def scratch(make_settings: Any, batch: HeaviestBatch, shape: Any = SHAPE, **changes: Any) -> int:
    settings: Settings = make_settings(**(FLAT | changes))
    return flash_scratch(Workload(settings, shape, batch))


def test_padded_rows_are_as_many_segments_as_rows(make_settings: Any):
    batch = HeaviestBatch(4, 1500, 1000, 500)
    assert rows_of(scratch(make_settings, batch, padding_free=False)) == 4 * 500 + 128 * 4
    assert rows_of(scratch(make_settings, batch)) == 1500 + 128 * 4


def test_documents_of_a_packed_row_are_segments_of_their_own(make_settings: Any):
    batch = HeaviestBatch(1, 1500, 1000, 1500, segments=40)
    assert rows_of(scratch(make_settings, batch)) == 1500 + 128 * 40


def test_padding_behind_flat_rows_is_one_more_and_of_shared_prompts_two(make_settings: Any):
    batch = HeaviestBatch(2, 1500, 1000, 750, segments=3)
    padded = {"pad_to_multiple_of": 1024}
    assert rows_of(scratch(make_settings, batch, **padded)) == 2048 + 128 * 4
    assert rows_of(scratch(make_settings, batch, **padded, shared_prompts=True)) == 2048 + 128 * 5


def test_a_sliding_window_makes_blocks_of_its_length(make_settings: Any):
    """Two rows of 900 tokens in blocks of 256: three whole ones each, and the rest."""
    shape = replace(SHAPE, sliding_window=256, num_sliding_layers=2)
    num_bytes = scratch(make_settings, HeaviestBatch(2, 1800, 1800, 900), shape)
    assert rows_of(num_bytes) == 1800 + 128 * (2 + 1800 // 256)


def test_no_more_segments_than_tokens(make_settings: Any):
    assert rows_of(scratch(make_settings, HeaviestBatch(1, 8, 8, 8, segments=40))) == 8 + 128 * 8


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"attention": "masked"}])
def test_other_back_ends_have_none(make_settings: Any, changes: dict[str, Any]):
    assert scratch(make_settings, HeaviestBatch(1, 8, 8, 8), **changes) == 0
