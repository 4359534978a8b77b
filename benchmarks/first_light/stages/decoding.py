"""The native sampler: milliseconds a token and kernels a token, captured as a run has it, and by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from first_light.bench import Bench

COUNT = 4
"""Completions of a prompt."""


def per_token(bench: Bench, size: str, rows: int) -> dict[str, Any]:
    """Completions of 128 tokens, `rows` at a time, none of which ends early.

    On a stand-in, which has no CUDA graphs, a tape of operators plays them.
    """
    from memtrain.trainers.build.components import build
    from memtrain.trainers.build.engine import make_accelerator
    from memtrain.trainers.online.generation.backend import build_sampler
    from memtrain.trainers.online.generation.decode_graphs import DecodeGraphs
    from memtrain.trainers.runtime.cuda_graphs import CudaGraphs
    from memtrain.trainers.runtime.operator_tape import OperatorTape

    rows = max(COUNT, rows // 8) if bench.stand_in else rows
    prompt = bench.tokens(256)
    overrides = ["generate.backend=native", "generate.num_generations=4"]
    path, words = bench.recipe("grpo", size, tokens=2 * prompt, overrides=overrides, batch=rows, count=rows)
    planned = bench.plan(path, words)
    make_accelerator(planned.plan.settings)
    built = build(planned.plan)
    told: list[str] = []
    captures = planned.plan.settings.cuda_graphs or bench.stand_in
    graphs = DecodeGraphs(OperatorTape if bench.stand_in else CudaGraphs, told.append) if captures else None
    ways = {"captured": graphs, "by hand": None} if captures else {"by hand": None}
    made: dict[str, Any] = {}
    for name, of in ways.items():
        sampler = build_sampler(planned.plan, built, max_rows=rows, graphs=of)
        made[name] = _measured(bench, sampler, planned, built, rows)
        if of is not None and not of.is_on:
            made["not captured"] = made.pop(name)
    said = [f"{1e3 * one['s_per_token']:.2f} ms a token {name}" for name, one in made.items()]
    first = next(iter(made.values()))
    return {
        "words": f"{', '.join(said)}, {first['tokens_per_s']:,.0f} tokens/s, "
        f"{first['kernels_per_token']:,.0f} kernels a token",
        "rows": rows,
        "ways": made,
        "told": told,
    }


def _measured(bench: Bench, sampler: Any, planned: Any, built: Any, rows: int) -> dict[str, Any]:
    """Time and kernels a token, beside the first ones, which read the prompts."""
    from memtrain.trainers.online.generation.backend import sampling_of
    from memtrain.trainers.online.generation.protocol import Group

    tokens, prompt = bench.tokens(128), bench.tokens(256)
    ids = [tuple(range(2 + number, 2 + number + prompt)) for number in range(rows // COUNT)]
    groups = [Group(tuple(one % 64 for one in row), COUNT, seed=number) for number, row in enumerate(ids)]

    def write(count: int) -> float:
        sampling = replace(sampling_of(planned.plan, built), max_tokens=count, stop_ids=(), stop_strings=())
        bench.device.wait()
        began = time.perf_counter()
        sampler.generate(groups, sampling)
        bench.device.wait()
        return time.perf_counter() - began

    write(16)
    few, many = write(tokens // 4), write(tokens)
    per_token_s = (many - few) / (tokens - tokens // 4)
    kernels = _kernels(bench, lambda: write(18)) - _kernels(bench, lambda: write(10))
    return {
        "s_per_token": per_token_s,
        "tokens_per_s": rows / per_token_s,
        "kernels_per_token": kernels / 8,
        "peak_bytes": torch.cuda.max_memory_allocated() if bench.device.is_cuda else 0,
    }


def _kernels(bench: Bench, work: Any) -> int:
    """Kernels that `work` launches (a graph's count each); operators on a stand-in."""
    from torch.autograd import DeviceType

    cuda = bench.device.is_cuda
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profile:
        work()
    events = profile.events() or []
    if not cuda:
        return len(events)
    return sum(one.device_type == DeviceType.CUDA and not one.is_user_annotation for one in events)
