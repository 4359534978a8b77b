"""Method x engine x ranks on a CPU: losses against one process, peak of a rank, and going on after a kill.

    python benchmarks/many_ranks.py -o benchmarks/results/many_ranks.json [--only sft,dpo] [--ranks 2,4]

Cells that are in the file already are kept: the same command goes on. What cannot run is in the table with
the reason. Ranks are forks of one process, more of them than cores where there are fewer: no cell is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import warm_ranks as warm
from result_files import write_result

ROOT = Path(__file__).resolve().parents[1]
SMALL = 1e-3
"""Losses and norms below this are compared by their difference: RLOO's mean loss is zero but for rounding."""


def furthest(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """Largest relative difference of a loss or a norm."""
    assert len(found) == len(expected), "Both made as many steps."
    pairs = [
        (a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)
    ]
    return max(abs(a - b) / max(abs(b), SMALL) for a, b in pairs)


def measured(recipe: Path, method: str, engine: str, num_ranks: int, folder: Path) -> dict[str, Any]:
    """One cell of the table, without what is compared with one process."""
    run = folder / f"{method}-{engine.replace(' ', '-')}-{num_ranks}"
    asked = warm.asked_for(engine, num_ranks)
    planned = warm.plan(recipe, method, run, asked)
    if planned.code:
        return {"refused": planned.said.splitlines()[0].removeprefix("error: ")}
    ranks = warm.start(run, num_ranks)
    if any(warm.wait(ranks)):
        return {"failed": [rank.said[-400:] for rank in ranks]}
    peaks: dict[str, int] = {}
    for event in warm.lines(run, "memory"):
        peaks[event["phase"]] = max(peaks.get(event["phase"], 0), event["allocated"])
    plan = json.loads((run / "plan.json").read_text())
    predicted = {phase["phase"]: phase["num_bytes"] for phase in plan["prediction"]["phases"]}
    cell = {
        "curve": warm.curve(run),
        "peak_bytes_of_the_largest_rank": peaks.get("steady step"),
        "predicted_bytes": predicted["steady step"],
    }
    cell["resume"] = resumed(recipe, method, asked, num_ranks, run)
    shutil.rmtree(run)
    return cell


def resumed(recipe: Path, method: str, asked: list[str], num_ranks: int, whole: Path) -> str:
    """Kill the last rank after the second step, go on, and compare every bit of the curve."""
    run = whole.with_name(whole.name + "-killed")
    warm.plan(recipe, method, run, asked)
    ranks = warm.start(run, num_ranks)
    until = time.monotonic() + warm.TIMEOUT_S
    while len(warm.lines(run, "step")) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(ranks[-1].pid, signal.SIGKILL)
    warm.wait(ranks, timeout_s=20.0)
    again = warm.start(run, num_ranks)
    if any(warm.wait(again)):
        return "failed: " + " | ".join(rank.said[-200:] for rank in again)
    found, expected = warm.curve(run), warm.curve(whole)
    shutil.rmtree(run)
    return "same bits" if found == expected else f"differs by {furthest(found, expected):.1e}"


def main() -> None:
    """Fill the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks/results/many_ranks.json")
    parser.add_argument("--only", default=",".join(warm.METHODS))
    parser.add_argument("--engines", default=",".join(warm.ENGINES))
    parser.add_argument("--ranks", default="2,4")
    asked = parser.parse_args()
    table: dict[str, Any] = json.loads(asked.output.read_text()) if asked.output.exists() else {"cells": {}}
    warm.warm_up()
    table |= about()
    alone: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["MEMTRAIN_CACHE"] = f"{place}/cache"
        for num_ranks in map(int, asked.ranks.split(",")):
            for method in asked.only.split(","):
                recipe = warm.write_recipe(folder, method)
                for engine in asked.engines.split(","):
                    fill(table["cells"], alone, recipe, method, engine, num_ranks, folder)
                    write_result(asked.output, table)


def fill(
    cells: dict[str, Any],
    alone: dict[str, list[tuple[float, float]]],
    recipe: Path,
    method: str,
    engine: str,
    num_ranks: int,
    folder: Path,
) -> None:
    """Measure a cell that is not there; `alone`: losses and norms of one process, made where they are not."""
    name = f"{method} {engine} {num_ranks}"
    if name in cells:
        return
    if method not in alone:
        one = measured(recipe, method, "one", 1, folder)
        alone[method] = one.pop("curve")
        cells[f"{method} one 1"] = one
    cell = measured(recipe, method, engine, num_ranks, folder)
    found = cell.pop("curve", None)
    if found is not None:
        cell["furthest_from_one_process"] = furthest(found, alone[method])
    cells[name] = cell
    print(name, cell, flush=True)


def about() -> dict[str, Any]:
    """Where it was run."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "about": {
            "device": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo",
            "commit": commit.stdout.strip(),
            "command": "python benchmarks/many_ranks.py",
        }
    }


if __name__ == "__main__":
    main()
