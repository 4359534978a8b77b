"""Peaks of methods that write their own answers: what was predicted, beside the heaviest batch measured."""

import json
from typing import Any

import pytest
from shared_out import WIDE, peaks, write_online

SAID = (
    WIDE % "true",
    "memory.measure_peaks=true",
    "memory.preflight=on",
    "data.eval_fraction=0",
    "generate.max_tokens=32",
    "length.max_length=192",
)


@pytest.mark.slow
def test_grpo_in_shards_needs_what_was_predicted_on_its_heaviest_batch(runs, metrics):
    """Three steps of real prompts are lighter than the longest ones can be, so the rehearsal is measured.

    Measured at c5f3b8aa: 79.3 MiB predicted for 512 tokens, 71.2 of the 476 that prompts and completions of
    the greatest length come to.
    """
    write_online(runs, "grpo")
    ranks = runs.fork_ranks("run", 2, "cluster.engine=fsdp2", *SAID, verb="grpo")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    predicted, measured = peaks(runs.folder / "run", metrics)
    heaviest = measured["dry run: steady step"]
    assert heaviest <= predicted["steady step"] * 1.01
    assert predicted["steady step"] <= 1.12 * heaviest
    assert measured["steady step"] <= heaviest


@pytest.mark.slow
def test_a_value_model_of_its_own_does_not_make_the_first_step_heavier_than_it_is(runs, metrics):
    """In the first update there are no activations, and before it no moments; it was 13 % too high once."""
    write_online(runs, "ppo")
    folder = runs.done("run", *SAID, "ppo.value=own", verb="ppo")
    predicted, measured = peaks(folder, metrics)
    assert predicted["first step"] == pytest.approx(measured["first step"], rel=0.01)
    assert predicted["steady step"] == pytest.approx(measured["steady step"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "passes"),
    [
        ("grpo", {}),
        ("rloo", {"log-probs": 0.05}),
        ("ppo", {"log-probs": 0.05}),
        ("online-dpo", {"log-probs": 0.1}),
    ],
)
def test_phases_around_the_update_need_what_was_predicted_where_prompts_are_alike(
    runs: Any, metrics: Any, method: str, passes: dict[str, float]
):
    """Generation, held-out prompts that are judged, and passes over a rollout that is smaller than their
    micro-batches: these were predicted as full ones, 30 to 39 % too high.
    """
    write_online(runs, method)
    rows = runs.folder / "alike.jsonl"
    asked = (" ".join(f"Ana has {10 + (7 * i + k) % 80} pens." for k in range(16)) for i in range(120))
    rows.write_text("".join(json.dumps({"prompt": one, "answer": "8"}) + "\n" for one in asked))
    said = ("data.eval_fraction=0.02", "generate.max_tokens=24", "length.max_length=256")
    folder = runs.done("run", f"data.train.source={rows}", *said, *SAID[:2], "train.max_steps=6", verb=method)
    predicted, measured = peaks(folder, metrics)
    for phase, room in {"generation": 0.01, "evaluation": 0.1, **passes}.items():
        assert 0.999 * measured[phase] <= predicted[phase] <= (1 + room) * measured[phase], phase
