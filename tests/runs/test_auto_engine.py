"""The engine that `auto` takes, run: the losses of one process, and a plan that keeps what was chosen."""

import pytest
from shared_out import WIDE, assert_same_curve

from memtrain.memory.plan.plan import read_plan

pytestmark = pytest.mark.slow

SAID = (
    *(
        WIDE % "false",
        "memory.activation_checkpointing=on",
        "memory.loss=chunked",
        "memory.loss_chunk_size=256KiB",
    ),
    *("train.max_steps=3", "train.batch_size=4", "train.micro_batch_size=1"),
)


def chosen(runs, name: str, *overrides: str) -> str:
    ranks = runs.fork_ranks(name, 2, *SAID, *overrides)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    return read_plan(runs.folder / name / "plan.json").settings.engine


def test_whole_weights_are_taken_where_they_fit(runs, curve_of):
    assert chosen(runs, "roomy") == "ddp"
    assert_same_curve(curve_of(runs.folder / "roomy"), curve_of(runs.done("one", *SAID)), rel=2e-4)


@pytest.mark.parametrize("installed", [False, True])
def test_what_fits_a_tight_budget_has_the_losses_of_one_process(runs, curve_of, monkeypatch, installed: bool):
    if installed:
        pytest.importorskip("deepspeed")
    else:
        monkeypatch.setattr("memtrain.memory.estimate.pricing.installed", lambda *names: frozenset())
    refused = runs.run("none", *SAID, "cluster.processes=2", "cluster.engine=ddp", "memory.budget=700MiB")
    needed = int(refused.err.partition("the smallest needs ")[2].split()[0])
    taken = chosen(runs, "tight", f"memory.budget={needed - 10}MiB")
    assert taken == ("fsdp2" if not installed else taken)
    assert taken != "ddp"
    assert_same_curve(curve_of(runs.folder / "tight"), curve_of(runs.done("one", *SAID)), rel=2e-4)
