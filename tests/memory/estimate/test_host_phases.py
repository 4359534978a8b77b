"""Host memory through a run, by hand: rows that are laid out, and a checkpoint that is written."""

import pytest
from narrow import NARROW

from memtrain.memory.estimate.host_phases import (
    LAID_OUT,
    NUM_PIECES,
    PIECE_BYTES,
    STEPS,
    WRITTEN,
    disk_bytes,
    highest,
    host_phases,
    written_bytes,
)
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.plan import COPY
from memtrain.trainers.runtime import parallel_write

SHAPE = shape_of(NARROW)
WHOLE = 2 * 800 + 2 * (2 * 8 + 4 * 8 * 8 + 3 * 8 * 16) + 8


def test_every_process_lays_out_all_rows(make_settings):
    settings = make_settings(device="cuda", num_processes=2)
    phases = host_phases(settings, SHAPE, {"processes": 2**30, "optimizer states": 2**20}, 1_000_000)
    assert phases["data preparation"] == {"processes": 2**30, LAID_OUT: 2 * 450 * 1_000_000}
    assert phases["saving"].keys() - phases[STEPS].keys() == {WRITTEN}


@pytest.mark.parametrize(
    ("engine", "layout", "num_bytes"),
    [("ddp", "full", 4 * 4 * 800), ("fsdp2", "sharded", 2 * 4 * 4 * 800), ("fsdp2", "full", 12 * WHOLE)],
)
def test_a_save_holds_four_pieces_a_writer_or_all_that_is_gathered(
    make_settings, engine: str, layout: str, num_bytes: int
):
    """Float32 weights and two moments of 2,920 weights; the largest tensor is the embedding of 100 words."""
    settings = make_settings(device="cuda", num_processes=2, engine=engine, checkpoint_layout=layout)
    assert written_bytes(settings, SHAPE) == num_bytes
    phases = host_phases(settings, SHAPE, {COPY: 1}, 0)
    assert phases["saving"] == phases[STEPS] == highest(phases)[1]
    assert highest(phases)[0] == STEPS


def test_pieces_of_a_save_are_those_that_are_written(make_settings):
    """Two writers of an embedding of 128,256 words, 2 GiB in float32, were said to hold 4 GiB."""
    assert (NUM_PIECES, PIECE_BYTES) == (parallel_write.NUM_THREADS, parallel_write.PIECE_BYTES)
    wide = shape_of(NARROW | {"vocab_size": 128_256, "hidden_size": 4096})
    settings = make_settings(device="cuda", num_processes=2, engine="fsdp2", checkpoint_layout="sharded")
    assert written_bytes(settings, wide) == 2 * 4 * 64 * 2**20


def test_what_the_host_is_not_to_hold_goes_to_files(make_settings):
    settings = make_settings(device="cuda", offload_disk="/tmp", offload_host_bytes=100)
    assert disk_bytes(settings, 250) == 150
    assert disk_bytes(make_settings(device="cuda"), 250) == 0
