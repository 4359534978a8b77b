"""A tracker that cannot be used is reported before anything starts; one that can gets every number."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from memtrain.errors import LaunchError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.protocols.events import EvalEvent, NoteEvent, StepEvent
from memtrain.trainers.run_folder import trackers
from memtrain.trainers.run_folder.folder import RunFolder
from memtrain.trainers.run_folder.trackers import check_trackers, flat_recipe, numbers_of, open_trackers

MakePlan = Callable[..., Plan]

STEP = StepEvent(
    step=3, loss=1.5, lr=1e-4, tokens=100, loss_tokens=50, seconds=0.5, epoch=0.25, extra={"accuracy": 0.5}
)


class Recorder:
    """Stands for a tracker; remembers what it was given."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.reported: list[object] = []

    def start(self) -> None:
        if self.fails:
            raise ConnectionError("no API key")

    def store_init_configuration(self, values: dict[str, object]) -> None:
        self.reported.append(values["method"])

    def log(self, values: dict[str, float], step: int) -> None:
        self.reported.append((step, values))

    def finish(self) -> None:
        self.reported.append("finished")


def test_every_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(LaunchError, match=r"memtrain\[trackers\]") as caught:
        check_trackers(["wandb", "trackio"])
    assert [fault.what.split()[0] for fault in caught.value.faults] == ["wandb", "trackio"]
    check_trackers([])


def test_a_tracker_gets_the_recipe_and_the_numbers(
    tmp_path: Path, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
):
    recorder = Recorder()
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    monkeypatch.setitem(trackers.MAKERS, "wandb", lambda project, run, folder: recorder)
    opened = open_trackers(make_plan({"log.trackers": ["wandb"]}), RunFolder(tmp_path / "run"))
    for event in (STEP, EvalEvent(step=3, loss=2.0, tokens=7), NoteEvent(step=3, text="x")):
        opened.emit(event)
    opened.close()
    assert recorder.reported == [
        "sft",
        (
            3,
            {
                "train/loss": 1.5,
                "train/lr": 1e-4,
                "train/epoch": 0.25,
                "train/tokens_per_s": 200.0,
                "train/accuracy": 0.5,
            },
        ),
        (3, {"eval/loss": 2.0}),
        "finished",
    ]
    assert numbers_of(NoteEvent(step=0, text="x")) == {}


def test_a_tracker_that_refuses_to_start_is_said(
    tmp_path: Path, make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: name)
    monkeypatch.setitem(trackers.MAKERS, "wandb", lambda project, run, folder: Recorder(fails=True))
    with pytest.raises(LaunchError, match="wandb does not start: ConnectionError: no API key"):
        open_trackers(make_plan({"log.trackers": ["wandb"]}), RunFolder(tmp_path))


def test_the_recipe_is_flat_and_plain(make_plan: MakePlan):
    flat = flat_recipe(make_plan({"optim.lr": 1e-4}))
    assert flat["optim.lr"] == 1e-4
    assert flat["model.path"] == "builtin:tiny"
    assert "data.train" in flat
    assert all(isinstance(value, (str, int, float, bool)) for value in flat.values())


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs the package tensorboard")
def test_tensorboard_writes_its_files(tmp_path: Path, make_plan: MakePlan):
    folder = RunFolder(tmp_path / "run")
    opened = open_trackers(make_plan({"log.trackers": ["tensorboard"]}), folder)
    opened.emit(STEP)
    opened.close()
    assert list(folder.trackers.rglob("events.out.tfevents.*"))
