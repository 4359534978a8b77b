"""The allocator's slack of a plan, against replays of whole models and published runs."""

import json
from pathlib import Path

import pytest

from memtrain.memory.estimate.static import overhead, slack_share
from tests.memory.estimate.test_peaks import make

ROWS = json.loads(
    (Path(__file__).parents[3] / "benchmarks" / "results" / "allocator_slack.json").read_text()
)["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["form"])
def test_a_plan_takes_what_a_replay_of_its_form_needs(row):
    loss = "full" if "plain logits" in row["form"] else "chunked"
    grows, native = (
        slack_share(make(expandable_segments=one, loss=loss, device="cuda")) for one in (True, False)
    )
    assert grows >= row["expandable_least"]
    assert native >= max(row["native"], row["native_least"])
    assert grows < native


def test_published_runs_without_segments_reserve_what_replays_of_their_form_do():
    found = {row["form"]: row["native"] - row["published"] for row in ROWS if "published" in row}
    other = {"QLoRA, plain logits of 128k", "full, plain logits"}
    assert len(found) == 9
    assert max(abs(error) for form, error in found.items() if form not in other) < 0.03
    assert all(found[form] < 0 for form in other), "what other tools hold beside is not memtrain's"


def test_on_a_cpu_little_is_kept():
    assert overhead(make(device="cpu")).slack == 0.02
