"""Host memory that can be had, where the machine tells less of it."""

from collections import namedtuple
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.hardware import host
from memtrain.memory.hardware.devices import detect
from memtrain.memory.plan.units import GIB

Memory = namedtuple("Memory", "total available")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """6 GiB that are there now, 4 of them free, and 128 GiB of pages; no container."""
    pages = 64 * GIB // 4096
    zone = "Node 0, zone   Normal\n  pages free     1\n        spanned  9\n        present  {}\n"
    (tmp_path / "zoneinfo").write_text(zone.format(pages) * 2)
    monkeypatch.setattr(host, "ZONES", tmp_path / "zoneinfo")
    monkeypatch.setattr(host, "CGROUPS", ((tmp_path, "memory.max", "memory.current"),))
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: Memory(6 * GIB, 4 * GIB))
    monkeypatch.setattr(host.os, "sysconf", lambda name: 4096)
    monkeypatch.delenv(host.VARIABLE, raising=False)


def test_memory_that_grows_counts_whole():
    """2 of 128 GiB are in use."""
    assert host.host_memory() == (128 * GIB, 126 * GIB)
    assert detect("cpu").host_bytes == 128 * GIB


def test_what_the_kernel_keeps_for_itself_is_not_memory_to_come(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: Memory(125 * GIB, 100 * GIB))
    assert host.host_memory() == (125 * GIB, 100 * GIB)


def test_a_container_limits_it(tmp_path: Path):
    (tmp_path / "memory.max").write_text(str(16 * GIB))
    (tmp_path / "memory.current").write_text(str(3 * GIB))
    assert host.host_memory() == (16 * GIB, 13 * GIB)


def test_the_environment_says_what_cannot_be_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(host.VARIABLE, "64GiB")
    assert host.host_memory() == (64 * GIB, 62 * GIB)
    monkeypatch.setenv(host.VARIABLE, "plenty")
    with pytest.raises(RecipeError, match="which is not a size"):
        host.host_memory()
