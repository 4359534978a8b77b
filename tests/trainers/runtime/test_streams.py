"""A run goes on whoever reads its output; other commands end without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtrain.trainers.run_folder import progress
from memtrain.trainers.run_folder.progress import Progress
from memtrain.trainers.runtime import streams

SAYS = """
import os, sys
from memtrain.trainers.runtime import streams
streams.take_streams()
streams.STALLED_S = 0.1
if sys.argv[1] == "trains":
    streams.go_on_without_readers()
for line in range(300):
    print("x" * 1000, flush=True)
opened = os.open(os.devnull, os.O_RDONLY)
with open(sys.argv[2], "w") as file:
    file.write(f"{streams.lost_words()}|{opened > 2}|{os.fstat(1).st_size}")
streams.flush()
"""


def said(tmp_path: Path, words: str, *, trains: bool = True) -> tuple[int, str, str]:
    """(exit code, text that it left, stderr) of a program whose output goes where the shell's words say."""
    program, left = tmp_path / "says.py", tmp_path / "left"
    program.write_text(SAYS)
    how = "trains" if trains else "asks"
    # Not by its name: the package is found where the tests were started.
    run = f"{sys.executable} -c 'exec(open(\"{program}\").read())'"
    shell = f"{run} {how} {left} {words}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    return done.returncode, left.read_text() if left.exists() else "", done.stderr


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("> /dev/full", "stdout (No space left on device)"),
        ("| head -1", "stdout (Broken pipe)"),
        ("| sleep 1.5", "stdout (nobody reads it)"),
        (">&-", "stdout (it is closed)"),
        (">&- 2>&- <&-", "stdout (it is closed) and stderr (it is closed)"),
    ],
)
def test_a_run_goes_on_and_knows_why_nobody_reads(tmp_path: Path, words: str, lost: str):
    code, left, _ = said(tmp_path, words)
    assert code == 0
    assert left.split("|")[:2] == [lost, "True"]


def test_what_is_read_slowly_is_not_lost(tmp_path: Path):
    code, left, _ = said(tmp_path, f"| (sleep 0.05; cat) > {tmp_path}/read", trains=False)
    assert (code, left.split("|")[0]) == (0, "")
    assert len((tmp_path / "read").read_text().splitlines()) == 300


@pytest.mark.parametrize(("words", "code"), [("> /dev/full", 1), ("| head -1", 1)])
def test_a_command_that_does_not_train_is_told(tmp_path: Path, words: str, code: int):
    found, left, err = said(tmp_path, words, trains=False)
    assert (found, left) == (code, "")
    assert "OSError" in err or "BrokenPipeError" in err


@pytest.mark.parametrize(
    ("words", "code", "err"),
    [
        ("recipes | head -1", 0, ""),
        ("methods > /dev/full", 5, "error: the output cannot be written: No space left on device"),
        ("schema >&-", 0, ""),
        ("no-such-command 2>&-", 2, ""),
        ("no-such-command 2> /dev/full", 2, ""),
    ],
)
def test_every_command_ends_without_a_traceback(words: str, code: int, err: str):
    shell = f"{sys.executable} -m memtrain {words}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.startswith(err)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_lost_console_is_told_once_in_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "lost_words", lambda: "stdout (Broken pipe)")
    with Progress(4, log=tmp_path / "log.txt") as shown:
        shown.print_line("one")
        shown.print_line("two")
    lines = [line.partition("  ")[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert lines == [progress.LOST.format(lost="stdout (Broken pipe)"), "one", "two"]


def test_a_console_that_breaks_ends_nothing(tmp_path: Path):
    """Rich ends the process at a broken pipe (SystemExit)."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as broken:
        console = progress.Console(file=broken, force_terminal=False)
        with Progress(4, log=tmp_path / "log.txt", console=console) as shown:
            shown.print_line("one")
            shown.print_line("two")
        broken.close = lambda: None
    assert "nobody reads the console" in (tmp_path / "log.txt").read_text()
