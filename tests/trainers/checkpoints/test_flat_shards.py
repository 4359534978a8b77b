"""States in pieces come back whole, in rows or in other pieces, however they were cut."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrain.trainers.checkpoints.checkpoint import Checkpoint
from memtrain.trainers.checkpoints.flat_shards import fill_from_pieces, read_rows, read_states
from memtrain.trainers.checkpoints.manifest import CheckpointFacts, FileEntry, Manifest
from memtrain.trainers.checkpoints.row_shards import rows_of
from memtrain.trainers.checkpoints.shard_names import name_of
from memtrain.trainers.checkpoints.state_io import save_state

SHAPES = {"a": (5, 3), "b": (7,), "c": (2, 2, 2), "d": ()}
WEIGHTS = {name: torch.arange(float(torch.Size(shape).numel())).view(shape) for name, shape in SHAPES.items()}
NAMES = list(SHAPES)


def written(folder: Path, world: int) -> Checkpoint:
    """A checkpoint of `world` ranks: all numbers end to end, cut into equal stretches, as DeepSpeed does."""
    total = sum(weight.numel() for weight in WEIGHTS.values())
    size = -(-total // world)
    entries: list[FileEntry] = []
    for rank in range(world):
        weights, states, place = {}, {}, 0
        for index, (name, weight) in enumerate(WEIGHTS.items()):
            first, end = max(rank * size - place, 0), min((rank + 1) * size - place, weight.numel())
            place += weight.numel()
            if first >= end:
                continue
            numbers = weight.reshape(-1)[first:end]
            weights[name] = {"first": first, "numbers": numbers}
            states[index] = {
                "first": first,
                "count": end - first,
                "numbers": {"exp_avg": 10 * numbers, "exp_avg_sq": 100 * numbers},
                "counters": {"step": torch.tensor(3.0)},
            }
        for part, state in (
            ("weights", weights),
            ("optimizer", {"state": states, "param_groups": [{"lr": 1}]}),
        ):
            file = name_of(f"{part}_pieces", rank, world)
            save_state(state, folder / file)
            entries.append(FileEntry(name=f"{file}.json", num_bytes=0, digest=""))
    facts = CheckpointFacts(
        step=3, eval_loss=None, recipe={}, settings={}, versions={}, data="", device="cpu"
    )
    return Checkpoint(folder, Manifest(facts=facts, files=tuple(entries)))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_pieces_make_whole_weights_and_states(tmp_path: Path, world: int):
    checkpoint = written(tmp_path, world)
    made = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    fill_from_pieces(checkpoint, "weights", made, rank=0, world=1)
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    state = read_rows(checkpoint, NAMES, shapes, rank=0, world=1)
    assert state["param_groups"] == [{"lr": 1}]
    for index, name in enumerate(NAMES):
        assert torch.equal(made[name], WEIGHTS[name])
        assert torch.equal(state["state"][index]["exp_avg"], 10 * WEIGHTS[name])
        assert torch.equal(state["state"][index]["exp_avg_sq"], 100 * WEIGHTS[name])
        assert state["state"][index]["step"] == 3
    steps = [state["state"][index]["step"].data_ptr() for index in range(len(NAMES))]
    assert len(set(steps)) == len(steps), "A counter for each: it is counted in place."


@pytest.mark.parametrize(("world", "ranks"), [(2, 2), (3, 2), (2, 3)])
def test_pieces_make_the_rows_of_a_rank(tmp_path: Path, world: int, ranks: int):
    checkpoint = written(tmp_path, world)
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items() if shape}
    for rank in range(ranks):
        state = read_rows(checkpoint, NAMES[:-1], shapes, rank=rank, world=ranks)["state"]
        for index, name in enumerate(NAMES[:-1]):
            rows = rows_of(SHAPES[name][0], rank, ranks)
            assert torch.equal(state[index]["exp_avg"], 10 * WEIGHTS[name][rows.start : rows.stop])


@settings(max_examples=30, deadline=None)
@given(
    world=st.integers(1, 4), bounds=st.tuples(st.integers(0, 15), st.integers(0, 15)), own=st.integers(0, 3)
)
def test_any_stretch_is_found_whichever_file_is_read_first(tmp_path_factory, world, bounds, own):
    first, end = sorted(bounds)
    checkpoint = written(tmp_path_factory.mktemp("pieces"), world)
    states = read_states(checkpoint, {0: range(first, end)}, own=own % world)["state"]
    expected = 10 * WEIGHTS["a"].reshape(-1)[first:end]
    assert torch.equal(states[0]["exp_avg"], expected)


def test_a_missing_number_is_not_taken_for_zero(tmp_path: Path):
    checkpoint = written(tmp_path, 2)
    larger = {"a": torch.zeros(6, 3)}
    with pytest.raises(AssertionError, match="has the weights that it trains"):
        fill_from_pieces(checkpoint, "weights", larger, rank=0, world=1)
