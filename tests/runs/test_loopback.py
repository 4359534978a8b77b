"""A run of two ranks on one machine, and who on the network could speak to it."""

import os
import signal

import psutil
import pytest


def listening(pid: int) -> set[str]:
    """Addresses at which a process and those that it started listen."""
    found: set[str] = set()
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in processes:
            found |= {
                one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN
            }
    except psutil.Error:
        pass  # ended in between
    return found


@pytest.mark.slow
def test_two_ranks_listen_on_loopback_alone(runs):
    run = runs.fork("run", "cluster.processes=2", "train.max_steps=4")
    seen: set[str] = set()
    while os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        seen |= listening(run.pid)
        signal.sigtimedwait([], 0.1)
    assert run.wait() == 0, run.said
    assert seen == {"127.0.0.1"}
