"""Where the time of a step goes: the kernels that take most of it, and how long the device waits."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from first_light.bench import Bench
from first_light.stages.speed import speed_plan

TOP = 30


def kernels(bench: Bench, size: str, tokens: int, overrides: list[str]) -> dict[str, Any]:
    """One step after two; kernels by their time, their number, and the share of time without any."""
    from memtrain.trainers.build.bare_steps import Stepper
    from memtrain.trainers.build.components import build
    from memtrain.trainers.build.engine import make_accelerator

    planned = speed_plan(bench, size, tokens, overrides)
    make_accelerator(planned.plan.settings)
    stepper = Stepper(planned.plan, build(planned.plan))
    for number in range(2):
        stepper.step(number)
    kind = torch.profiler.ProfilerActivity.CUDA if bench.device.is_cuda else None
    activities = [torch.profiler.ProfilerActivity.CPU] if kind is None else [kind]
    bench.device.wait()
    began = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profile:
        stepped = stepper.step(2)
        bench.device.wait()
    wall_s = time.perf_counter() - began
    found = reported(profile.events() or [], on_device=bench.device.is_cuda)
    num_micro_batches = max(1, len(stepper.work(2).micro_batches))
    busy = found["busy_s"]
    idle = 1 - busy / stepped.seconds if bench.device.is_cuda else None
    waited = "" if idle is None else f", the GPU waited {idle:.0%} of the step"
    return {
        "words": f"{found['count'] / num_micro_batches:,.0f} kernels a micro-batch{waited}",
        "kernels_per_micro_batch": found["count"] / num_micro_batches,
        "idle_share": idle,
        "step_s": stepped.seconds,
        "wall_s": wall_s,
        **found,
    }


def reported(events: Iterable[Any], *, on_device: bool) -> dict[str, Any]:
    """Kernels by name with their time, how many there are, and the time in which any runs."""
    from torch.autograd import DeviceType

    spans: list[tuple[float, float]] = []
    spent: dict[str, list[float]] = {}
    for event in events:
        if on_device and (event.device_type != DeviceType.CUDA or event.is_user_annotation):
            continue
        spans.append((event.time_range.start, event.time_range.end))
        of = spent.setdefault(event.name, [0.0, 0.0])
        of[0] += event.time_range.end - event.time_range.start
        of[1] += 1
    top = sorted(spent.items(), key=lambda one: -one[1][0])[:TOP]
    return {
        "count": len(spans),
        "busy_s": covered(spans) * 1e-6,
        "top": [{"name": name[:160], "seconds": of[0] * 1e-6, "count": int(of[1])} for name, of in top],
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of all spans together, where they lie over one another once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
