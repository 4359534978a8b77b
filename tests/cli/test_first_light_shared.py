"""The ladder beside other processes on the card: what it may still say, and what a card of less memory is."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from first_light.bench import Bench, Planned
from first_light.device import CONTEXT_BYTES, GIB, Device, has_neighbours
from first_light.ladder import chosen, stages
from first_light.page import page
from first_light.stages import steps
from first_light.summary import summary
from first_light.worker import answered

from memtrain.memory.hardware import devices as hardware
from memtrain.trainers.tools import bench as tools
from memtrain.trainers.tools.bench import Benched

ROOT = Path(__file__).parents[2]
SAID = {
    "speed/0.6B full 8k": {"words": "30,000 tokens/s", "tokens_per_s": 3e4, "mfu": 0.4},
    "24 GiB/0.6B full": {"words": "peak 20.00 GiB"},
}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A card of 80 GiB of which others use 30, and this process a context and 2; fractions that were set."""
    fractions: list[float] = []
    taken = 32 * GIB + CONTEXT_BYTES
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * GIB - taken, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    return fractions


def test_a_card_of_24_gib_leaves_the_allocator_what_this_process_does_not_take(card: list[float]):
    """30 GiB of others are not of the 24: the fraction was below zero."""
    with Device(stand_in=False, is_shared=True).no_more_than(24 * GIB):
        pass
    assert card == [pytest.approx((24 * GIB - CONTEXT_BYTES) / (80 * GIB)), 1.0]


def test_alone_the_context_is_what_the_driver_says(card: list[float], monkeypatch: pytest.MonkeyPatch):
    """3 GiB taken, 2 of them by the allocator."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (77 * GIB, 80 * GIB))
    with Device(stand_in=False).no_more_than(24 * GIB):
        pass
    assert card[0] == pytest.approx(23 / 80)


@pytest.mark.parametrize(
    ("free_gib", "is_shared"),
    [([79.5], False), ([50], True), ([50, 79.5], False)],
    ids=["alone", "beside", "ended"],
)
def test_neighbours_are_seen_before_this_process_takes_anything(
    free_gib: list[float], is_shared: bool, monkeypatch: pytest.MonkeyPatch
):
    """A process that was ended just now is none: its memory goes a moment later."""
    left = list(free_gib)

    def detect(kind: str) -> SimpleNamespace:
        free = left.pop(0) if len(left) > 1 else left[0]
        return SimpleNamespace(device="cuda", memory_bytes=80 * GIB, free_bytes=int(free * GIB))

    monkeypatch.setattr(hardware, "detect", detect)
    assert has_neighbours(patience_s=0.05) == is_shared


@pytest.mark.parametrize("is_shared", [False, True])
def test_steps_on_a_shared_card_tell_peaks_and_no_times(
    is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = Benched(100, 110, 0, 10, 2.0, (1.0,), (1, 2, 3, 4))
    monkeypatch.setattr(tools, "bench", lambda plan, count: made)
    monkeypatch.setattr(steps, "operations_of", lambda planned: SimpleNamespace(a_token=1e9))
    monkeypatch.setattr(Bench, "trace_job", lambda self, planned: None)
    monkeypatch.setattr("memtrain.cli.measure.variants.predicted_of", lambda variant, heaviest: 99)
    monkeypatch.setattr("memtrain.memory.strategies.registry.used_in", lambda settings: [])
    settings = SimpleNamespace(
        offload="none", weights_offload=False, optimizer_offload=False, model_dump=lambda mode: {}
    )
    plan = SimpleNamespace(settings=settings, recipe=SimpleNamespace(method="sft"))
    facts = SimpleNamespace(hardware=SimpleNamespace(name="NVIDIA H100"))
    bench = Bench(tmp_path, stand_in=True, is_shared=is_shared)
    found = steps.measured_steps(bench, Planned(plan, facts, SimpleNamespace(predicted_step_s=1.0)), 2)
    times = {"step_s", "tokens_per_s", "mfu", "driver_bytes", "beside_bytes"}
    assert found.keys() & times == (set() if is_shared else times)
    assert "plan -1.0%" in found["words"]
    assert ("tokens/s" in found["words"]) is not is_shared
    assert found["peak_bytes"] == 100


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_result_says_that_others_used_the_card_and_its_times_are_told_nowhere(
    is_shared: bool, tmp_path: Path
):
    mark: dict[str, Any] = {"shared": True} if is_shared else {}
    bench: Any = SimpleNamespace(device=SimpleNamespace(is_shared=is_shared), stage="")
    asked = {"stage": "a", "run": "machine:allocator", "given": {"no": 1}}
    assert answered(bench, asked).get("shared", False) is is_shared
    found = {name: one | {"peak_bytes": 1, "planned_error": 0.0} | mark for name, one in SAID.items()}
    summed = summary(found, stages(), {"device": "none"})
    assert summed["shared"] == (list(SAID) if is_shared else [])
    told = json.dumps(summed["words"]) + json.dumps(
        [one.get("tokens_per_s") for one in summed["speed"].values()]
    )
    written = re.sub(r"prime-rl.*", "", page(found, summed))
    for text in (told.replace("30000.0", "30,000"), written):
        assert ("30,000" in text) is not is_shared
        assert "peak 20.00 GiB" in text


def test_what_is_timed_is_left_out_on_a_shared_card(capsys: pytest.CaptureFixture[str]):
    words = ["speed/", "grid/", "decoding", "TRL", "24 GiB/"]
    shared = chosen(words, is_shared=True)
    assert {one.group for one in shared} == {"grid", "24 GiB"}
    assert "speed/0.6B full 8k: left to a call that has the card alone" in capsys.readouterr().out
    alone = chosen(words, is_shared=False)
    assert {one.group for one in alone} == {"speed", "grid", "decoding", "TRL", "24 GiB"}


def test_groups_of_the_short_ladder_are_shared_and_what_follows_them_is_not(tmp_path: Path):
    """A python that writes down what it was given, in place of the ladder."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    script = ROOT / "benchmarks" / "gpu_short.sh"
    words = [str(script), str(tmp_path / "out"), "60", "grid/sft,grid/kto", "24 GiB", "--", "speed/0.6B full"]
    subprocess.run(["bash", *words], env={"PYTHON": str(program), "PATH": "/usr/bin:/bin"}, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    marked = {call.partition("--only ")[2]: "--shared" in call for call in calls}
    assert marked == {
        "machine": False,
        "grid/sft grid/kto --shared": True,
        "24 GiB --shared": True,
        "speed/0.6B full": False,
    }
