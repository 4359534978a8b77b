"""Launches that a run measures at its start: kept for the machine's plans, and never of a stand-in."""

from dataclasses import replace

import pytest
import torch

from memtrain.memory.hardware import devices
from memtrain.memory.hardware.calibration import (
    VARIABLE,
    Launches,
    launches_file,
    launches_of,
    remember_launches,
)
from memtrain.memory.hardware.devices import Hardware
from memtrain.trainers.runtime.launch_time import measure_launches


@pytest.fixture
def store(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def test_a_cpu_measures_nothing_and_keeps_nothing(store):
    assert measure_launches(torch.device("cpu")) is None
    assert list(store.iterdir()) == []


def test_plans_of_the_machine_take_the_measured_launch(store, monkeypatch: pytest.MonkeyPatch):
    """With `memtrain calibrate` and without; a named card keeps the usual one."""
    card = replace(Hardware.named("h100"), name="NVIDIA H100 80GB HBM3")
    assert devices._calibrated(card).rates.launch_s == 6e-6
    remember_launches(Launches(device=card.name, made="2026-11-28", launch_s=11e-6))
    found = devices._calibrated(card)
    assert found.rates == replace(card.rates, launch_s=11e-6)
    assert found.measured is None
    assert Hardware.named("h100").rates.launch_s == 6e-6


@pytest.mark.parametrize("text", ["", "{", '{"device": "x"}', '{"launch_s": "soon"}'])
def test_a_file_that_is_none_is_not_read(store, text: str):
    launches_file("x").write_text(text)
    assert launches_of("x") is None
