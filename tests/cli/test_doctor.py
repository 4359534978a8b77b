"""`memtrain doctor` on a machine without a GPU: what runs here works, what is broken is said, and the exit
code."""

import json
from importlib.metadata import PackageNotFoundError

import pytest
import torch

import memtrain
from memtrain.cli.app import run
from memtrain.memory.hardware import devices as hardware
from memtrain.trainers.model.attention.probe import Outcome
from memtrain.trainers.tools import doctor
from memtrain.trainers.tools.doctor import Finding, run_check


def test_it_runs_what_can_run_here(capsys: pytest.CaptureFixture[str]):
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert found["versions"]["memtrain"] == memtrain.__version__
    outcomes = {(one["area"], one["name"]): one["outcome"] for one in found["findings"]}
    assert outcomes["attention", "torch_cpu"] == "works"
    assert outcomes["attention", "masked"] == "works"
    assert outcomes["quantization", "4bit"] == "not here"


def test_its_own_version_is_known_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    versions = doctor.examine().versions
    assert (versions["memtrain"], versions["torch"]) == (memtrain.__version__, "")


def test_it_reads_as_a_table_of_eighty_columns(capsys: pytest.CaptureFixture[str]):
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "transformers" in out
    assert max(map(len, out.splitlines())) <= 80


def test_something_broken_is_named_and_the_exit_code_is_one(monkeypatch, capsys: pytest.CaptureFixture[str]):
    broken = Finding("kernels", "liger", Outcome.BROKEN, "ImportError: no such symbol")
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Examination({}, (broken,)))
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "ImportError: no such symbol" in out
    assert "Broken here: kernels liger" in out


def test_a_package_that_is_installed_and_cannot_be_imported_is_broken(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import a_library_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    found = run_check("kernels", "x", "half_installed", lambda device: "", "cpu")
    assert found.outcome is Outcome.BROKEN
    assert "No module named 'a_library_that_is_missing'" in found.words
    assert (
        run_check("kernels", "x", "not_installed_at_all", lambda device: "", "cpu").outcome
        is Outcome.NOT_HERE
    )


def test_a_part_that_computes_nonsense_is_broken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = run_check("kernels", "x", "json", lambda device: doctor._held(0.5, 0.1), "cuda")
    assert found == Finding(
        "kernels", "x", Outcome.BROKEN, "ValueError: off by 5.0e-01, where 1e-01 would be right"
    )


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor._device(hardware.Hardware.named("h100"))
    assert found.outcome is Outcome.BROKEN
    assert "torch" in found.words
