"""`router_replay` through the command line: the losses of the routers' own choices, resumed, and refused."""

from __future__ import annotations

import pytest
from shared_out import assert_same_curve, stop_after, write_online

MIXTURE = (
    "model.config={model_type: qwen3_moe, hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 24, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, num_experts: 6, "
    "num_experts_per_tok: 2}"
)
TWICE = (MIXTURE, "grpo.updates_per_rollout=2", "train.max_steps=4", "save.every_steps=1", "save.keep=9")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo", "ppo"])
def test_choices_of_the_same_weights_move_nothing(runs, curve_of, method: str) -> None:
    """One update a rollout: the policy of the update is that of the sampler."""
    write_online(runs, method)
    said = (MIXTURE, f"{method}.updates_per_rollout=1")
    plain = runs.done("plain", *said, verb=method)
    replayed = runs.done("replayed", *said, f"{method}.router_replay=true", verb=method)
    assert_same_curve(curve_of(replayed), curve_of(plain), rel=1e-6)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_recorded_choices(runs, curve_of, monkeypatch) -> None:
    """The checkpoint stands between two updates from one rollout."""
    write_online(runs, "grpo")
    said = (*TWICE, "grpo.router_replay=true")
    whole = runs.done("whole", *said, verb="grpo")
    ranks = runs.fork_ranks("two", 2, *said, verb="grpo")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert_same_curve(curve_of(runs.folder / "two"), curve_of(whole), rel=2e-4)
    stop_after(runs, "run", 2, 1, monkeypatch, *said, verb="grpo")
    ranks = runs.fork_ranks("run", 2, *said, verb="grpo")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert curve_of(runs.folder / "run") == curve_of(runs.folder / "two")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "the model has no experts"),
        ((MIXTURE, "generate.backend=transformers"), "does not say the experts of its tokens"),
        ((MIXTURE, "train.router_aux_loss_coef=0.1"), "counts the routers' own choices"),
        ((MIXTURE, "generate.backend=vllm"), "come without the experts"),
    ],
)
def test_it_is_refused_where_nothing_records_the_choices(
    runs, overrides: tuple[str, ...], words: str
) -> None:
    write_online(runs, "grpo")
    refused = runs.run("run", *overrides, "grpo.router_replay=true", "--dry-run", verb="grpo")
    assert refused.code != 0
    assert words in " ".join(refused.err.split())
