"""Measurements of `memtrain calibrate`."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from memtrain.errors import LaunchError
from memtrain.memory.hardware import devices
from memtrain.memory.plan.units import MIB
from memtrain.trainers.tools import calibrate


def test_products_are_timed_on_random_numbers(monkeypatch: pytest.MonkeyPatch):
    """A GPU multiplies ones at a higher clock than any training has: 894 TFLOP/s in place of 788."""
    made: list[Tensor] = []

    def timed(work: Callable[[], Tensor], wait: object = None) -> float:
        made.append(work())
        return 2.0

    monkeypatch.setattr(calibrate, "seconds_of", timed)
    assert calibrate.products_a_second(64, torch.float32, "cpu") == 64**3
    assert len(made[0].unique()) > 4000


def test_what_the_driver_says_is_in_use_is_read_by_card(monkeypatch: pytest.MonkeyPatch):
    said = "GPU-12ab, 43478\nGPU-34cd, [N/A]\n\n"
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/bin/{name}")
    answer = SimpleNamespace(stdout=said, returncode=0)
    monkeypatch.setattr(devices.subprocess, "run", lambda *words, **how: answer)
    assert calibrate.in_use() == {"GPU-12ab": 43478 * MIB}
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert calibrate.in_use() == {}


def test_what_other_processes_hold_is_not_this_ones():
    assert calibrate.beside_tensors(43_978 * MIB, 43_478 * MIB) == 500 * MIB


@pytest.mark.parametrize("others", [0, 43_979 * MIB], ids=["the driver does not say", "they left meanwhile"])
def test_a_card_whose_holders_are_not_known_is_refused(others: int):
    """42.5 GiB of others were taken for a context."""
    with pytest.raises(LaunchError, match="the card is shared"):
        calibrate.beside_tensors(43_978 * MIB, others)
