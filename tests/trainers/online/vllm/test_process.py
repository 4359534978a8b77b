"""The engine's process: its environment, and the connection, read also where a thousand files are open."""

import fcntl
import resource
import socket
import subprocess
import sys

import pytest

from memtrain.trainers.online.vllm.process import _is_readable, environment_of

MANY = 1100


def test_an_answer_is_seen_with_more_files_open_than_select_takes():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= MANY:
        pytest.skip(f"this process may open {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 2 * MANY), hard), hard))
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, MANY)) as far:
        assert far.fileno() >= MANY
        assert not _is_readable(far, 0.01)
        theirs.send(b"x")
        assert _is_readable(far, 10.0)


MEET = """
import sys
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=1,
                        timeout=timedelta(seconds=2))
"""


def test_an_engine_of_one_of_several_processes_makes_its_own_group(monkeypatch: pytest.MonkeyPatch):
    """vLLM meets itself at an address of its own. Under the launcher's variables torch waits there for the
    trainer's store, ten minutes (torch 2.13), and memory that sleeps lies in no expandable segment."""
    launcher = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
        "LOCAL_WORLD_SIZE": "2",
    }
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # The worker takes its own folder off the path itself.
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    made = environment_of({"CUDA_VISIBLE_DEVICES": "1"})
    assert not made.keys() & {*launcher, "PYTORCH_CUDA_ALLOC_CONF", "PYTHONSAFEPATH"}
    assert (made["NCCL_DEBUG"], made["CUDA_VISIBLE_DEVICES"]) == ("WARN", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ran = subprocess.run([sys.executable, "-c", MEET, port], env=made, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
