"""What works at all: attention back ends, the doctor's checks, and the tests that are marked gpu."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from first_light.bench import Bench

ROOT = Path(__file__).parents[3]
TESTS = "tests/gpu"
TESTS_S = 140.0
"""Time of a stage's tests, below its limit: what was found by then is told."""
ONE_TEST_S = 90
"""Time of one of them, where pytest-timeout is there."""
OUTCOME = re.compile(r"^(tests/\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
LAST_LINES = 60


def back_end(bench: Bench, name: str) -> dict[str, Any]:
    """One back end, forward and backward, against the masked reference, in every dtype of the device."""
    from memtrain.memory.rules.attention import AttentionBackend
    from memtrain.trainers.model.attention.probe import probe_one

    dtypes = (torch.bfloat16, torch.float16, torch.float32) if bench.device.is_cuda else (torch.float32,)
    found = {
        str(dtype).removeprefix("torch."): probe_one(AttentionBackend(name), bench.device.kind, dtype)
        for dtype in dtypes
    }
    said = [f"{dtype} {one.outcome}" for dtype, one in found.items()]
    return {
        "words": ", ".join(said),
        "outcomes": {dtype: [str(one.outcome), one.words] for dtype, one in found.items()},
    }


def doctor(bench: Bench) -> dict[str, Any]:
    """`memtrain doctor`, in this process."""
    from memtrain.trainers.tools.doctor import examine

    found = examine()
    broken = [f"{one.area} {one.name}: {one.words}" for one in found.broken]
    return {"words": "; ".join(broken) or "nothing is broken", "found": found.as_json()}


def gpu_tests(bench: Bench, files: list[str]) -> dict[str, Any]:
    """Tests that need a CUDA device, by files; a stand-in collects them and runs none."""
    words = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-m", "gpu", "--tb=short"]
    words += ["-o", f"timeout={ONE_TEST_S}"]
    words += [*([] if bench.device.is_cuda else ["--collect-only"]), *(f"{TESTS}/{one}" for one in files)]
    log = bench.work / "gpu-tests.txt"
    code = run_for(words, log, TESTS_S)
    lines = log.read_text(errors="replace").splitlines()
    found = dict(match.groups() for line in lines if (match := OUTCOME.match(line)))
    counts = {kind.lower(): list(found.values()).count(kind) for kind in sorted(set(found.values()))}
    collected = sum("::" in line or "<Function" in line for line in lines)
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or f"{collected} collected"
    ended = f"stopped after {TESTS_S:.0f} s" if code is None else f"exit code {code}"
    return {
        "words": f"{said} ({ended})",
        "exit_code": code,
        "counts": counts,
        "collected": collected,
        "not_passed": {name: kind for name, kind in found.items() if kind != "PASSED"},
        "last_lines": [] if code == 0 else lines[-LAST_LINES:],
    }


def run_for(command: list[str], log: Path, limit_s: float) -> int | None:
    """The exit code of a command whose output goes to a file; None where its time was over, and it is
    ended."""
    with log.open("w") as file:
        try:
            ran = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return None
    return ran.returncode
