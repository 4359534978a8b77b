"""What killed processes leave in a run folder is removed, by the next start and by `memtrain clean`."""

import subprocess
import sys
from pathlib import Path

import pytest

from memtrain.__main__ import main
from memtrain.trainers.run_folder.folder import RunFolder

KEPT = (
    "checkpoints/step-000004/weights.safetensors",
    "final/model.safetensors",
    "metrics.jsonl",
    "plan.json",
    ".hidden",
    "notes.123.tmp",
)


@pytest.fixture(scope="module")
def gone() -> int:
    """The number of a process that has ended."""
    return int(
        subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout
    )


@pytest.fixture
def left(gone: int) -> tuple[str, ...]:
    """What kills leave, at every moment at which something is half-written."""
    return (
        f".final.{gone}.tmp/model.safetensors",
        f".final.{gone}.tmp/value/model.safetensors",
        f".status.json.{gone}.tmp",
        f".report.html.{gone}.tmp",
        f".final.json.{gone}.tmp",
        f".metrics.jsonl.{gone}.tmp",
        f".export.{gone}.tmp/model.safetensors",
        ".final-tried-abc/.final.1.tmp/config.json",
        ".rehearsal-abc/largest.safetensors",
    )


def fill(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 1000)


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_next_start_removes_what_a_kill_left(tmp_path: Path, left: tuple[str, ...]):
    fill(tmp_path, (*KEPT, *left))
    with RunFolder(tmp_path).open_for_run():
        assert files_of(tmp_path) == {*KEPT, ".lock"}
    assert files_of(tmp_path) == set(KEPT)


def test_an_export_that_lives_is_left_alone(tmp_path: Path):
    with subprocess.Popen(["sleep", "100"]) as process:
        name = f".export.{process.pid}.tmp/model.safetensors"
        fill(tmp_path, (*KEPT, name))
        with RunFolder(tmp_path).open_for_run():
            assert name in files_of(tmp_path)
        process.kill()


def test_clean_tells_what_it_removes_and_leaves_the_rest(tmp_path: Path, left: tuple[str, ...], capsys):
    more = ("checkpoints/.tmp-step-000005/weights", "checkpoints/.gone-step-000001/x", ".faults/rank-0.json")
    aside = "checkpoints/.old-step-000004/weights.safetensors"
    fill(tmp_path, (*KEPT, *left, *more, aside))
    assert main(["clean", str(tmp_path)]) == 0
    assert files_of(tmp_path) == set(KEPT)
    said = capsys.readouterr().out
    assert said.count("removed") == len({name.split("/")[0] for name in left}) + 3
    assert ".rehearsal-abc (1000 B)" in " ".join(said.split())
    assert main(["clean", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "there are no half-written files\n"


def test_clean_puts_back_a_checkpoint_that_was_set_aside(tmp_path: Path):
    fill(tmp_path, ("plan.json", "checkpoints/.old-step-000004/weights"))
    assert main(["clean", str(tmp_path)]) == 0
    assert files_of(tmp_path) == {"plan.json", "checkpoints/step-000004/weights"}


def test_clean_touches_nothing_where_a_process_runs_or_no_run_is(
    tmp_path: Path, left: tuple[str, ...], capsys
):
    fill(tmp_path, KEPT)
    with RunFolder(tmp_path).open_for_run():
        fill(tmp_path, left)
        assert main(["clean", str(tmp_path)]) == 5
    assert set(left) <= files_of(tmp_path)
    assert "is running in" in capsys.readouterr().err
    (tmp_path / "plan.json").unlink()
    assert main(["clean", str(tmp_path)]) == 5
    assert "is not a run folder" in capsys.readouterr().err
