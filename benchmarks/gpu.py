"""What only a GPU can tell, in minutes: `make bench-gpu`, or `python benchmarks/gpu.py --out FOLDER`.

A ladder of stages (first_light/ladder.py) in the order in which they tell most: versions and the allocator,
probes, the tests marked gpu, engines that move bytes held bit for bit against none, speed with MFU, the
profiler, 8B, decoding, a card of 24 GiB, TRL on the same rows, shared prompts, the grid of the planner's
error, longest rows. Each stage's result is on disk before the next begins, and `--limit-s` ends the ladder
anywhere: the same command goes on. Models have real shapes and random weights, rows are generated: nothing
is downloaded. It runs from a tree that is not installed; wheels in .whl/ are taken (docs/offline.md).

FOLDER holds results.jsonl, log.txt, summary.json and page.html. `--stand-in` runs the whole ladder on a CPU
with tiny models: figures of such a rehearsal say nothing of a GPU, and its page says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from result_files import write_result

COMMAND = "make bench-gpu"
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MEMTRAIN_CALIBRATION": "off",
}
"""Of the processes of the ladder, where they are not given it already."""


def main() -> int:
    """Work the ladder down; exit code 0 when nothing is left, 4 when the same command goes on."""
    asked = arguments()
    measures = not asked.merge and asked.traces != "only"
    prepare_path(measures=measures)
    from first_light import results
    from first_light.ladder import chosen
    from first_light.page import page
    from first_light.summary import summary
    from first_light.supervise import MARGIN_S, Run, Worker, worker_command
    from first_light.traces import Tracers

    asked.out.mkdir(parents=True, exist_ok=True)
    work = asked.work or Path(tempfile.gettempdir()) / f"memtrain-first-light-{os.getuid()}"
    wanted = chosen(asked.only, is_shared=asked.shared)
    if asked.stand_in:
        # Limits are those of a GPU; a loaded CPU has more time for its tiny models.
        wanted = [replace(one, limit_s=10 * one.limit_s) for one in wanted]
    if asked.merge:
        results.merge(asked.merge, asked.out)
    where = measured_here(asked) if measures else results.where_of(results.read(asked.out))
    words = [*(["--stand-in"] if asked.stand_in else []), *(["--shared"] if asked.shared else [])]
    worker = Worker(worker_command(work, words), dict(os.environ), asked.out / "log.txt")
    tracers = Tracers(asked.out, work, waits=asked.traces == "later")
    tracers.go_on(results.read(asked.out))
    run = Run(asked.out, worker, asked.limit_s, traces=tracers.begin)
    try:
        left = run.down(wanted, where) if measures else []
    finally:
        worker.end()
    untraced = tracers.finish(run.left_s + MARGIN_S / 2)
    found = results.by_stage(results.read(asked.out))
    summed = summary(found, wanted, where)
    write_result(asked.out / "summary.json", summed)
    (asked.out / "page.html").write_text(page(found, summed))
    done = (
        end_words(len(left), len(wanted))
        if measures
        else f"{summed['done']} of {len(wanted)} stages are told"
    )
    traces = f"; {untraced} traces are left to the next call" if untraced else ""
    print(f"{done}{traces}. {asked.out / 'page.html'}", flush=True)
    # Traces that are left end with this process; their threads would be waited for.
    os._exit(4 if left else 0)


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("bench-gpu"), help="folder of the results")
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds after which nothing runs")
    parser.add_argument("--only", nargs="+", help="stages whose names contain one of these")
    parser.add_argument("--work", type=Path, help="folder for models and rows; else in /tmp")
    parser.add_argument(
        "--traces",
        choices=("now", "later", "only"),
        default="now",
        help="beside the stages; by a later call, on a machine without the GPU too; or only those that wait",
    )
    parser.add_argument(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="oldest first: nothing is measured, results in these become those of --out, and are traced",
    )
    parser.add_argument("--commit", default="", help="of a tree without git, written beside each result")
    parser.add_argument(
        "--shared", action="store_true", help="other processes use the card: nothing is timed"
    )
    parser.add_argument("--stand-in", action="store_true", help="a CPU with tiny models in place of the GPU")
    asked = parser.parse_args()
    asked.out, asked.work = asked.out.absolute(), asked.work and asked.work.absolute()
    asked.merge = [one.absolute() for one in asked.merge or ()]
    found = [path for one in asked.merge or [asked.out] for path in one.rglob("results.jsonl")]
    if not found and (asked.merge or asked.traces == "only"):
        parser.error(f"there are no results in {', '.join(map(str, asked.merge or [asked.out]))}")
    if any(asked.out.is_relative_to(one) for one in asked.merge):
        parser.error("--out lies in a folder that is merged: name another")
    return asked


def prepare_path(*, measures: bool) -> None:
    """Let this process and those that it starts find the tree, its benchmarks, and the packages in .whl/.

    Those are for the machine with the GPU: where results were brought to, they may be of another Python.
    """
    from first_light.wheels import are_for_this_python, site_of

    site = site_of(ROOT) if measures or are_for_this_python(ROOT) else None
    first = [str(ROOT), str(ROOT / "benchmarks"), *([str(site)] if site is not None else [])]
    rest = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one not in first]
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, *rest])
    sys.path[:0] = [one for one in first if one not in sys.path]
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def measured_here(asked: argparse.Namespace) -> dict[str, str]:
    """What stands beside each result of this call."""
    return {
        "device": device_words(stand_in=asked.stand_in),
        "commit": asked.commit or commit(),
        "date": today(),
        "command": COMMAND,
    }


def device_words(*, stand_in: bool) -> str:
    """The card, as the driver calls it."""
    if stand_in:
        return "a CPU standing in for a GPU (tiny models: no figure is one of a GPU)"
    from memtrain.memory.hardware.devices import detect

    hardware = detect("cuda")
    if hardware.device != "cuda":
        print("error: there is no CUDA GPU here\n  try: --stand-in rehearses the ladder", file=sys.stderr)
        sys.exit(5)
    return hardware.name


def commit() -> str:
    """Of the tree; empty where there is no git."""
    try:
        reported = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return reported.stdout.strip()


def today() -> str:
    """As 2026-11-22."""
    return time.strftime("%Y-%m-%d")


def end_words(left: int, wanted: int) -> str:
    """The last line of a call that measures."""
    return f"{left} of {wanted} stages are left: the same command goes on" if left else "all stages are done"


if __name__ == "__main__":
    sys.exit(main())
