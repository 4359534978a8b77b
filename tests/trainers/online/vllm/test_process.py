"""The connection to the engine's process: read also where a thousand files are open."""

import fcntl
import resource
import socket

import pytest

from memtrain.trainers.online.vllm.process import _is_readable

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
