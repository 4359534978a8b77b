"""Signs of life leave the memory of the thread that they look at as it is."""

from __future__ import annotations

import time
import weakref
from pathlib import Path

import pytest

from memtrain.trainers.run_folder import pulse
from memtrain.trainers.run_folder.folder import RunFolder


class Tensor:
    """An object whose end can be seen."""


def made() -> weakref.ref[Tensor]:
    """The end of a local that lives while somebody looks."""
    local = Tensor()
    time.sleep(0.002)
    return weakref.ref(local)


def test_what_a_function_held_is_gone_when_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pulse, "EVERY_S", 0.001)
    signs = pulse.Pulse(RunFolder(tmp_path), 0)
    signs.start()
    try:
        left = sum(made()() is not None for _ in range(200))
    finally:
        signs.stop()
    # A look that is under way holds it for microseconds.
    assert left <= 2
