"""`memtrain verify` passes what is exact, and every one of its checks catches a strategy that is not."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memtrain.cli.app import run
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.batches import answer_batch, collate
from memtrain.trainers.build import components as build_module
from memtrain.trainers.build import step as step_module
from memtrain.trainers.losses.head import request as request_module
from memtrain.trainers.model.attention import own_positions
from memtrain.trainers.model.attention.row_layout import Layout, packed_layout
from memtrain.trainers.model.loading import load
from memtrain.trainers.model.offload import activations as activations_module
from memtrain.trainers.model.offload.checkpointing import recompute
from memtrain.trainers.optim.in_backward import InBackward
from memtrain.trainers.tools.verify import resume_check as resuming
from memtrain.trainers.tools.verify.contamination import Seen
from memtrain.trainers.tools.verify.result import Verification
from memtrain.trainers.tools.verify.shrink import _nearer, shrunk_config
from memtrain.trainers.tools.verify.verify import verify

MakePlan = Callable[..., Plan]
EVERYTHING = (
    "memory.loss=chunked",
    "memory.loss_chunk_size=32KiB",
    "memory.activation_checkpointing=on",
    "memory.activation_offloading=on",
    "train.micro_batch_size=3",
)


def outcomes(made: Verification) -> dict[str, str]:
    return {check.name: check.outcome for check in made.checks}


def failed(made: Verification) -> set[str]:
    assert made.is_exact == ("fail" not in outcomes(made).values())
    return {name for name, outcome in outcomes(made).items() if outcome == "fail"}


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("reward", "rloo")]


@pytest.mark.parametrize("method", ["sft", "dpo", "kto", "grpo", *SLOW])
def test_a_plan_with_all_strategies_is_exact(plan_of: MakePlan, method: str):
    made = verify(plan_of(method, *EVERYTHING))
    assert set(outcomes(made).values()) == {"pass"}, [check.says for check in made.checks]
    assert made.planned.layer_passes == 2
    assert made.planned.offloaded_bytes > 0
    if method != "reward":
        assert made.planned.largest_logits_rows < made.plain.largest_logits_rows


def test_bfloat16_is_held_to_the_plain_run_in_bfloat16(plan_of: MakePlan):
    made = verify(plan_of("dpo", "model.dtype=bfloat16"))
    assert made.is_exact
    gradients = next(check for check in made.checks if check.name == "gradients")
    assert gradients.limit is not None
    assert 1e-4 < gradients.limit < 0.2, "of the size of bfloat16's rounding"


def one_segment(lengths: Any) -> Any:
    return packed_layout([sum(lengths)])


def test_rows_that_see_each_other_are_caught(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch):
    """The layout says that two rows are one: found by the probe, and by the numbers."""
    plan = plan_of("sft")

    def mixed(lengths: list[int]) -> Any:
        return _attending_as(one_segment(lengths), packed_layout(lengths))

    monkeypatch.setattr(collate, "packed_layout", mixed)
    assert {"contamination", "gradients", "loss"} <= failed(verify(plan))


def _attending_as(other: Layout, layout: Layout) -> Layout:
    """The layout with another's attention, and its own positions and predictions."""

    class Mixed(Layout):
        predicted_rows = property(lambda _: layout.predicted_rows)
        predicting_rows = property(lambda _: layout.predicting_rows)

    held = {one.name: getattr(other, one.name) for one in fields(other)}
    return Mixed(**held | {"position_ids": layout.position_ids})


def test_answers_that_see_each_other_are_caught(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch):
    real = answer_batch.shared_layout

    def chained(groups: Any) -> Any:
        """The answers of a group as one that goes on: the second sees the first."""
        layout = real(groups)
        joined = real([(prompt, [sum(answers)]) for prompt, answers in groups])
        return _attending_as(joined, layout)

    monkeypatch.setattr(answer_batch, "shared_layout", chained)
    assert "contamination" in failed(verify(plan_of("dpo")))


PHI = (
    "{model_type: phi3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,"
    " num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: false, pad_token_id: null,"
    " max_position_embeddings: 4096, original_max_position_embeddings: 96,"
    " rope_parameters: {rope_type: longrope, rope_theta: 10000.0, original_max_position_embeddings: 96,"
    " short_factor: [1.0, 1.0, 1.0, 1.0], long_factor: [4.0, 4.0, 4.0, 4.0]}}"
)
"""Rows of builtin:arithmetic are of some 60 to 140 tokens: some are long to it, some are not."""


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_rows_that_are_longer_than_a_models_first_context_are_exact(plan_of: MakePlan, method: str):
    made = verify(plan_of(method, f"model.config={PHI}"))
    assert set(outcomes(made).values()) == {"pass"}, [check.says for check in made.checks]


def test_rows_turned_by_their_neighbours_are_caught_although_both_sides_do_it(
    plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch
):
    """transformers' own positions on both sides, and no check at start-up: only a row alone tells."""
    for module in (load, own_positions):
        monkeypatch.setattr(module, "take_own_positions", lambda model: None)
    monkeypatch.setattr(build_module, "verify_isolation", lambda *args, **more: None)
    monkeypatch.setattr(build_module, "verify_padding", lambda *args, **more: None)
    assert "alone" in failed(verify(plan_of("sft", f"model.config={PHI}")))


def test_a_shrunk_models_rows_come_to_what_its_rows_came_to():
    """Rows of 8,192 tokens passed 4,096; rows of 192 pass 96. Heads of 16 have 8 angles."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    config = {
        "model_type": "phi3",
        "hidden_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "original_max_position_embeddings": 4096,
        "rope_parameters": rope | {"original_max_position_embeddings": 4096},
    }
    small = _nearer(shrunk_config(config), 8192, 192)
    assert small["original_max_position_embeddings"] == 96
    assert small["rope_parameters"]["original_max_position_embeddings"] == 96
    assert len(small["rope_parameters"]["long_factor"]) == 8
    assert _nearer(shrunk_config(config), 4096, 192)["original_max_position_embeddings"] == 4096


def test_a_wrong_log_prob_is_caught(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch):
    """One nat in 300 on every token: a loss of differences does not see it, and its gradients neither."""
    real = request_module.linear_logprob

    def shifted(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        # The start-up check of the head, which makes no gradients, would find it first.
        return made._replace(logp_N=made.logp_N + 1 / 300) if torch.is_grad_enabled() else made

    plan = plan_of("kto", "memory.loss=chunked", "kto.reference=copy")
    monkeypatch.setattr(request_module, "linear_logprob", shifted)
    assert "log-probs" in failed(verify(plan))


def test_a_wrong_loss_is_caught(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch):
    real = request_module.linear_nll

    def scaled(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        return made._replace(loss=made.loss * 1.001)

    plan = plan_of("sft", "memory.loss=chunked")
    monkeypatch.setattr(request_module, "linear_nll", scaled)
    assert failed(verify(plan)) == {"loss", "gradients"}


class _Louder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.001


def test_a_gradient_that_is_wrong_alone_is_caught(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch):
    """Checkpointing whose backward pass is off by a thousandth: no loss and no log-prob moves."""
    real = activations_module.checkpoint_layers

    def broken(model: nn.Module, every: int, *_: object) -> Any:
        return real(model, every, lambda layer, *inputs: _Louder.apply(recompute(layer, *inputs)))

    plan = plan_of("sft", "memory.activation_checkpointing=on")
    monkeypatch.setattr(activations_module, "checkpoint_layers", broken)
    assert failed(verify(plan)) == {"gradients"}


def test_an_update_that_is_wrong_alone_is_caught(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch):
    """Steps in the backward pass that forget every tenth of a gradient."""
    real = InBackward._made

    def forgetful(self: InBackward, parameter: Any) -> None:
        parameter.grad.view(-1)[::10] = 0
        real(self, parameter)

    plan = plan_of("sft", "optim.in_backward=on", "optim.max_grad_norm=null", "train.micro_batch_size=6")
    monkeypatch.setattr(InBackward, "_made", forgetful)
    assert "update" in failed(verify(plan))


def test_a_checkpoint_that_forgets_the_optimizer_is_caught(
    plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch
):
    real = resuming.restore

    def without_optimizer(checkpoint: Any, model: nn.Module, optimizer: Any, *rest: Any, **more: Any) -> None:
        real(checkpoint, model, optimizer, *rest, **more)
        optimizer.state.clear()

    monkeypatch.setattr(resuming, "restore", without_optimizer)
    assert failed(verify(plan_of("sft"))) == {"resume"}


def test_a_strategy_that_never_acts_is_caught(plan_of: MakePlan, monkeypatch: pytest.MonkeyPatch):
    plan = plan_of("sft", "memory.activation_checkpointing=on")
    monkeypatch.setattr(
        step_module, "apply_checkpointing_and_offload", lambda *args: SimpleNamespace(offloader=None)
    )
    made = verify(plan)
    assert failed(made) == {"ran"}
    assert "activation_checkpointing did not act" in made.checks[-2].says


def test_a_probe_that_sees_nothing_move_is_blind():
    assert Seen(0.0, 1e-6, 0.5, 2, 2).fault == ""
    assert "sees nothing" in Seen(0.0, 1e-6, 0.0, 2, 2).fault
    assert "attends to another" in Seen(float("nan"), 1e-6, 0.5, 2, 2).fault


def test_one_row_is_not_called_free_of_contamination(plan_of: MakePlan):
    made = verify(plan_of("sft", "train.batch_size=1"))
    assert outcomes(made)["contamination"] == "not run"
    assert made.is_exact


def test_a_shrunk_model_has_a_layer_of_each_kind():
    config = {
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 3,
        "num_experts": 64,
        "vocab_size": 1000,
    }
    small = shrunk_config(config)
    assert small["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert small["num_hidden_layers"] == 3
    assert small["num_attention_heads"] == 4 * small["num_key_value_heads"]
    assert small["hidden_size"] == 64
    assert small["num_experts"] == 4
    assert small["vocab_size"] == 1000
    assert shrunk_config({"text_config": config, "other": 1}) == {"text_config": small, "other": 1}


RECIPE = """
method: sft
model: {{path: builtin:tiny}}
data: {{train: {{source: builtin:arithmetic, limit: 40}}, cache_dir: {folder}/cache}}
length: {{max_length: 256, packing: bfd}}
cluster: {{device: cpu, threads: 1}}
"""


def test_the_command_ends_with_1_where_a_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "my.yaml").write_text(RECIPE.format(folder=tmp_path))
    words = ["verify", str(tmp_path / "my.yaml"), "--shrink"]
    assert run(words) == 0
    assert "gives the numbers of the plain run" in capsys.readouterr().out
    monkeypatch.setattr(collate, "packed_layout", one_segment)
    assert run([*words, "--json"]) == 1
    reported = json.loads(capsys.readouterr().out)
    assert reported["version"] == 1
    assert reported["is_exact"] is False
    found = {check["name"]: check["found"] for check in reported["checks"]}
    assert len(reported["gradients"]) > 10, "one for each parameter"
    assert max(reported["gradients"].values()) >= found["gradients"] > 1e-4
