"""How far the trace is from the real allocator and the arithmetic from the trace: tables of docs/memory.md.

    python benchmarks/memory_tables.py    writes benchmarks/results/memory_tables.json and the tables

Interrupted, and started again at the same commit, it goes on from the rows it has; `--page` writes the tables
from the results that are there. What no CPU can hold (kernels of bitsandbytes, a second device) is played:
see trainers/tools/trace/bitsandbytes.py and ranks.py.

Every recipe of tests/trainers/trace_cases.py: its steps on the CPU under torch's profiler, a trace of the
same steps on tensors without data, and the arithmetic. The row of a GPU is that of
`make bench-gpu`, where its summary is among the results.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from result_files import write_result

from memtrain.trainers.tools.trace.client import uses_liger
from memtrain.trainers.tools.trace.trace import trace

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "trainers"))
RESULTS = ROOT / "benchmarks" / "results" / "memory_tables.json"
GPU_RESULTS = RESULTS.with_name("gpu.json")
PART = RESULTS.with_suffix(".part.json")
"""The rows of a run that is under way."""
GROUPS = ("strategies", "methods", "ranks", "architectures", "ZeRO", "Liger")
PAGE = ROOT / "docs" / "memory.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
COMMAND = "python benchmarks/memory_tables.py"


def row(name: str, case: Any, group: str) -> dict[str, Any]:
    """Peaks of one recipe in bytes, and the seconds of its trace."""
    from trace_cases import on_a_cpu, real_peak

    job = case.job
    started = time.process_time()
    with on_a_cpu(job):
        traced = trace(job).recorder.peak_bytes
        seconds = time.process_time() - started
        real = real_peak(job)
    priced = traced
    if job.settings.offload != "none" or uses_liger(job.settings):
        # On a CPU what travels stays in the same memory: the arithmetic is of a GPU, as is its trace.
        attention = "transformers" if job.settings.attention == "transformers" else "torch_varlen"
        case = replace(case, changes=case.changes | {"device": "cuda", "attention": attention})
        priced = trace(case.job).recorder.peak_bytes
    return {
        "recipe": name,
        "group": group,
        "model": case.config["model_type"],
        "real_bytes": real,
        "traced_bytes": traced,
        "arithmetic_error": case.estimated().peak.num_bytes / priced - 1,
        "seconds": round(seconds, 2),
    }


def main() -> int:
    from trace_cases import ARCHITECTURES, LIGER, METHODS, RANKS, STRATEGIES, ZERO, has_liger

    torch.set_num_threads(1)
    made = begun()
    rows: list[dict[str, Any]] = made["rows"]
    known = {(one["group"], one["recipe"]) for one in rows}
    zero = ZERO if find_spec("deepspeed") else {}
    everything = (STRATEGIES, METHODS, RANKS, ARCHITECTURES, zero, LIGER if has_liger() else {})
    for group, cases in zip(GROUPS, everything, strict=True):
        for name, case in cases.items():
            if (group, name) in known:
                continue
            rows.append(row(name, case, group))
            PART.write_text(json.dumps(made) + "\n")
            print(rows[-1], flush=True)
    write_result(RESULTS, made)
    write_page(made)
    PART.unlink(missing_ok=True)
    return 0


def begun() -> dict[str, Any]:
    """Results without rows, or those that an interrupted run at this commit has left."""
    fresh = {"made": time.strftime("%Y-%m-%d"), "commit": commit(), "torch": torch.__version__}
    if PART.is_file():
        left = json.loads(PART.read_text())
        if {name: left[name] for name in ("commit", "torch")}.items() <= fresh.items():
            return left
    return fresh | {"rows": []}


def commit() -> str:
    """The commit that is checked out."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write_page(made: dict[str, Any]) -> None:
    """Put the tables between the markers of the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(made)}\n{END}{after}")


def tables(made: dict[str, Any]) -> str:
    """Errors by group, then recipe by recipe, as Markdown."""
    rows: list[dict[str, Any]] = made["rows"]
    lines = [
        f"`{COMMAND}` at commit {made['commit']}, {made['made']}, torch {made['torch']}; two layers each.",
        "",
        "| | recipes | trace to real CPU allocator: median, worst | arithmetic to trace: mean, worst |",
        "|---|---|---|---|",
    ]
    groups = [(name, [one for one in rows if one["group"] == name]) for name in GROUPS]
    groups = [(name, some) for name, some in groups if some]
    for name, some in [*groups, ("all", rows)]:
        real = [abs(error_of(one)) for one in some]
        reported = [abs(one["arithmetic_error"]) for one in some]
        lines.append(
            f"| {name} | {len(some)} | {statistics.median(real):.3%}, {max(real):.2%} "
            f"| {statistics.mean(reported):.1%}, {max(reported):.1%} |"
        )
    lines += [
        gpu_row(),
        "",
        "| recipe | model | real MiB | trace | arithmetic |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['recipe']} | {one['model']} | {one['real_bytes'] / 2**20:.2f} | {error_of(one):+.3%} "
        f"| {one['arithmetic_error']:+.1%} |"
        for one in rows
    ]
    return "\n".join(lines)


def gpu_row() -> str:
    """The plans that the ladder of `make bench-gpu` measured, from its committed summary."""
    if not GPU_RESULTS.is_file():
        return "| `max_memory_allocated` on a GPU | | not measured | not measured |"
    found = json.loads(GPU_RESULTS.read_text())
    trace, plan = (
        f"{one['median_error']:.1%} (median), {abs(one['worst_error']):.1%}"
        if one["count"]
        else "not measured"
        for one in (found["trace"], found["plan"])
    )
    name = f"`max_memory_allocated`, {found['where']['device']}"
    return f"| {name} | {found['plan']['count']} | {trace} | the plan to what was measured: {plan} |"


def error_of(one: dict[str, Any]) -> float:
    """How far the trace is from what was measured."""
    return one["traced_bytes"] / one["real_bytes"] - 1


if __name__ == "__main__":
    if "--page" in sys.argv:
        write_page(json.loads(RESULTS.read_text()))
        sys.exit(0)
    sys.exit(main())
