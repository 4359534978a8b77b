"""Owners of the highest moment, out of a made-up history of the allocator; worked out by hand."""

from typing import Any

from first_light.alive_at_peak import BEFORE, NO_FRAME, alive_at_peak, by_owner, owner_of
from first_light.ladder import OWNERS, stages
from first_light.page import page
from first_light.stages.owners import allocated_of
from first_light.summary import summary

SITE = "/torch/lib/python3.12/site-packages"
MODEL = {"filename": f"{SITE}/transformers/models/qwen3/modeling_qwen3.py", "line": 82, "name": "forward"}
LINEAR = {"filename": f"{SITE}/torch/nn/modules/linear.py", "line": 134, "name": "forward"}
OURS = {"filename": "/code/memtrain/memtrain/errors.py", "line": 7, "name": "chunk"}
OTHER = {"filename": "/usr/lib/python3.12/contextlib.py", "line": 85, "name": "inner"}


def event(action: str, addr: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "frames": list(frames)}


HISTORY = [
    event("alloc", 1, 1024, LINEAR, MODEL),
    event("segment_alloc", 900, 2**21),
    event("alloc", 2, 1000, OTHER, OURS),
    event("free_requested", 50, 4000),
    event("free_completed", 50, 4000),
    event("free_requested", 1, 1024),
    event("alloc", 1, 5120),
    event("alloc", 3, 512, OURS),
    event("free_requested", 1, 5120),
    event("free_requested", 3, 512),
]
"""Block 50 (4,096 bytes in the allocator's count) and block 60 (2,048) were there before; address 1 is used
twice. Allocated: 6,144 at the start, then 7,168, 8,192 (the first high moment), 4,096, 3,072, 8,192, 8,704
(the highest), 3,584, 3,072."""
AT_END = {2: 1024, 60: 2048}


def test_the_highest_moment_has_the_blocks_that_were_alive_then():
    alive = alive_at_peak(HISTORY, AT_END)
    assert [(one.num_bytes, one.owner) for one in alive] == [
        (512, "memtrain/errors.py:7 chunk"),
        (5120, f"{NO_FRAME}, 5,120 bytes"),
        (1024, "memtrain/errors.py:7 chunk"),
        (2048, BEFORE),
    ]
    assert sum(one.num_bytes for one in alive) == 8704


def test_blocks_of_before_that_were_freed_later_are_alive_at_an_earlier_moment():
    """Without the last two allocations the highest moment is the third event's."""
    alive = alive_at_peak([*HISTORY[:6], event("free_requested", 2, 1000)], {60: 2048})
    assert sorted((one.num_bytes, one.owner) for one in alive) == [
        (1024, "memtrain/errors.py:7 chunk"),
        (
            1024,
            "torch/nn/modules/linear.py:134 forward < transformers/models/qwen3/modeling_qwen3.py:82 forward",
        ),
        (2048, BEFORE),
        (4096, BEFORE),
    ]


def test_the_start_of_a_history_can_be_its_highest_moment():
    alive = alive_at_peak([event("free_requested", 5, 512)], {6: 512})
    assert [one.owner for one in alive] == [BEFORE, BEFORE]
    assert alive_at_peak([], {}) == []


def test_an_owner_is_the_innermost_known_frame_and_the_first_that_is_not_torchs():
    assert owner_of([OTHER, MODEL, OURS], 8).startswith("transformers/models")
    assert " < " not in owner_of([OTHER, MODEL, OURS], 8)
    assert owner_of([LINEAR], 8) == "torch/nn/modules/linear.py:134 forward"
    assert owner_of([OTHER], 1024) == owner_of([], 1024) == f"{NO_FRAME}, 1,024 bytes"


def test_the_largest_owners_are_told_and_the_others_together():
    alive = alive_at_peak(HISTORY, AT_END)
    assert by_owner(alive, 2) == [
        {"owner": f"{NO_FRAME}, 5,120 bytes", "bytes": 5120, "blocks": 1},
        {"owner": BEFORE, "bytes": 2048, "blocks": 1},
        {"owner": "others", "bytes": 1536, "blocks": 2},
    ]
    assert len(by_owner(alive, 3)) == 3


def test_of_a_snapshot_blocks_in_use_on_this_device_are_those_of_the_end():
    blocks = [
        {"address": 2, "size": 1024, "state": "active_allocated"},
        {"address": 3, "size": 512, "state": "inactive"},
        {"address": 4, "size": 512, "state": "active_pending_free"},
    ]
    other = [{"address": 9, "size": 512, "state": "active_allocated"}]
    segments = [{"device": 1, "blocks": blocks}, {"device": 0, "blocks": other}]
    found = allocated_of({"segments": segments, "device_traces": [[], HISTORY]}, 1)
    assert found == {"events": HISTORY, "at_end": {2: 1024}}


def test_the_page_shows_the_largest_owners():
    told = [
        {"owner": f"a.py:{number} f", "bytes": 2**20 * (30 - number), "blocks": 1} for number in range(12)
    ]
    found: dict[str, Any] = {"owners/a": {"words": "peak", "owners": told}}
    text = page(found, summary(found, stages(), {"device": "none"}))
    assert "30 MiB" in text
    assert "a.py:9 f (1 blocks)" in text
    assert "a.py:10 f" not in text


def test_owners_are_told_of_plans_that_are_measured_too():
    names = {one.name for one in stages()}
    assert {f"owners/{one.name}" for one in OWNERS} <= names
    assert {f"grid/{one.name}" for one in OWNERS} <= names
    assert {"owners/0.6B full 16k", "owners/0.6B LoRA 16k"} <= names
