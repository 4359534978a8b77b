"""memtrain and TRL in turns: rounds that are timed, columns, sides that end. Processes are made up."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from first_light import sides
from first_light.ladder import stages
from first_light.page import page
from first_light.stages import peers
from first_light.stages.peers import COLUMNS, ROUNDS, WARM_ROUNDS, Rounds, Side, in_turns, reported
from first_light.summary import summary

OURS, SAME = COLUMNS[0].ours, COLUMNS[1].ours
ALL = WARM_ROUNDS + ROUNDS


def made_by(first_loss: float, *seconds: float) -> Rounds:
    """A side whose rounds of 100 tokens take so long."""
    rounds = [
        {"tokens": 100, "seconds": one, "peak_bytes": 2**30, "losses": [first_loss - number, 1.0]}
        for number, one in enumerate(seconds)
    ]
    return Rounds({"attention": "sdpa"}, rounds)


@pytest.fixture
def found() -> dict[str, Rounds]:
    """TRL's first rounds take long, as they did on a GPU."""
    return {
        OURS: made_by(11.3895, 0.6, 0.4, 0.4, 0.5, 0.5, 0.4),
        SAME: made_by(11.3999, 0.9, 0.9, 0.9, 0.8, 1.0, 1.0),
        "TRL": made_by(11.3892, 8.0, 3.0, 1.3, 1.0, 1.0, 1.2),
        "TRL set for speed": Rounds(fault="TRL set for speed ended: no kernel"),
    }


def test_only_rounds_after_the_first_three_are_compared(found: dict[str, Rounds]):
    """200, 200 and 250 tokens a second against 100, 100 and 83: 2, 2 and 3 times, and 2 of the medians."""
    made = reported(found)
    column = made["columns"]["each at its defaults"]
    assert column["ratio"] == 2.0
    assert column["ratios"] == pytest.approx([2.0, 2.0, 3.0])
    assert made["sides"]["TRL"]["tokens_per_s"] == 100.0
    assert made["sides"]["TRL"]["spread"] == pytest.approx([100 / 1.2, 100])
    assert made["sides"]["TRL"]["used"] == {"attention": "sdpa"}


def test_first_losses_that_differ_are_said(found: dict[str, Rounds]):
    """11.3895 and 11.3892 agree to 1e-3; 11.3999 does not."""
    made = reported(found)
    assert made["columns"]["each at its defaults"]["losses_agree"]
    assert not made["columns"]["the same work"]["losses_agree"]
    summed = summary({"TRL/a": made}, stages(), {"device": "none"})
    assert summed["losses_apart"] == ["TRL/a: the same work"]


def test_a_side_that_ended_leaves_the_other_columns(found: dict[str, Rounds]):
    made = reported(found)
    assert made["columns"]["TRL set for speed"]["words"] == "TRL set for speed ended: no kernel"
    assert "ratio" not in made["columns"]["TRL set for speed"]
    text = page({"TRL/a": made}, summary({"TRL/a": made}, stages(), {"device": "none"}))
    assert "TRL set for speed ended: no kernel" in text
    assert "100 tokens/s (83-100), peak 1.0 GiB; attention sdpa" in text


def test_large_models_have_a_pair_for_each_of_two_columns(found: dict[str, Rounds]):
    """Two are all that a card holds: TRL is built anew for the second."""
    pairs = {f"{one.name}: {name}": found[name] for one in COLUMNS[:2] for name in (one.ours, one.theirs)}
    made = reported(pairs, COLUMNS[:2])
    assert list(made["columns"]) == ["each at its defaults", "the same work"]
    assert made["columns"]["the same work"]["sides"] == [f"the same work: {SAME}", "the same work: TRL"]
    assert made["columns"]["each at its defaults"]["ratio"] == 2.0


class Process:
    """Makes rounds of a second, but for one that ends after two."""

    def __init__(self, side: Side, job: Path, log: Path) -> None:
        self.name, self.count = side.name, 0

    def answer(self, word: str) -> Mapping[str, Any]:
        if not word:
            return {"is": self.name}
        self.count += 1
        if self.name == "ends" and self.count > 2:
            raise RuntimeError("ends ended")
        return {"tokens": 1, "seconds": 1.0, "peak_bytes": 0, "losses": [1.0]}

    def end(self) -> None:
        pass


@pytest.mark.parametrize(("time_s", "count"), [(600.0, ALL), (-1.0, WARM_ROUNDS + 1)])
def test_rounds_end_with_their_time_and_one_is_timed_at_least(
    time_s: float, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(peers, "_Process", Process)
    found = in_turns([Side("a", "memtrain"), Side("ends", "trl")], tmp_path, tmp_path, time_s)
    assert len(found["a"].made) == count
    assert found["a"].used == {"is": "a"}
    assert (len(found["ends"].made), found["ends"].fault) == (2, "ends ended")


@pytest.fixture
def pipe(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Lines that a side writes for steps of 4 tokens with the losses that are given."""

    def make(*losses: float) -> list[dict[str, Any]]:
        job = {"device": "cpu", "steps": 2, "rounds": 2}
        program = (
            f"from first_light.sides import Rounds; rounds = Rounds({job}); rounds.begin({{'used': 1}})\n"
        )
        program += "".join(f"rounds.step(4, {loss})\n" for loss in losses)
        path = str(Path(sides.__file__).parents[1])
        ran = subprocess.run(
            [sys.executable, "-c", program],
            input="go\ngo\n",
            text=True,
            capture_output=True,
            env={"PYTHONPATH": path},
        )
        return [json.loads(line) for line in ran.stdout.splitlines()]

    return make


def test_a_side_says_what_it_uses_and_then_every_loss_of_its_rounds(
    pipe: Callable[..., list[dict[str, Any]]],
):
    used, first, second = pipe(3.0, 2.5, 2.0, 1.5)
    assert used == {"used": 1}
    assert (first["tokens"], first["losses"]) == (8, [3.0, 2.5])
    assert second["losses"] == [2.0, 1.5]
