"""Peaks of methods that write their own answers: what was predicted, beside the heaviest batch measured."""

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

    Measured when written: 79.4 MiB predicted, 72.8 of one micro-batch, whose step adds no gradients (6.5).
    """
    write_online(runs, "grpo")
    ranks = runs.fork_ranks("run", 2, "cluster.engine=fsdp2", *SAID, verb="grpo")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    predicted, measured = peaks(runs.folder / "run", metrics)
    heaviest = measured["dry run: steady step"]
    assert heaviest <= predicted["steady step"] * 1.01
    assert predicted["steady step"] <= 1.10 * heaviest
    assert measured["steady step"] <= heaviest


@pytest.mark.slow
def test_a_value_model_of_its_own_does_not_make_the_first_step_heavier_than_it_is(runs, metrics):
    """In the first update there are no activations, and before it no moments; it was 13 % too high once."""
    write_online(runs, "ppo")
    folder = runs.done("run", *SAID, "ppo.value=own", verb="ppo")
    predicted, measured = peaks(folder, metrics)
    assert predicted["first step"] == pytest.approx(measured["first step"], rel=0.01)
    assert predicted["steady step"] == pytest.approx(measured["steady step"], rel=0.02)
