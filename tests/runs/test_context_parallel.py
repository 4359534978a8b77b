"""Two processes that hold each row together: the losses of one, and the same again after a kill."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

PACKED = ("length.packing=bfd", "train.batch_size=4", "train.micro_batch_size=2", "train.max_steps=12")
STOPS = ("save.every_steps=3", "eval.every_steps=6")
SAVED = ("memory.activation_checkpointing=on", "memory.activation_offloading=on", "memory.preflight=on")
SLICED = "cluster.context_parallel=2"
ANSWERS = """\
method: {method}
model:
  config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}}
  tokenizer: builtin:tiny
data: {{train: {{source: builtin:arithmetic, limit: 40}}, eval_fraction: 0.2, cache_dir: {cache}}}
length: {{max_length: 160}}
memory: {{measure_peaks: false}}
optim: {{lr: 1e-2}}
train: {{batch_size: 8, max_steps: 4}}
eval: {{every_steps: 2}}
cluster: {{device: cpu, threads: 1, processes: 1}}
"""


def reported(folder: Path, kinds: tuple[str, ...] = ("step", "eval")) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    dropped = ("seconds", "time", "tokens_per_s", "peak_bytes")
    return [
        {name: value for name, value in line.items() if name not in dropped}
        for line in lines
        if line["kind"] in kinds
    ]


def assert_the_same(found: Path, expected: Path) -> None:
    """Sums are taken in another order; a few steps of AdamW make more of it."""
    lines, wanted = reported(found), reported(expected)
    assert len(lines) == len(wanted)
    for line, want in zip(lines, wanted, strict=True):
        assert line.keys() == want.keys()
        for name, value in want.items():
            if isinstance(value, float):
                assert line[name] == pytest.approx(value, rel=1e-3, abs=2e-5), (name, line["step"])
            else:
                assert line[name] == value, name


@pytest.fixture(scope="module")
def two(shared_runs) -> Path:
    ranks = shared_runs.fork_ranks("two", 2, *PACKED, *STOPS, SLICED, *SAVED)
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.said for rank in ranks)
    return shared_runs.folder / "two"


def test_two_processes_that_share_packed_rows_have_the_losses_of_one(runs, two: Path):
    assert_the_same(two, runs.done("one", *PACKED, *STOPS))


@pytest.mark.parametrize("by", [pytest.param("all_gather", marks=pytest.mark.slow), "ulysses"])
def test_two_groups_of_two_have_the_losses_of_one(runs, monkeypatch, by: str):
    """Three rows a step, one at a time, on two groups: one of them has nothing to learn in its last pass.

    Plain SGD, which hides no gradient that is some times too large.
    """
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    uneven = ("length.packing=bfd", "train.batch_size=3", "train.micro_batch_size=1", "train.max_steps=3")
    uneven += ("optim.kind=sgd", "optim.lr=0.5", "optim.max_grad_norm=null")
    ranks = runs.fork_ranks("four", 4, *uneven, SLICED, f"cluster.context_parallel_mode={by}")
    assert [rank.wait() for rank in ranks] == [0] * 4, "\n".join(rank.said for rank in ranks)
    assert_the_same(runs.folder / "four", runs.done("one", *uneven))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_dealt_out_heads_have_the_losses_of_one_and_go_on_bit_for_bit(
    runs, metrics, curve_of, monkeypatch, size: int
):
    """Two heads with one of keys on two processes; four with one on four."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(4))
    model = "model.config.num_attention_heads=4"
    said = (
        *PACKED,
        *STOPS,
        model,
        f"cluster.context_parallel={size}",
        "cluster.context_parallel_mode=ulysses",
    )
    ranks = runs.fork_ranks("many", size, *said, *SAVED)
    assert [rank.wait() for rank in ranks] == [0] * size, ranks[0].said
    assert_the_same(runs.folder / "many", runs.done("one", *PACKED, *STOPS, model))
    ranks = runs.fork_ranks("run", size, *said, *SAVED)
    while len(metrics(runs.folder / "run", "step")) < 4:
        time.sleep(0.02)
    for rank in ranks:
        rank.send(signal.SIGKILL)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * size
    ranks = runs.fork_ranks("run", size, *said, *SAVED)
    assert [rank.wait() for rank in ranks] == [0] * size, ranks[0].said
    assert curve_of(runs.folder / "run") == curve_of(runs.folder / "many")


@pytest.mark.slow
def test_slices_of_rows_and_shards_of_weights_go_together(runs):
    ranks = runs.fork_ranks("two", 2, *PACKED, *STOPS, SLICED, "cluster.engine=fsdp2")
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.said for rank in ranks)
    assert_the_same(runs.folder / "two", runs.done("one", *PACKED, *STOPS))


def test_a_killed_run_goes_on_bit_for_bit(runs, two: Path, metrics, curve_of):
    ranks = runs.fork_ranks("run", 2, *PACKED, *STOPS, SLICED, *SAVED)
    while len(metrics(runs.folder / "run", "step")) < 4:
        time.sleep(0.02)
    ranks[1].send(signal.SIGKILL)
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].wait() != 0
    assert len(curve_of(runs.folder / "run")) < 12
    ranks = runs.fork_ranks("run", 2, *PACKED, *STOPS, SLICED, *SAVED)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert curve_of(runs.folder / "run") == curve_of(two)


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        pytest.param("dpo", ("dpo.reference=synced", "dpo.reference_sync_steps=2"), marks=pytest.mark.slow),
        pytest.param("kto", (), marks=pytest.mark.slow),
        ("reward", ("length.padding_free=false",)),
    ],
)
def test_methods_with_answers_have_the_losses_of_one(runs, method: str, overrides: tuple[str, ...]):
    """KTO's are precomputed by both together, and its baseline is over the answers of the whole step."""
    recipe = runs.folder / f"{method}.yaml"
    recipe.write_text(ANSWERS.format(method=method, cache=runs.folder / "cache"))
    ranks = runs.fork_ranks("two", 2, *overrides, SLICED, verb=method, recipe=str(recipe))
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.said for rank in ranks)
    recipe.write_text(ANSWERS.format(method=method, cache=runs.folder / "other"))
    one = runs.run("one", *overrides, verb=method, recipe=str(recipe))
    assert one.code == 0, one.err
    assert_the_same(runs.folder / "two", runs.folder / "one")


def test_the_launcher_starts_as_many_as_share_a_row(runs):
    ended = runs.run("run", "--dry-run", SLICED, "cluster.processes=auto")
    assert ended.code == 0, ended.err
    settings = json.loads((runs.folder / "run" / "plan.json").read_text())["settings"]
    assert (settings["num_processes"], settings["context_parallel"], settings["pad_to_multiple_of"]) == (
        2,
        2,
        4,
    )
