"""The first signal is remembered, the second SIGINT kills, and the handlers before come back."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from memtrain.trainers.runtime import signals
from memtrain.trainers.runtime.signals import (
    ASKED,
    StopRequest,
    hold_signals,
    is_hung_up,
    outliving_terminal,
)


@pytest.mark.parametrize("asked", ASKED)
def test_the_first_signal_is_remembered(asked: signal.Signals):
    before = signal.getsignal(asked)
    with StopRequest() as request:
        assert not request.asked
        os.kill(os.getpid(), asked)
        assert request.asked
        assert request.signal == asked
    assert signal.getsignal(asked) is before


def test_a_second_sigterm_changes_nothing():
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signal == signal.SIGTERM


def test_a_second_sigint_kills():
    code = (
        "import os, signal, time\n"
        "from memtrain.trainers.runtime.signals import StopRequest\n"
        "with StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('first', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(5)\n"
        "    print('second', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("first\n", -signal.SIGINT)


def test_a_signal_before_anyone_listens_waits_to_be_heard():
    """Sent by the process to itself, it goes to any of its threads: a mask of this one would not hold it."""
    before = {one: signal.getsignal(one) for one in ASKED}
    idle = threading.Event()
    other = threading.Thread(target=idle.wait)
    other.start()
    try:
        hold_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        with StopRequest() as request:
            assert request.signal == signal.SIGTERM
    finally:
        idle.set()
        other.join()
        for one, handler in before.items():
            signal.signal(one, handler)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends the process")
def test_a_process_ends_with_the_one_that_started_it_even_where_that_is_killed():
    child = (
        "import sys, time\n"
        "from memtrain.trainers.runtime.signals import end_with_parent\n"
        "end_with_parent()\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
        "print('alone', flush=True)\n"
    )
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    started = subprocess.Popen([sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    started.kill()
    assert started.stdout.read() == "", "The child lived on and said so."
    started.wait()
    started.stdout.close()


def test_every_signal_that_others_warn_with_is_heard():
    wanted = {"TERM", "INT", "QUIT", "USR1", "USR2", "XCPU", "ALRM"}
    assert {f"SIG{name}" for name in wanted} <= {one.name for one in ASKED}
    assert signal.SIGHUP not in ASKED


def test_a_closed_terminal_is_noted_and_stops_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signals, "_hung_up", [])
    # The tests themselves may run under nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with outliving_terminal(), StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert is_hung_up()
            assert not request.asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_under_nohup_nothing_is_changed(monkeypatch: pytest.MonkeyPatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with outliving_terminal():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
