"""Optional packages: which count as installed, and the reason against the others."""

from types import SimpleNamespace

import pytest

from memtrain.memory.hardware import packages
from memtrain.memory.hardware.packages import installed, missing


def test_a_package_that_is_not_here_is_not_installed():
    assert missing("no_such_package") == "is not installed"
    assert installed("no_such_package", "pytest") == {"pytest"}


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("0.8.5", ""),
        ("0.10.0.dev1", ""),
        ("1.0rc1", ""),
        ("0.8.4", "0.8.4 is installed, and 0.8.5 is the oldest that works"),
        ("0.6.1.post1", "0.6.1.post1 is installed, and 0.8.5 is the oldest that works"),
    ],
)
def test_an_older_liger_is_not_taken_and_told(monkeypatch: pytest.MonkeyPatch, version: str, why: str):
    """0.6.0 and 0.6.1 lack `accum_dtype`, which the loss asks for."""
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(packages.importlib.metadata, "version", {"liger-kernel": version}.__getitem__)
    assert missing("liger_kernel") == why
    assert installed("liger_kernel") == (frozenset() if why else {"liger_kernel"})
