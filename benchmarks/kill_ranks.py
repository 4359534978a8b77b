"""Kills over methods, engines, ranks and moments: does every run go on with the same bits, and leave nothing?

    python benchmarks/kill_ranks.py [--kills 300] [--minutes 60] [--seed 0]
        [-o benchmarks/results/kill_moments.json] [--set save.async_save=true ...]

Every method is run under every engine, those with the fewest kills first; each run is killed again and
again, at moments that are drawn (kill_moments.py): while the command reads and plans, before it has ranks,
before they have the folder, any time, all ranks at once, and each step of saving, of the final save and of
the last words. The other ranks end as they do, or are killed after some seconds as a launcher does. What one
kill leaves half-written must be gone when the next start has taken the folder. When the same command has let
the run end, its losses, gradient norms, evaluations and final weights are compared, bit for bit, with those
of a run that nobody killed, and the names in its folder too; nothing may be left in the cache or among
temporary files. The output holds what was done so far: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kill_moments as moments
import warm_ranks as warm
from many_ranks import ROOT, about
from result_files import write_result

KILLS = 6
"""Kills of one run, where it does not end before."""

CACHE, TEMPORARY = "cache", "tmp"
"""Folders of all runs, in the place of this call."""

SMALL = (
    "memory.measure_peaks=false",
    "train.batch_size=8",
    "data.train={source: builtin:arithmetic, limit: 40}",
)
"""Said of every run, so that many are killed in little time."""


def undisturbed(recipe: Path, method: str, asked: list[str], num_ranks: int, run: Path) -> float | None:
    """Let a run go to its end; seconds that it took, or None where it is refused."""
    if warm.plan(recipe, method, run, asked).code:
        return None
    began = time.monotonic()
    ranks = warm.start(run, num_ranks)
    if any(warm.wait(ranks)):
        raise SystemExit(ranks[0].said)
    return time.monotonic() - began


def found_in(run: Path) -> dict[str, Any]:
    """What must be the same of two runs: what was learned, and what lies in the folder."""
    finals = sorted((run / "final").rglob("*.safetensors"))
    return {
        "curve": warm.curve(run),
        "held out": [(line["step"], line["loss"]) for line in warm.lines(run, "eval")],
        "weights": {str(path.relative_to(run)): path.read_bytes() for path in finals},
        "names": sorted(
            str(path.relative_to(run))
            for path in run.rglob("*")
            if path.is_file() and not path.name.startswith("rank-")
        ),
        "ends": len(warm.lines(run, "final")),
    }


def differences(run: Path, whole: Path) -> list[str]:
    """What is not the same, in words."""
    mine, other = found_in(run), found_in(whole)
    reported = [name for name in mine if name != "names" and mine[name] != other[name]]
    left = sorted(set(mine["names"]) - set(other["names"]))
    lost = sorted(set(other["names"]) - set(mine["names"]))
    return reported + [f"left: {name}" for name in left] + [f"lost: {name}" for name in lost]


def unfinished_in(run: Path) -> set[str]:
    """Names that a process gives what it has not finished; the lock is taken over, not removed."""
    hidden = {path for path in run.rglob(".*") if path.name not in (".lock", ".faults")}
    return {str(path.relative_to(run)) for path in hidden}


def strays(place: Path) -> list[str]:
    """What killed processes left outside of the run folder."""
    half = [path for path in (place / CACHE).rglob(".*") if path.name != ".locks"]
    return [str(path.relative_to(place)) for path in (*half, *(place / TEMPORARY).iterdir())]


def disturbed(
    case: dict[str, Any], words: list[str], draws: random.Random, run: Path, whole: Path, taken_s: float
) -> None:
    """Kill a run, go on until it ends, and note in `case` what was found."""
    kills: list[moments.Kill] = []
    left: list[str] = []
    num_ranks = case["ranks"]
    choices = [one for one in moments.MOMENTS if num_ranks > 1 or one not in moments.LAUNCHERS]
    for moment in sorted(draws.sample(choices, KILLS), key=choices.index):
        before = unfinished_in(run)
        if moment in (*moments.LAUNCHERS, *moments.PLANNING):
            kill = moments.killed_launcher(words, run, num_ranks, moment, draws, taken_s)
        else:
            if not (run / "plan.json").exists():
                warm.planned(words)
            kill = moments.killed_ranks(run, num_ranks, moment, draws, taken_s)
        if kill is None:
            break
        kills.append(kill)
        if moment in list(moments.PLACES)[1:]:
            left += [f"left by the kill before '{moment}': {one}" for one in before & unfinished_in(run)]
    code = moments.launched(words, run, num_ranks)
    case["kills"] = [[one.moment, one.after_s] for one in kills]
    case["of_s"] = round(taken_s, 2)
    case["ended"] = moments.said_by_launcher(run) if code else "done"
    case["differs"] = [*differences(run, whole), *left, *(f"left: {one}" for one in strays(run.parent))]


def next_cell(runs: list[dict[str, Any]], cells: list[tuple[str, str]]) -> tuple[str, str]:
    """Method and engine that were killed the fewest times, the first of `cells` among equals."""
    made = Counter((run["method"], run["engine"]) for run in runs for _ in run["kills"])
    return min(cells, key=lambda cell: made[cell])


def summed(reported: dict[str, Any]) -> None:
    """Count what was done."""
    runs = reported["runs"]
    made = [moment for run in runs for moment, _ in run["kills"]]
    reported["kills"] = len(made)
    reported["runs_that_differ"] = sum(bool(run["differs"]) or run["ended"] != "done" for run in runs)
    reported["kills_by_moment"] = dict(sorted(Counter(made).items()))
    reported["kills_during_the_final_save"] = sum(one in moments.FINAL for one in made)
    for name in ("method", "engine"):
        counts = Counter(run[name] for run in runs for _ in run["kills"])
        reported[f"kills_by_{name}"] = dict(sorted(counts.items()))


def joined(files: list[Path]) -> dict[str, Any]:
    """What several calls found, with the words of each."""
    parts = [json.loads(file.read_text()) for file in files]
    reported: dict[str, Any] = {"runs": [run for part in parts for run in part["runs"]]}
    summed(reported)
    return reported | {
        "cpu_s": sum(part["cpu_s"] for part in parts),
        "about": [one for part in parts for one in part["about"]],
    }


def cpu_s() -> float:
    """Seconds that this process and the ones it has waited for took of a core."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    """Kill until there are as many kills as asked for, or the time of a core is up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "benchmarks/results/kill_moments.json")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=60.0, help="of one core, of this call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(warm.METHODS))
    parser.add_argument("--engines", default=",".join(warm.ENGINES))
    parser.add_argument("--set", action="append", default=[], help="override of every run that is killed")
    parser.add_argument("--join", type=Path, nargs="+", help="write what these files hold together, no more")
    asked = parser.parse_args()
    if asked.join:
        write_result(asked.output, joined(asked.join))
        return
    reported: dict[str, Any] = json.loads(asked.output.read_text()) if asked.output.exists() else {"runs": []}
    warm.warm_up()
    moments.adopt_orphans()
    said = [f"--kills {asked.kills}", f"--seed {asked.seed}", *(f"--set {one}" for one in asked.set)]
    mine = about()["about"] | {"command": " ".join(["python benchmarks/kill_ranks.py", *said])}
    before = reported.get("about", [])
    reported["about"] = [one for one in ([before] if isinstance(before, dict) else before) if one != mine] + [
        mine
    ]
    cpu_before_s = reported.get("cpu_s", 0)
    draws = random.Random(f"{asked.seed} {len(reported['runs'])}")
    taken: dict[Path, float | None] = {}
    cells = [(one, other) for one in asked.only.split(",") for other in asked.engines.split(",")]
    draws.shuffle(cells)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / TEMPORARY).mkdir()
        os.environ |= {"MEMTRAIN_CACHE": str(folder / CACHE), "TMPDIR": str(folder / TEMPORARY)}
        tempfile.tempdir = str(folder / TEMPORARY)
        while cells and len([1 for run in reported["runs"] for _ in run["kills"]]) < asked.kills:
            if cpu_s() > 60 * asked.minutes:
                break
            method, engine = next_cell(reported["runs"], cells)
            num_ranks = draws.choice((1, 2, 2, 3)) if engine == "ddp" else 2
            recipe = warm.write_recipe(folder, method)
            overrides = [*warm.asked_for(engine, num_ranks), *SMALL]
            whole = folder / f"{method}-{engine.replace(' ', '-')}-{num_ranks}"
            if whole not in taken:
                taken[whole] = undisturbed(recipe, method, overrides, num_ranks, whole)
            taken_s = taken[whole]
            if taken_s is None:
                cells.remove((method, engine))
                continue
            run = folder / "killed"
            for path in (run, folder / CACHE):
                shutil.rmtree(path, ignore_errors=True)
            words = warm.words(recipe, method, run, [*overrides, *asked.set])
            case: dict[str, Any] = {"method": method, "engine": engine, "ranks": num_ranks}
            disturbed(case, words, draws, run, whole, taken_s)
            reported["runs"].append(case)
            summed(reported)
            reported["cpu_s"] = round(cpu_before_s + cpu_s())
            write_result(asked.output, reported)
            print(json.dumps(case), flush=True)
            if (case["differs"] or case["ended"] != "done") and (keep := os.environ.get("KEEP")):
                shutil.copytree(run, Path(keep) / str(len(reported["runs"])), dirs_exist_ok=True)
    if reported["runs_that_differ"]:
        raise SystemExit("not the same")


if __name__ == "__main__":
    main()
