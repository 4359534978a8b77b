"""A buffer on the GPU that two processes see: what the weights of the policy travel through to vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from memtrain.trainers.online.vllm.weight_sync import open_transport, shared_handle

pytestmark = pytest.mark.gpu
READ = """
import sys
from memtrain.trainers.online.vllm.worker import opened
buffer = opened(sys.stdin.readline().strip())
print(int(buffer.sum()), flush=True)
"""


def test_another_process_reads_what_was_written(cuda: torch.device):
    buffer = torch.arange(100, dtype=torch.uint8, device=cuda)
    try:
        handle = shared_handle(buffer)
    except RuntimeError as error:
        pytest.skip(f"this driver shares no such memory ({str(error).splitlines()[0]}): files are taken")
    torch.cuda.synchronize()
    reported = subprocess.run(
        [sys.executable, "-c", READ], input=f"{handle}\n", capture_output=True, text=True, check=False
    )
    assert reported.returncode == 0, reported.stderr
    assert int(reported.stdout) == sum(range(100))


def test_the_transport_tries_the_handle_and_falls_back_to_files(tmp_path: Path, cuda: torch.device):
    transport = open_transport(tmp_path, 4096, cuda, is_same_device=True)
    try:
        assert (transport.handle is None) == bool(transport.why_files)
    finally:
        transport.close()
