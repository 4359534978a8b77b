"""What ended a run is reported first: its status and report that cannot be written are reported beside it."""

import pytest

from memtrain.errors import LaunchError
from memtrain.trainers.run_folder.folder import RunFolder, RunState
from memtrain.trainers.run_folder.report import final_status


def refuses(*given: object) -> None:
    raise LaunchError("the disk is full", "here", "free some space")


def breaks(*given: object) -> None:
    raise RuntimeError("no such field")


def test_the_end_of_a_failed_run_hides_no_error(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    """Raised here, they would stand in its place, or end the watch that kills ranks that hang."""
    monkeypatch.setattr(RunFolder, "write_status", refuses)
    monkeypatch.setattr(final_status, "write_report", breaks)
    final_status.record_end(RunFolder(tmp_path), RunState.FAILED, 3, "rank 1 was killed")
    said = capsys.readouterr().err
    assert said.count("note: the end of the run could not be recorded: ") == 2
    assert "the disk is full" in said
    assert "no such field" in said


def test_a_run_is_not_done_before_its_report_and_status_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(final_status, "write_report", breaks)
    with pytest.raises(RuntimeError):
        final_status.record_end(RunFolder(tmp_path), RunState.DONE, 3)
    assert RunFolder(tmp_path).read_status() is None
