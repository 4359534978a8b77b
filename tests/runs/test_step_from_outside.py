"""What a whole run does to its rows, modes and sums, seen from its metrics and its weights alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

LENGTHS = (3, 5, 7, 9, 11, 13, 15, 17, 19)
"""Words of each row's answer: rows are told apart by their tokens."""
DROPS = "model.config.attention_dropout=0.5"


def rows_of_many_lengths(folder: Path) -> str:
    path = folder / "lengths.jsonl"
    rows = [{"prompt": "Say", "completion": " a" * length} for length in LENGTHS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def epochs(runs, metrics, name: str, *overrides: str) -> list[list[int]]:
    """Tokens of each step's row, by epoch, of three epochs of a row a step."""
    said = (
        f"data.train={rows_of_many_lengths(runs.folder)}",
        *("data.eval_fraction=0", "train.batch_size=1", "train.max_steps=null", "train.epochs=3"),
        *("length.packing=none", "optim.lr=1e-4", *overrides),
    )
    steps = metrics(runs.done(name, *said), "step")
    tokens = [step["tokens"] for step in steps]
    assert len(tokens) == 3 * len(LENGTHS)
    return [tokens[begin : begin + len(LENGTHS)] for begin in range(0, len(tokens), len(LENGTHS))]


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(runs, metrics):
    first = epochs(runs, metrics, "one")
    assert all(sorted(epoch) == sorted(first[0]) and len(set(epoch)) == len(LENGTHS) for epoch in first)
    orders = [tuple(epoch) for epoch in first]
    assert len(set(orders)) == 3, "no epoch repeats another's order"
    assert tuple(sorted(first[0])) not in orders, "rows are shuffled"
    assert epochs(runs, metrics, "again") == first
    other = epochs(runs, metrics, "other", "train.seed=1")
    assert all(tuple(epoch) not in orders for epoch in other)


def test_a_run_that_goes_on_in_its_second_epoch_keeps_the_orders(runs, metrics):
    whole = epochs(runs, metrics, "whole")
    said = (
        f"data.train={rows_of_many_lengths(runs.folder)}",
        *("data.eval_fraction=0", "train.batch_size=1", "train.max_steps=null", "train.epochs=3"),
        *("length.packing=none", "optim.lr=1e-4", "save.every_steps=1"),
    )
    running = runs.fork("killed", *said)
    while len(metrics(runs.folder / "killed", "step")) < len(LENGTHS) + 3:
        assert running.pid
    running.send(9)
    running.wait()
    tokens = [step["tokens"] for step in metrics(runs.done("killed", *said), "step")]
    assert tokens == [one for epoch in whole for one in epoch]


METHODS = {
    "sft": (),
    "dpo": ("dpo.reference=copy",),
    "kto": ("kto.reference=copy",),
    "reward": (),
}


def evaluated(runs, metrics, name: str, method: str, *overrides: str) -> list[dict[str, float]]:
    recipe = runs.folder / f"{method}.yaml"
    recipe.write_text(runs.recipe.read_text().replace("method: sft", f"method: {method}"))
    said = ("eval.at_start=true", "train.max_steps=1", "optim.lr=1e-9", *METHODS[method], *overrides)
    folder = runs.done(name, *said, verb=method, recipe=str(recipe))
    kept = ("time", "seconds", "step")
    events = metrics(folder, "eval")
    assert len(events) == 2
    return [
        {key: value for key, value in event.items() if isinstance(value, float) and key not in kept}
        for event in events
    ]


@pytest.mark.parametrize("drop", [DROPS, "optim.neftune_alpha=20"])
@pytest.mark.parametrize("method", METHODS)
def test_held_out_rows_are_measured_without_what_only_training_has(runs, metrics, method: str, drop: str):
    """Before the first step, and after it: by then the model has been in training."""
    plain = evaluated(runs, metrics, "plain", method)
    dropping = evaluated(runs, metrics, "dropping", method, drop)
    assert dropping[0] == pytest.approx(plain[0], rel=2e-5, abs=1e-6)
    # A step that moved next to nothing moved it another way.
    assert dropping[1]["loss"] == pytest.approx(plain[1]["loss"], rel=2e-5)


def test_steps_after_an_evaluation_are_trained_as_those_before(runs, curve_of):
    """With dropout: a model that stayed in its mode of evaluation would have other losses."""
    seldom = curve_of(runs.done("seldom", DROPS, "eval.every_steps=100"))
    often = curve_of(runs.done("often", DROPS, "eval.every_steps=1", "eval.at_start=true"))
    plain = curve_of(runs.done("plain", "eval.every_steps=100"))
    assert often == seldom
    assert all(step[1] != other[1] for step, other in zip(seldom, plain, strict=True))


def gradient_of_a_step(runs, name: str, *overrides: str) -> torch.Tensor:
    """The gradient of the matrices in the second step: what SGD with a rate of 1 took off their copies.

    Weights are bfloat16, their copies float32: what was taken off is known to 2^-24 of a weight.
    """
    said = (
        *("model.dtype=bfloat16", "optim.master_weights=true", "optim.kind=sgd", "optim.lr=1.0"),
        *("optim.schedule=constant", "optim.warmup_ratio=0", "optim.weight_decay=0"),
        *("optim.max_grad_norm=null", "data.eval_fraction=0", "save.every_steps=1", "save.keep=4"),
        *("train.max_steps=2", "length.packing=none", *overrides),
    )
    folder = runs.done(name, *said)
    states = [
        load_file(folder / "checkpoints" / f"step-{step:06}" / "optimizer.safetensors") for step in (1, 2)
    ]
    names = sorted(key for key, one in states[0].items() if key.endswith("master") and one.dim() > 1)
    assert len(names) > 10
    assert all(states[0][key].dtype == torch.float32 for key in names)
    return torch.cat([(states[0][key].double() - states[1][key].double()).reshape(-1) for key in names])


def share_in_bfloat16(gradient: torch.Tensor) -> float:
    """Of the numbers that are known well enough to tell, those that a bfloat16 holds."""
    known = gradient[gradient.abs() > 1e-3]
    assert len(known) > 1000
    # Copies of 0.06 and less are float32: the difference of two is off by 4e-9 at most.
    return float(((known - known.bfloat16().double()).abs() < 1e-8).double().mean())


@pytest.mark.parametrize("kind", ["full", "checkpointed"])
def test_gradients_of_micro_batches_are_added_in_float32(runs, kind: str):
    """A gradient that is alone is a bfloat16; the sum of two is none, unless it was rounded."""
    more = ("memory.activation_checkpointing=on",) if kind == "checkpointed" else ()
    alone = gradient_of_a_step(runs, "alone", "train.micro_batch_size=8", *more)
    assert share_in_bfloat16(alone) > 0.95
    added = gradient_of_a_step(runs, "added", "train.micro_batch_size=4", *more)
    assert share_in_bfloat16(added) < 0.5
    torch.testing.assert_close(added, alone, rtol=0.1, atol=2e-3)
