"""Results of the ladder that were brought home: several folders as one, traced and told without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import memory_tables
import pytest
from first_light import results
from first_light.summary import summary

ROOT = Path(__file__).parents[2]
H100 = {"device": "NVIDIA H100", "command": "make bench-gpu"}


@pytest.fixture
def brought_home(tmp_path: Path) -> list[Path]:
    """Folders of two days; the first has two groups in folders of their own."""

    def write(folder: Path, commit: str, *records: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        where = {"where": H100 | {"commit": commit, "date": f"2026-11-2{commit}"}}
        for one in records:
            results.append(folder, one | (where if "stage" in one else {}))

    slow = {"stage": "speed/a", "tokens_per_s": 1.0, "words": "1 token/s, alone"}
    write(
        tmp_path / "one" / "alone",
        "1",
        slow,
        {"stage": "grid/b", "words": "old plan"},
        {"job_of": "grid/b", "job": {"old": 1}},
        {"trace_of": "grid/b", "traced_bytes": 7},
    )
    write(tmp_path / "one" / "beside", "1", slow | {"words": "shared", "shared": True})
    write(
        tmp_path / "two",
        "2",
        {"stage": "grid/b", "fault": "first try"},
        {"stage": "grid/b", "words": "new plan", "peak_bytes": 100, "planned_error": 0.01},
        {"stage": "speed/a", "fault": "out of memory"},
        {"stage": "grid/c", "fault": "out of memory"},
    )
    return [tmp_path / "one", tmp_path / "two"]


def test_of_each_stage_the_newest_result_without_a_fault_stays_with_its_own_trace(
    brought_home: list[Path], tmp_path: Path
):
    """The old plan's trace is not one of the new plan; a fault alone stays a fault."""
    results.merge(brought_home, tmp_path / "out")
    found = results.by_stage(results.read(tmp_path / "out"))
    assert found["speed/a"]["words"] == "1 token/s, alone"
    assert found["grid/b"]["words"] == "new plan"
    assert "traced" not in found["grid/b"]
    assert found["grid/c"]["fault"] == "out of memory"
    first = tmp_path / "first"
    results.merge(brought_home[:1], first)
    assert results.by_stage(results.read(first))["grid/b"]["traced"]["traced_bytes"] == 7
    assert {"job_of": "grid/b", "job": {"old": 1}} in results.read(first)


def test_where_is_that_of_the_newest_and_names_all_commits(brought_home: list[Path], tmp_path: Path):
    results.merge(brought_home, tmp_path / "out")
    where = results.where_of(results.read(tmp_path / "out"))
    assert (where["device"], where["date"], where["commit"]) == ("NVIDIA H100", "2026-11-22", "2")
    assert where["commits"] == ["1", "2"]


@pytest.mark.parametrize("merges", [True, False])
def test_a_machine_without_a_gpu_makes_summary_and_page_of_what_was_measured(
    merges: bool, brought_home: list[Path], tmp_path: Path
):
    """It was refused before: the name of the card was asked of the machine."""
    out = tmp_path / "out"
    words = ["--out", str(out if merges else brought_home[1])]
    words += ["--merge", *map(str, brought_home)] if merges else ["--traces", "only"]
    made = gpu(*words)
    assert made.returncode == 0, made.stderr
    folder = out if merges else brought_home[1]
    summed = json.loads((folder / "summary.json").read_text())
    assert summed["where"]["device"] == "NVIDIA H100"
    assert "new plan" in (folder / "page.html").read_text()
    assert "grid/c" in summed["faults"]
    assert "stages are told" in made.stdout
    assert "left" not in made.stdout, "Nothing goes on here."


def test_the_tables_of_memory_have_the_row_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the ladder's summary is among the results; two plans, one of them traced."""
    monkeypatch.setattr(memory_tables, "GPU_RESULTS", tmp_path / "gpu.json")
    assert "not measured" in memory_tables.gpu_row()
    measured = {"peak_bytes": 100, "words": ""}
    found = {
        "grid/a": measured | {"planned_error": 0.02, "traced": {"traced_bytes": 99}},
        "grid/b": measured | {"planned_error": -0.04},
    }
    (tmp_path / "gpu.json").write_text(json.dumps(summary(found, [], H100)))
    assert memory_tables.gpu_row() == (
        "| `max_memory_allocated`, NVIDIA H100 | 2 | 1.0% (median), 1.0% "
        "| the plan to what was measured: 3.0% (median), 4.0% |"
    )


def test_a_folder_without_results_is_refused_with_its_name(tmp_path: Path):
    made = gpu("--out", str(tmp_path / "none"), "--traces", "only")
    assert made.returncode == 2
    assert f"there are no results in {tmp_path / 'none'}" in made.stderr
    assert not (tmp_path / "none").exists()


def gpu(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words]
    return subprocess.run(command, env=environment, text=True, capture_output=True)
