"""The store of what was measured here: kept whole, read under the same versions, never needed."""

from dataclasses import replace

import pytest

from memtrain.memory.estimate.static import measured_beside, needed, overhead
from memtrain.memory.hardware import calibration
from memtrain.memory.hardware.calibration import Measured, measured_of, remember
from memtrain.memory.hardware.devices import _calibrated, cpu
from memtrain.memory.hardware.peak_history import (
    BOUND,
    EMPTY,
    KIND,
    History,
    kind_of_run,
    note_run,
    read_history,
)
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.plan import Owned, PhasePeak, Prediction
from memtrain.memory.plan.settings import Mark, Settings
from memtrain.memory.plan.units import GIB, MIB

SHAPE = shape_of(
    {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
)
FOUND = Measured(
    device="NVIDIA Fast 9000",
    made="2026-11-21",
    versions={},
    beside_bytes=700 * MIB,
    communication_bytes=100 * MIB,
    half_matmul_per_s=5e14,
    single_matmul_per_s=5e13,
    bytes_per_s=2e12,
    host_bytes_per_s=4e10,
    launch_s=5e-6,
    granularity_bytes=512,
)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMTRAIN_CALIBRATION", str(tmp_path))
    return tmp_path


def test_what_was_measured_is_found_again(store):
    assert measured_of(FOUND.device) is None
    file = remember(FOUND)
    assert file is not None
    assert file.name.startswith("device-nvidia-fast-9000-")
    assert measured_of(FOUND.device) == FOUND
    assert [path.name for path in store.iterdir()] == [file.name], "nothing half-written is left"


def test_another_version_of_torch_is_another_key(store, monkeypatch):
    remember(FOUND)
    monkeypatch.setattr(calibration, "version", lambda name: "99.0")
    assert measured_of(FOUND.device) is None


def test_a_broken_store_is_as_good_as_none(store):
    file = remember(FOUND)
    assert file is not None
    file.write_text("{")
    (store / "runs.json").write_text("[1]")
    assert measured_of(FOUND.device) is None
    assert read_history() == EMPTY


def test_a_store_that_is_off_keeps_nothing(monkeypatch):
    monkeypatch.setenv("MEMTRAIN_CALIBRATION", "off")
    assert remember(FOUND) is None
    note_run("kind", predicted_bytes=100, measured_bytes=110, had_preflight=True)
    assert read_history() == EMPTY


def test_this_machine_takes_the_rates_that_were_measured_on_it(store):
    """Those of a CPU are of one core: four cores make four times as many products."""
    machine = cpu(8 * GIB, 4)
    assert _calibrated(machine) == machine
    remember(FOUND.model_copy(update={"device": "CPU"}))
    found = _calibrated(machine)
    assert found.measured is not None
    assert (found.rates.half_matmul_per_s, found.rates.bytes_per_s) == (4 * 5e14, 2e12)


def test_measured_overheads_replace_typical_ones(make_settings):
    settings = make_settings(device="cuda", num_processes=2)
    assert measured_beside(settings, None) is None
    beside = measured_beside(settings, FOUND)
    assert beside == 800 * MIB
    known = settings.model_copy(update={"beside_bytes": beside})
    assert overhead(known).fixed == beside
    assert needed(0, known) == beside


def test_a_prediction_is_corrected_by_the_run_that_needed_most(store):
    for measured in (1020, 1050, 990):
        note_run("kind", predicted_bytes=1000, measured_bytes=measured, had_preflight=True)
    assert read_history().correction("kind", 2000) == 100
    assert read_history().correction("another", 2000) == 0


def test_a_correction_is_bounded_both_ways():
    history = History({"up": (3.0,), "down": (0.2,)})
    assert history.correction("up", 1000) == round(1000 * BOUND)
    assert history.correction("down", 1000) == -round(1000 * BOUND)


def test_a_run_that_did_not_rehearse_never_lowers_a_prediction(store):
    note_run("kind", predicted_bytes=1000, measured_bytes=900, had_preflight=False)
    assert read_history() == EMPTY
    note_run("kind", predicted_bytes=1000, measured_bytes=900, had_preflight=True)
    assert read_history().correction("kind", 1000) == -100


def test_the_last_five_runs_of_a_kind_are_remembered(store):
    for number in range(7):
        note_run("kind", predicted_bytes=100, measured_bytes=100 + number, had_preflight=True)
    assert len(read_history().ratios["kind"]) == 5


def test_the_kind_of_a_run_is_its_strategies_and_not_its_size(make_settings):
    settings = make_settings()
    kind = kind_of_run(settings, SHAPE, "sft")
    assert kind_of_run(settings.model_copy(update={"micro_batch_size": 99}), SHAPE, "sft") == kind
    assert kind_of_run(settings.model_copy(update={"checkpoint_every": 0}), SHAPE, "sft") != kind
    assert kind_of_run(settings, replace(SHAPE, width=2 * SHAPE.width), "sft") != kind
    assert kind_of_run(settings, SHAPE, "dpo") != kind


def test_every_setting_has_one_mark():
    """It says where the setting stands whether runs that differ in it correct one another, and may go on."""
    marks = {
        name: sum(isinstance(one, Mark) for one in field.metadata)
        for name, field in Settings.model_fields.items()
    }
    assert set(marks.values()) == {1}
    assert set(KIND) < set(Settings.model_fields)


@pytest.mark.parametrize("name", KIND)
def test_runs_that_hold_other_tensors_do_not_correct_one_another(make_settings, name: str):
    settings = make_settings(num_processes=2, engine="fsdp2")
    other = settings.model_copy(update={name: "another"})
    assert kind_of_run(other, SHAPE, "sft") != kind_of_run(settings, SHAPE, "sft")


def test_a_correction_is_beside_the_peak_not_in_it():
    phase = PhasePeak(phase="steady step", num_bytes=10, owners=(Owned(owner="weights", num_bytes=10),))
    reported = Prediction(phases=(phase,), method="arithmetic", budget_bytes=None, correction_bytes=-3)
    assert (reported.peak.num_bytes, reported.corrected_bytes) == (10, 7)
