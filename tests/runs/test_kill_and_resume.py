"""Killed at any moment, the same command goes on: every later step is the same to the last bit."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors import safe_open

HARD = (
    "length.packing=bfd_split",
    "model.adapter={r: 4, dropout: 0.1}",
    "train.batch_size=4",
    "train.micro_batch_size=1",
    "train.max_steps=18",
    "optim.schedule=cosine",
    "optim.warmup_steps=5",
    "optim.weight_decay=0.1",
    "optim.neftune_alpha=5",
    "save.every_steps=3",
    "eval.every_steps=6",
)
"""Packing, dropout, noise, accumulation, a schedule, several shuffled epochs, checkpoints often."""


@pytest.fixture(scope="module")
def whole(shared_runs) -> Path:
    """The run that nobody interrupted."""
    return shared_runs.done("whole", *HARD)


@pytest.fixture(scope="module")
def taken_s(whole: Path, shared_runs) -> float:
    """How long it takes when everything is warm."""
    began = time.monotonic()
    shared_runs.done("timed", *HARD)
    return time.monotonic() - began


def final_weights(folder: Path) -> dict[str, bytes]:
    with safe_open(folder / "final" / "adapter_model.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def held_out(metrics, folder: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in metrics(folder, "eval")]


def kill_at_random(runs, name: str, moments: random.Random, longest_s: float) -> tuple[float, bool]:
    """Begin or go on, and kill after a random time; (seconds it lived, whether it was killed)."""
    process = runs.fork(name, *HARD)
    lives_s = moments.uniform(0.0, longest_s)
    time.sleep(lives_s)
    process.send(signal.SIGKILL)
    return lives_s, process.wait() == -signal.SIGKILL


def kill_and_compare(
    runs, metrics, curve_of, whole: Path, taken_s: float, *, num_kills: int, seed: int
) -> list[tuple[float, int]]:
    """Kill one run again and again, then let it end: nothing differs from `whole`."""
    moments, killed = random.Random(seed), []
    folder = runs.folder / "killed"
    for _ in range(num_kills):
        lived_s, is_killed = kill_at_random(runs, "killed", moments, taken_s)
        steps = metrics(folder, "step")
        killed.append((round(lived_s, 2), steps[-1]["step"] if steps else 0))
        if not is_killed:
            break
    ended = runs.run("killed", *HARD)
    assert ended.code == 0, ended.err
    assert curve_of(folder) == curve_of(whole), killed
    assert held_out(metrics, folder) == held_out(metrics, whole), killed
    assert final_weights(folder) == final_weights(whole), killed
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    leftovers = [path.name for path in folder.rglob(".*") if path.name != ".lock"]
    assert not [name for name in leftovers if name.startswith((".tmp", ".old", ".gone"))], leftovers
    return killed


def test_kills_at_random_moments_move_no_bit(runs, metrics, curve_of, whole, taken_s):
    kill_and_compare(runs, metrics, curve_of, whole, taken_s, num_kills=3, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_ten_killed_runs_move_no_bit(runs, metrics, curve_of, whole, taken_s, seed: int):
    print(kill_and_compare(runs, metrics, curve_of, whole, taken_s, num_kills=4, seed=seed + 100))


@pytest.mark.parametrize(
    "moment",
    [
        "memtrain.trainers.checkpoints.checkpoint._finish",
        pytest.param("memtrain.trainers.checkpoints.checkpoint._prune", marks=pytest.mark.slow),
        "memtrain.trainers.loop.finish.save_final",
        pytest.param("memtrain.trainers.loop.finish.write_card", marks=pytest.mark.slow),
        pytest.param("memtrain.trainers.run_folder.report.final_status.write_report", marks=pytest.mark.slow),
        pytest.param("memtrain.trainers.loop.exit_status.record_end", marks=pytest.mark.slow),
        "memtrain.trainers.model.loading.save.put_in_place",
    ],
)
def test_a_kill_at_a_delicate_moment_moves_no_bit(runs, metrics, curve_of, monkeypatch, whole, moment: str):
    """Just before a checkpoint gets its name, before old ones go, and around the last files."""

    def die(*arguments, **named):
        import os

        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(moment, die)
        process = runs.fork("killed", *HARD)
        assert process.wait() == -signal.SIGKILL, process.said
    folder = runs.done("killed", *HARD)
    assert curve_of(folder) == curve_of(whole)
    assert held_out(metrics, folder) == held_out(metrics, whole)
    assert final_weights(folder) == final_weights(whole)
    assert len(metrics(folder, "final")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory",
    [
        ("memory.weights_offload=on", "memory.activation_checkpointing=on"),
        ("memory.weights_offload=on", "memory.streamed_layers=on", "memory.slice_tokens=16"),
        ("memory.weights_offload=all", "memory.activation_checkpointing=on"),
        ("memory.weights_offload=on", "model.adapter=null", "optim.neftune_alpha=null"),
    ],
    ids=["adapter", "in slices", "adapter too", "full"],
)
def test_weights_on_the_host_killed_in_mid_run_move_no_bit(runs, metrics, curve_of, memory):
    """Killed after step 7 of 18, with a checkpoint of step 6; the plain run goes on from it as well."""
    asked = (*HARD, *memory)
    whole = runs.done("whole", *asked)
    process = runs.fork("killed", *asked)
    while len(metrics(runs.folder / "killed", "step")) < 7:
        time.sleep(0.002)
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert curve_of(runs.done("killed", *asked)) == curve_of(whole)
    if "memory.streamed_layers=on" not in memory:
        plain = (*asked, "memory.weights_offload=off", "memory.activation_checkpointing=on")
        assert curve_of(runs.done("plain", *plain)) == curve_of(whole)


def test_a_torn_last_line_and_a_broken_checkpoint_are_passed_over(runs, metrics, curve_of, whole):
    with_stop = (*HARD, "save.keep=4")
    process = runs.fork("torn", *with_stop)
    folder = runs.folder / "torn"
    while len(metrics(folder, "step")) < 11:
        time.sleep(0.005)
    process.send(signal.SIGKILL)
    process.wait()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "ste')
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    weights = newest / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00\x00")
    runs.done("torn", *with_stop)
    assert curve_of(folder) == curve_of(whole)
    assert any(newest.name in note["text"] for note in metrics(folder, "note"))


def test_epochs_of_a_streamed_source_go_on_to_the_last_bit(runs, metrics, curve_of, monkeypatch):
    """Two passes and a half over a stream, killed in the second: no row is seen again, or left out."""
    import datasets
    import huggingface_hub

    class Api:
        def dataset_info(self, *given, **named):
            return huggingface_hub.DatasetInfo(id="some/dataset", sha="abc")

    texts = [{"text": f"row {number} says {' '.join('ab' * (number % 7 + 1))}"} for number in range(40)]
    stream = datasets.Dataset.from_list(texts).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: stream)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    asked = (
        "data={train: {source: some/dataset, limit: 32}, streaming: true}",
        "train.max_steps=null",
        "train.epochs=2.5",
        "save.every_steps=1",
        "optim.neftune_alpha=5",
    )
    whole = runs.done("whole", *asked)
    steps = metrics(whole, "step")
    assert (len(steps), steps[-1]["epoch"]) == (10, 2.5)
    process = runs.fork("killed", *asked)
    while len(metrics(runs.folder / "killed", "step")) < 6:
        time.sleep(0.002)
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert curve_of(runs.done("killed", *asked)) == curve_of(whole)
