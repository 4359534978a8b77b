"""Host memory through a run, by hand: rows that are laid out, and a checkpoint that is written."""

import pytest
from narrow import NARROW

from memtrain.memory.estimate.checkpoint_copies import COPY
from memtrain.memory.estimate.host_phases import (
    LAID_OUT,
    STEPS,
    WRITTEN,
    disk_bytes,
    highest,
    host_phases,
    written_bytes,
)
from memtrain.memory.model_shape.shape import shape_of

SHAPE = shape_of(NARROW)
WHOLE = 2 * 800 + 2 * (2 * 8 + 4 * 8 * 8 + 3 * 8 * 16) + 8


def test_every_process_lays_out_all_rows(make_settings):
    settings = make_settings(device="cuda", num_processes=2)
    phases = host_phases(settings, SHAPE, {"processes": 2**30, "optimizer states": 2**20}, 1_000_000)
    assert phases["data preparation"] == {"processes": 2**30, LAID_OUT: 2 * 450 * 1_000_000}
    assert phases["saving"].keys() - phases[STEPS].keys() == {WRITTEN}


@pytest.mark.parametrize(
    ("engine", "layout", "num_bytes"),
    [("ddp", "full", 4 * 800), ("fsdp2", "sharded", 2 * 4 * 800), ("fsdp2", "full", 12 * WHOLE)],
)
def test_a_save_holds_a_tensor_a_writer_or_all_that_is_gathered(
    make_settings, engine: str, layout: str, num_bytes: int
):
    """Float32 weights and two moments of 2,920 weights; the largest tensor is the embedding of 100 words."""
    settings = make_settings(device="cuda", num_processes=2, engine=engine, checkpoint_layout=layout)
    assert written_bytes(settings, SHAPE) == num_bytes
    phases = host_phases(settings, SHAPE, {COPY: 1}, 0)
    assert phases["saving"] == phases[STEPS] == highest(phases)[1]
    assert highest(phases)[0] == STEPS


def test_what_the_host_is_not_to_hold_goes_to_files(make_settings):
    settings = make_settings(device="cuda", offload_disk="/tmp", offload_host_bytes=100)
    assert disk_bytes(settings, 250) == 150
    assert disk_bytes(make_settings(device="cuda"), 250) == 0
