"""Commands that take turns: wall time, CPU time and peak memory of each, and the ratios with their spread.

Used by the scripts beside it; not run by itself.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from result_files import write_result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUIET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class Done:
    """One command that ended."""

    wall_s: float
    cpu_s: float
    """User and system, with its children."""
    peak_bytes: int
    """Highest resident memory of the process or a child of it."""
    code: int
    out: str
    """Standard output and error together."""


def run(command: Sequence[str], *, folder: Path, limit_s: float = 600) -> Done:
    """Run a command to its end, with one thread.

    Raises: TimeoutError where it does not end in time; it is ended then.
    """
    log = folder / "out.log"
    started = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=folder, env={**os.environ, **QUIET}
        )
        usage = _waited(process, started + limit_s)
    wall = time.perf_counter() - started
    return Done(
        wall,
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
        process.returncode,
        log.read_text(errors="replace"),
    )


def _waited(process: subprocess.Popen[bytes], until: float) -> Any:
    """What the process used, once it has ended."""
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage
        if time.perf_counter() > until:
            process.kill()
            os.wait4(process.pid, 0)
            raise TimeoutError(f"not done in time: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
        time.sleep(0.005)


def in_turns(
    sides: Mapping[str, Callable[[], dict[str, float]]], repeats: int
) -> dict[str, list[dict[str, float]]]:
    """The figures of every side, measured in turns: a change of the machine's load meets all."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for repeat in range(repeats):
        order = list(sides) if repeat % 2 == 0 else list(sides)[::-1]
        for side in order:
            found[side].append(sides[side]())
    return found


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """theirs / mine of each turn: median, lowest, highest. Above 1: ours needs less."""
    each = [b / a for a, b in zip(mine, theirs, strict=True) if a]
    return {"median": statistics.median(each), "lowest": min(each), "highest": max(each)}


def medians(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {key: statistics.median(one[key] for one in figures) for key in figures[0]}


def where(command: str, *packages: str) -> dict[str, Any]:
    """Device, command, commit, date and versions: what a figure is worth nothing without."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = ("torch", "transformers", *packages)
    return {
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores, one thread",
        "command": command,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "load_before": os.getloadavg()[0],
        "versions": {name: version(name) for name in names},
    }


def write(name: str, result: Mapping[str, Any], out: Path | None) -> None:
    """Write a result as JSON."""
    path = out or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_result(path, result)
    print(f"wrote {path}")
