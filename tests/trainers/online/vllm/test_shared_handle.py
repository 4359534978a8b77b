"""A handle of shared CUDA memory is tried by a process before it is used; its failures, told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from memtrain.trainers.online.vllm import weight_sync


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 90", ""),
        ("echo 0", "the other process reads 0, not 90"),
        ("echo Loading >&2; echo 'CUDA error: invalid device context' >&2; exit 1", "CUDA error: invalid"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_handle_that_the_other_process_cannot_read_says_why(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Handles of expandable segments fail on several drivers: files take their place then."""
    monkeypatch.setattr(weight_sync, "shared_handle", lambda buffer: "handle")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat >/dev/null\n{script}\n")
    python.chmod(0o755)
    buffer = torch.zeros(4, dtype=torch.uint8)
    said = weight_sync.try_handle(buffer, str(python), {})
    assert said.startswith(why) if why else said == ""
    assert buffer.tolist() == [weight_sync.PROBE_VALUE] * 4


def test_memory_that_gives_no_handle_says_why(monkeypatch: pytest.MonkeyPatch):
    def fails(buffer: torch.Tensor) -> str:
        raise RuntimeError("pidfd_open syscall is not supported\nby this kernel")

    monkeypatch.setattr(weight_sync, "shared_handle", fails)
    assert "pidfd_open" in weight_sync.try_handle(torch.zeros(1, dtype=torch.uint8), "python", {})


@pytest.mark.parametrize("why", ["", "invalid device context"])
def test_the_buffer_lies_in_fixed_segments_and_files_take_its_place_where_it_cannot_be_read(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Memory in expandable segments gives no handle that every driver can open."""
    is_fixed, made = [False], []
    plain = torch.empty

    @contextmanager
    def fixed() -> Iterator[None]:
        is_fixed[0] = True
        yield
        is_fixed[0] = False

    def noting(*size: Any, device: Any, **more: Any) -> torch.Tensor:
        made.append((device.type, is_fixed[0]))
        return plain(*size, **more)

    monkeypatch.setattr(weight_sync, "fixed_segments", fixed)
    monkeypatch.setattr(weight_sync, "shared_handle", lambda buffer: "handle")
    monkeypatch.setattr(weight_sync, "try_handle", lambda buffer, python, environment: why)
    monkeypatch.setattr(torch, "empty", noting)
    found = weight_sync.open_transport(tmp_path, 4096, torch.device("cuda"), is_same_device=True)
    try:
        assert made == [("cuda", True)]
        assert (found.handle, found.why_files) == (None if why else "handle", why)
        assert (found.buffer is None) == bool(why)
    finally:
        found.close()
