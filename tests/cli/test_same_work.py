"""The same work by several sides: turns, what is left out and why, and words of its result."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import same_work
from page import same_work as rows_of_the_page

FILE = Path(same_work.__file__)


class Turns:
    """A side that answers at once."""

    def __init__(self, made):
        self.made, self.asked = made, []

    def turn(self, case, limit_s):
        self.asked.append(case)
        return dict(self.made)


def asked(**changes):
    return argparse.Namespace(**({"limit_s": 1e9, "unsloth": None, "only": None} | changes))


def sides(case, given=None, **changes):
    workers = given or {name: Turns({"step_s": 1.0}) for name in ("memtrain", "trl")}
    found = list(same_work.of_case(case, workers, asked(**changes), Path(), 0.0))
    return {one["side"]: one for one in found}, workers


def test_memtrain_steps_eagerly_and_captured_and_an_absent_side_says_why():
    found, workers = sides(same_work.CASES[0])
    assert [one["captured"] for one in workers["memtrain"].asked] == [False, True]
    assert found["unsloth"]["not_run"] == "not asked for"
    assert {one.get("step_s") for one in found.values()} == {1.0, None}


def test_rloo_has_the_counts_of_the_pull_request_and_no_captured_side():
    cases = [one for one in same_work.CASES if one["kind"] == "rloo"]
    assert [one["k"] for one in cases] == [2, 4, 8]
    found, workers = sides(cases[0])
    assert list(found) == ["memtrain", "trl", "unsloth"]
    assert [len(one.asked) for one in workers.values()] == [1, 1]


def test_a_turn_that_time_is_not_left_for_says_so():
    found, workers = sides(same_work.CASES[0], limit_s=-1.0)
    assert {one["not_run"].split(" of ")[0] for one in found.values()} == {"no time left", "not asked for"}
    assert workers["trl"].asked == []


def test_a_worker_that_cannot_be_imported_is_an_error_of_its_turn(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(same_work.SIDES, "trl", ("no_such_package",))
    worker = same_work.Worker("nobody", sys.executable, tmp_path)
    found = worker.turn(same_work.CASES[0], 60)
    worker.close()
    assert "error" in found
    assert "nobody" in found["error"]


def test_it_imports_nothing_of_the_ladder_and_no_torch_before_its_turn():
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); import same_work; "
    words = [sys.executable, "-c", code + "print(json.dumps(sorted(sys.modules)))", str(FILE.parent)]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert not [name for name in found if name.startswith(("first_light", "torch", "memtrain"))]


def test_busy_time_counts_what_overlaps_once():
    assert same_work.covered([(0, 10), (5, 12), (20, 21), (3, 4)]) == 13


def test_the_table_and_the_page_say_who_is_slower():
    case = {"kind": "steps", "size": "8B", "lora": True, "checkpointed": False, "rows": 4, "tokens": 2048}
    speeds = {"memtrain": 900, "memtrain, captured": 1100, "trl": 800, "unsloth": 1000}
    figures = {"step_s": 1.0, "busy_s": 0.9, "busy_share": 0.9, "peak_gib": 3.5}
    turns = [{"side": side, "tokens_per_s": one, **case, **figures} for side, one in speeds.items()]
    missing = {"side": "trl", "kind": "rloo", "size": "0.6B", "k": 2, "not_run": "no time left of 290 s"}
    made = {"device": "a card", "commit": "abc", "seconds": 3, "turns": [*turns, missing]}
    text = "\n".join(same_work.table(made))
    assert "1,100 tokens/s, busy 90%, 1.000 s a step, peak 3.5 GiB" in text
    assert "0.6B RLOO, k = 2" in text
    assert "no time left of 290 s" in text
    row = rows_of_the_page(made)[-1]
    assert row.endswith("| 1.10 |")
    assert "900 (3.5 GiB)" in row
