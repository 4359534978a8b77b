"""Kills at random moments over methods, engines and ranks: does every run go on with the same bits?

    python benchmarks/kill_ranks.py [--kills 100] [--seed 0] [-o benchmarks/results/kill_ranks.json]
        [--set save.background=true ...]

For each kill a method, an engine, a number of ranks, one of them and a moment are drawn; that rank gets
SIGKILL, the others end as they do, or are killed after some seconds as a launcher does where they wait for
one that never came; the same run is begun again until it ends (it may be killed again).
Its losses and gradient norms are compared, bit for bit, with those of a run that nobody killed. The file
holds what was done so far: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import warm_ranks as warm
from many_ranks import ROOT, about

OTHERS_S = 8.0
"""Time that the others have to end."""
AGAIN = 0.3
"""Share of the continued runs that are killed once more."""


def undisturbed(recipe: Path, method: str, asked: list[str], num_ranks: int, run: Path) -> float | None:
    """Let a run go to its end; seconds that it took, or None where it is refused."""
    if warm.plan(recipe, method, run, asked).code:
        return None
    began = time.monotonic()
    ranks = warm.start(run, num_ranks)
    if any(warm.wait(ranks)):
        raise SystemExit(ranks[0].said)
    return time.monotonic() - began


def killed(run: Path, num_ranks: int, lives_s: float, victim: int) -> bool:
    """Begin or go on, and kill one rank after `lives_s`; False when the run had ended before."""
    ranks = warm.start(run, num_ranks)
    until = time.monotonic() + lives_s
    while time.monotonic() < until:
        time.sleep(0.002)
    try:
        os.kill(ranks[victim].pid, signal.SIGKILL)
    except ProcessLookupError:
        warm.wait(ranks)
        return False
    return -signal.SIGKILL in warm.wait(ranks, timeout_s=OTHERS_S)


def disturbed(case: dict[str, Any], moments: random.Random, run: Path, whole: Path, taken_s: float) -> None:
    """Kill a run, go on until it ends, and note in `case` what was found."""
    kills: list[float] = []
    num_ranks = case["ranks"]
    while not kills or moments.random() < AGAIN:
        lives_s = moments.uniform(0.0, taken_s)
        if not killed(run, num_ranks, lives_s, moments.randrange(num_ranks)):
            break
        kills.append(round(lives_s, 3))
    ranks = warm.start(run, num_ranks)
    codes = warm.wait(ranks)
    found, expected = warm.curve(run), warm.curve(whole)
    case |= {"kills_after_s": kills, "of_s": round(taken_s, 3), "steps": len(expected)}
    case["ended"] = "done" if not any(codes) else ranks[0].said[-400:]
    case["same_bits"] = found == expected


def main() -> None:
    """Kill until there are as many kills as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks/results/kill_ranks.json")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(warm.METHODS))
    parser.add_argument("--engines", default=",".join(warm.ENGINES))
    parser.add_argument("--set", action="append", default=[], help="override of every run that is killed")
    asked = parser.parse_args()
    told: dict[str, Any] = json.loads(asked.output.read_text()) if asked.output.exists() else {"runs": []}
    warm.warm_up()
    told |= about()
    told["about"]["command"] = " ".join(
        ["python benchmarks/kill_ranks.py", *(f"--set {one}" for one in asked.set)]
    )
    moments = random.Random(f"{asked.seed} {len(told['runs'])}")
    taken: dict[Path, float | None] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["MEMTRAIN_CACHE"] = f"{place}/cache"
        while sum(len(run["kills_after_s"]) for run in told["runs"]) < asked.kills:
            method, engine = moments.choice(asked.only.split(",")), moments.choice(asked.engines.split(","))
            num_ranks = moments.choice((1, 2, 2, 3, 4)) if engine == "ddp" else moments.choice((2, 2, 4))
            recipe = warm.write_recipe(folder, method)
            overrides = warm.asked_for(engine, num_ranks)
            whole = folder / f"{method}-{engine.replace(' ', '-')}-{num_ranks}"
            if whole not in taken:
                taken[whole] = undisturbed(recipe, method, overrides, num_ranks, whole)
            taken_s = taken[whole]
            if taken_s is None:
                continue
            run = folder / "killed"
            shutil.rmtree(run, ignore_errors=True)
            warm.plan(recipe, method, run, [*overrides, *asked.set])
            case: dict[str, Any] = {"method": method, "engine": engine, "ranks": num_ranks}
            disturbed(case, moments, run, whole, taken_s)
            if not case["kills_after_s"]:
                continue
            told["runs"].append(case)
            told["kills"] = sum(len(one["kills_after_s"]) for one in told["runs"])
            told["runs_that_differ"] = sum(not one["same_bits"] for one in told["runs"])
            asked.output.write_text(json.dumps(told, indent=1) + "\n")
            print(json.dumps(case), flush=True)
    if told["runs_that_differ"]:
        raise SystemExit("not the same")


if __name__ == "__main__":
    main()
