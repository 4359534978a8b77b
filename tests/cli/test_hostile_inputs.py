"""Some hostile inputs of each kind that takes no training, and what the harness itself must see.

`make break` tries all kinds for an hour. A seed that once found a fault is added here.
"""

import mmap
import os
import signal
import sys
import time
from pathlib import Path

import hostile_inputs
import pytest
from hostile_inputs import Attempt, attempt, try_kinds
from hostile_kinds import KINDS, finished

QUICK = {"recipes": 12, "servers": 8, "rows": 4}
"""Kinds that start no command, with their numbers of seeds."""


@pytest.mark.parametrize("kind", QUICK)
def test_no_hostile_input_is_more_than_a_plain_error(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    count = try_kinds({kind: KINDS[kind]}, QUICK[kind], 0, 120)[kind]
    assert count.faults == []
    assert count.tried > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name in KINDS if name not in (*QUICK, "namespaces")])
def test_no_hostile_input_of_a_command_is_more_than_a_plain_error(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    count = try_kinds({kind: KINDS[kind]}, 8, 0, 150)[kind]
    assert count.faults == []


def _endings() -> int:
    """A command that ends as its first word says."""
    match sys.argv[1]:
        case "traceback":
            raise KeyError("x")
        case "our fault":
            return 70
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "waits":
            time.sleep(60)
        case "spins":
            while True:
                pass
        case "grows":
            # Of the system itself: an allocator has resident memory to give that its fork began with.
            held = mmap.mmap(-1, 2**28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            held.write(bytes(2**28))
            time.sleep(60)
        case "no cure":
            print("error: no", flush=True)
            return 5
        case "trusts":
            print("set trust_remote_code=True", flush=True)
        case "refuses":
            print("error: no\n   at: here\n  try: that", flush=True)
            return 5
    return 0


@pytest.mark.parametrize(
    ("word", "is_refused", "seen"),
    [
        ("traceback", None, "traceback"),
        ("our fault", None, "exit code 70"),
        ("killed", None, "exit code -9"),
        ("waits", None, "hang"),
        ("spins", None, "hang"),
        ("grows", None, "memory"),
        ("no cure", None, "no place or no cure"),
        ("trusts", None, "advice to trust code"),
        ("done", True, "accepted in silence"),
        ("refuses", False, "refused, and nothing is wrong"),
        ("refuses", True, ""),
        ("done", False, ""),
    ],
)
def test_the_harness_sees_what_it_is_there_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, is_refused: bool | None, seen: str
):
    monkeypatch.setattr("memtrain.__main__.main", _endings)
    monkeypatch.setattr(hostile_inputs, "WALL_FACTOR", 1.5)
    monkeypatch.setattr(hostile_inputs, "MEMORY_BYTES", 2**26 if word == "grows" else 2**33)
    limit_s = 2.0 if seen == "hang" else 60.0
    fault = attempt(Attempt(word, [word], is_refused=is_refused, limit_s=limit_s), tmp_path)
    assert fault.startswith(seen)
    assert bool(fault) == bool(seen)


@pytest.mark.parametrize("kind", ["closed", "full", "gone"])
def test_the_harness_takes_the_output_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    def writes() -> int:
        if sys.stdout is None:
            return 3
        try:
            print("x" * 100_000, flush=True)
        except OSError:
            return 3
        return 0

    monkeypatch.setattr("memtrain.__main__.main", writes)
    assert attempt(Attempt(kind, ["x"], stdout=kind, codes=(3,)), tmp_path) == ""


def test_counts_say_what_was_tried_and_failed_by_kind(capsys: pytest.CaptureFixture[str]):
    def wrong(seed: int, folder: Path) -> tuple[str, str]:
        if seed == 3:
            raise RuntimeError
        return "x", "" if seed % 2 else "bad"

    counts = try_kinds({"a": wrong, "b": lambda seed, folder: ("y", "")}, 4, 0, 60)
    assert (counts["a"].tried, counts["a"].failed) == (4, 3)
    assert (counts["b"].tried, counts["b"].failed) == (4, 0)
    assert [one["seed"] for one in counts["a"].faults] == [0, 2, 3]
    assert "a 0: x\n   bad" in capsys.readouterr().out
    assert try_kinds({"a": wrong}, 4, 0, -1.0)["a"].tried == 0


@pytest.mark.slow
def test_a_run_that_is_used_is_a_sound_one():
    assert (finished("lora") / "final" / "adapter_model.safetensors").is_file()
