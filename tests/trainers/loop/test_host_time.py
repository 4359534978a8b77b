"""Host time: one step is looked at, once it is settled, and what lies in several operators counts once."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from memtrain.trainers.loop import observers as host_time
from memtrain.trainers.loop.observers import SETTLED_STEPS, HostTime, _spans, covered


def test_time_in_several_operators_counts_once():
    """[0, 4) and [2, 6) overlap, [3, 4) lies inside, [10, 11) stands alone: 6 + 1."""
    assert covered([(2, 6), (0, 4), (10, 11), (3, 4)]) == 7
    assert covered([]) == 0


def event(name: str, start: int, end: int, kind: DeviceType, is_named: bool = False) -> SimpleNamespace:
    facts = {"name": name, "start_ns": start, "duration_ns": end - start, "device_type": kind}
    facts["is_user_annotation"] = is_named
    return SimpleNamespace(**{key: lambda value=value: value for key, value in facts.items()})


def test_a_named_part_of_the_program_is_no_work_of_the_gpu():
    """`Optimizer.step#AdamW.step` lies over the kernels that it starts and the pauses between them."""
    events = [
        event("Optimizer.step#AdamW.step", 0, 100, DeviceType.CUDA, is_named=True),
        event("multi_tensor_apply_kernel", 10, 30, DeviceType.CUDA),
        event("Memcpy DtoH", 60, 70, DeviceType.CUDA),
        event("aten::mm", 0, 90, DeviceType.CPU),
    ]
    results = SimpleNamespace(events=lambda: events)
    seen = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    assert list(_spans(seen, DeviceType.CUDA)) == [(10, 30), (60, 70)]
    assert list(_spans(seen, DeviceType.CPU)) == [(0, 90)]


def on_a_cpu(reported: list, settled_cpu_s: float = 0.0) -> HostTime:
    """A watch that adds what it tells to `reported`."""
    return HostTime(torch.device("cpu"), lambda *told: reported.append(told), settled_cpu_s=settled_cpu_s)


def work(watch: HostTime, steps: int) -> None:
    ones = torch.ones(64, 64)
    for _ in range(steps):
        with watch.step():
            for part in range(3):
                if part == 2:
                    watch.last_part(3)
                for _ in range(20):
                    ones @ ones


def test_one_step_is_looked_at_when_the_run_has_settled():
    reported = []
    watch = on_a_cpu(reported)
    work(watch, SETTLED_STEPS)
    assert reported == []
    work(watch, 3)
    ((share, seconds, num_parts),) = reported
    assert 0 < share < 1
    assert seconds > 0
    assert num_parts == 3


def test_a_look_waits_until_it_is_cheap_beside_the_steps_before_it(monkeypatch):
    """A step takes a second by the clock, and ten pass between steps, which are no step's: five seconds of
    steps are over as the sixth begins."""
    reported, clock = [], count(0.0, 0.5)
    monkeypatch.setattr(host_time.time, "perf_counter", lambda: next(clock) + 10 * step)
    watch = on_a_cpu(reported, settled_cpu_s=host_time.SETTLED_CPU_S)
    for step in range(8):
        work(watch, 1)
        assert len(reported) == (step >= 5), step


def test_a_step_whose_operators_are_watched_one_by_one_is_passed_over():
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    reported = []
    watch = on_a_cpu(reported)
    with Watching():
        work(watch, SETTLED_STEPS + 2)
    assert reported == []
    work(watch, 1)
    assert len(reported) == 1


def test_an_error_in_the_step_comes_through():
    watch = on_a_cpu([])
    work(watch, SETTLED_STEPS)
    for has_begun in (False, True):
        with pytest.raises(ZeroDivisionError), watch.step():
            _ = watch.last_part(1) if has_begun else None, 1 / 0


def test_only_the_last_micro_batch_is_recorded(monkeypatch):
    """Each has 20 products; one that is tried again, because memory ran out in it, is recorded anew."""
    recorded = []
    monkeypatch.setattr(host_time, "_spans", lambda seen, kind: recorded.extend(products_in(seen)) or [])
    reported = []
    watch = on_a_cpu(reported)
    work(watch, SETTLED_STEPS + 1)
    assert len(recorded) == 20
    watch = on_a_cpu(reported)
    work(watch, SETTLED_STEPS)
    recorded.clear()
    ones = torch.ones(64, 64)
    with watch.step():
        for _ in range(2):
            watch.last_part(1)
            ones @ ones
    assert len(recorded) == 1


def products_in(seen):
    return [event for event in seen.profiler.kineto_results.events() if event.name() == "aten::mm"]


def test_no_object_is_made_of_each_operator(monkeypatch, recwarn):
    """It takes longer than the step that is looked at; and torch says nothing of cycles."""

    def parsed(profiler, results):
        raise AssertionError("every event of the step is made an object")

    monkeypatch.setattr(torch.autograd.profiler.profile, "_parse_kineto_results", parsed)
    reported = []
    work(on_a_cpu(reported), SETTLED_STEPS + 1)
    assert len(reported) == 1
    assert not recwarn.list
