"""A handle of shared CUDA memory is tried by a process before it is used; its failures, told."""

from pathlib import Path

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
