"""What others' code changes of the process is put back; a call that keeps the interpreter is ended."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memtrain.trainers.online.rewards.calls import call_all
from memtrain.trainers.online.rewards.interpreter_watch import place_of
from memtrain.trainers.online.rewards.surroundings import Surroundings, keep_surroundings, tell_changes


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: os.chdir("/"), "current folder"),
        (lambda: torch.set_default_dtype(torch.float64), "default dtype"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "number of threads"),
        (lambda: setattr(sys, "stdout", None), "sys.stdout"),
        (lambda: os.umask(0o7), "umask"),
        (lambda: os.environ.update(MEMTRAIN_TRIED="1"), "MEMTRAIN_TRIED"),
    ],
)
def test_what_a_call_changes_is_put_back_and_told_once(
    act: Callable[[], object], said: str, monkeypatch: pytest.MonkeyPatch
):
    from memtrain.trainers.online.rewards import surroundings

    monkeypatch.setattr(surroundings, "_told", set())
    monkeypatch.setattr(surroundings, "_notes", [])
    monkeypatch.setattr(surroundings, "_kept", None)
    monkeypatch.delenv("MEMTRAIN_TRIED", raising=False)
    before = os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), sys.stdout
    keep_surroundings()
    call_all([act, act], is_async=False, timeout_s=20, at_once=1)
    assert (os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), sys.stdout) == before
    told: list[str] = []
    tell_changes(told.append)
    assert len(told) == 1
    assert said in told[0]
    assert isinstance(surroundings._kept, Surroundings)


ENDLESS = """
import re, sys
from pathlib import Path
from memtrain.trainers.online.rewards import interpreter_watch
from memtrain.trainers.online.rewards.calls import call_all
interpreter_watch.GRACE_S = 1.0
interpreter_watch.watch_interpreter(Path(sys.argv[1]))
def slow():
    re.match(r"(a+)+$", "a" * 60 + "b")
call_all([slow], is_async=False, timeout_s=0.5, at_once=1)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the watch is Linux's")
def test_a_call_that_keeps_the_interpreter_ends_the_run_with_its_place(tmp_path: Path):
    (tmp_path / "mine.py").write_text(ENDLESS)
    code = f"import sys; exec(compile(open({str(tmp_path / 'mine.py')!r}).read(), 'mine.py', 'exec'))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 5
    assert "has kept Python's interpreter" in done.stderr
    assert "at: mine.py:" in done.stderr


def test_the_place_is_the_innermost_line_of_others_code():
    inside = f'  File "{os.__file__}", line 1 in x'
    mine = '  File "/a/r.py", line 7 in score'
    dump = f"Thread 0x1 (most recent call first):\n{inside}\n{mine}\n\nThread 0x2:\n{inside}"
    assert place_of(dump) == "/a/r.py:7"
    assert place_of(f"Thread 0x1:\n{inside}") == ""
