"""The summary of all results: the planner's error, false fits, what is broken, what is left."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from first_light.ladder import TIMED, Stage
from first_light.published import beside

Record = Mapping[str, Any]
CLOSE = 0.03
"""The planner's error above which a row must be explained."""
TIMES = ("planned_step_s", "step_s")


def summary(found: Mapping[str, Record], wanted: Sequence[Stage], where: Mapping[str, Any]) -> dict[str, Any]:
    """All that the page shows, as JSON values."""
    measured = list(plans(found))
    errors = [one["planned_error"] for _, one in measured]
    traced = [traced_error(one) for _, one in measured]
    return {
        "where": dict(where),
        "stages": len(wanted),
        "done": sum(stage.name in found for stage in wanted),
        "faults": {name: one["fault"] for name, one in found.items() if "fault" in one},
        "refused": {name: one["refused"] for name, one in found.items() if "refused" in one},
        "skipped": {name: one["skipped"] for name, one in found.items() if "skipped" in one},
        "plan": spread(errors) | {"false_fits": [n for n, one in found.items() if one.get("is_false_fit")]},
        "trace": spread([one for one in traced if one is not None]),
        "time": spread([error for _, one in measured if (error := time_error(one)) is not None]),
        "misses": {name: one["planned_error"] for name, one in measured if abs(one["planned_error"]) > CLOSE},
        "not_bit_for_bit": [
            name for name, one in found.items() if name.startswith("bit for bit") and not one.get("is_equal")
        ],
        "losses_apart": [
            f"{name}: {column}"
            for name, one in found.items()
            for column, told in one.get("columns", {}).items()
            if not told.get("losses_agree", True)
        ],
        "speed": {
            name: {key: one.get(key) for key in (*_times(one), "peak_bytes", "planned_error")}
            | {"time_error": time_error(one)}
            | {"published": [asdict(record) for record in beside(name)]}
            for name, one in measured
            if not name.startswith("grid/")
        },
        "shared": [name for name, one in found.items() if one.get("shared")],
        "words": {name: said_of(name, one) for name, one in found.items() if one.get("words")},
    }


def said_of(name: str, one: Record) -> str:
    """The words of a result; none of its own where its question is one of time, and others used the card."""
    if one.get("shared") and name.partition("/")[0] in TIMED:
        return "made beside other processes: its times say nothing"
    return str(one.get("words", ""))


def _times(one: Record) -> tuple[str, ...]:
    return () if one.get("shared") else ("tokens_per_s", "mfu", *TIMES)


def plans(found: Mapping[str, Record]) -> Iterator[tuple[str, Record]]:
    """(name, result) of every plan that was measured, those inside of a stage too."""
    for name, one in found.items():
        if one.get("peak_bytes") and "planned_error" in one:
            yield name, one
        for part, inner in one.items():
            if isinstance(inner, Mapping) and inner.get("peak_bytes") and "planned_error" in inner:
                yield f"{name}: {part}", inner


def traced_error(one: Record) -> float | None:
    """Of the trace's peak over the measured one, less 1; None without a trace."""
    found = one.get("traced", {}).get("traced_bytes")
    return None if found is None else found / one["peak_bytes"] - 1


def time_error(one: Record) -> float | None:
    """Of the planned step's seconds over the measured ones, less 1; None where they were not taken, or other
    processes used the card."""
    if not one.get("step_s") or one.get("shared"):
        return None
    return one["planned_step_s"] / one["step_s"] - 1


def spread(errors: Sequence[float]) -> dict[str, Any]:
    """Number, median, 95th percentile and worst of the sizes of some errors."""
    sizes = sorted(abs(error) for error in errors)
    return {
        "count": len(sizes),
        "median_error": statistics.median(sizes) if sizes else None,
        "p95_error": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))] if sizes else None,
        "worst_error": max(errors, key=abs) if errors else None,
    }
