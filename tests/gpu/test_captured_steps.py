"""Steps that are replayed from CUDA graphs, on a GPU: to the bit those of the same passes by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.model.heads import captured_passes

pytestmark = pytest.mark.gpu
ONE_ORDER = "train.deterministic=true"
TREATED = [
    ("sft", (ONE_ORDER,)),
    ("sft", (ONE_ORDER, "length.packing=bfd")),
    ("sft", (ONE_ORDER, "length.padding_free=false")),
    ("sft", (ONE_ORDER, "train.micro_batch_size=2")),
    ("sft", (ONE_ORDER, "model.adapter={r: 8}")),
    ("sft", (ONE_ORDER, "model.adapter={r: 8, dropout: 0.1}")),
    ("sft", (ONE_ORDER, "model.adapter={r: 8, kind: dora}", "memory.activation_checkpointing=on")),
    ("sft", (ONE_ORDER, "optim.neftune_alpha=5")),
    ("sft", (ONE_ORDER, "memory.optimizer_offload=on")),
    ("dpo", (ONE_ORDER,)),
    ("dpo", (ONE_ORDER, "length.shared_prompts=false", "dpo.reference=copy")),
    ("kto", (ONE_ORDER,)),
    ("reward", (ONE_ORDER,)),
    ("distill", (ONE_ORDER, "distill.teacher=builtin:tiny")),
    # Completions are no part of a deterministic plan on a GPU; these are made up.
    ("grpo", ()),
    ("rloo", ()),
    ("ppo", ()),
    ("online_dpo", ()),
]


@pytest.mark.parametrize(("method", "overrides"), TREATED)
def test_replayed_steps_have_the_bits_of_those_by_hand(
    plan_of: Callable[..., Plan],
    steps_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    cuda: torch.device,
    method: str,
    overrides: tuple[str, ...],
):
    plan = plan_of(method, *overrides)
    assert plan.settings.step_graphs
    replayed = steps_of(plan, count=4)
    captured = replayed.built.scorer.captured
    assert captured.is_on
    assert captured.num_replayed > 0
    monkeypatch.setattr(captured_passes, "MOST_SHAPES", 0)
    by_hand = steps_of(plan, count=4)
    assert by_hand.built.scorer.captured.num_replayed == 0
    assert replayed.losses == by_hand.losses
    for name, weight in by_hand.weights.items():
        assert torch.equal(replayed.weights[name], weight), name


def test_a_pass_that_waits_for_the_device_is_left_to_the_host(
    plan_of: Callable[..., Plan],
    steps_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    cuda: torch.device,
):
    plan = plan_of("sft", ONE_ORDER)
    first = steps_of(plan)
    plain = captured_passes.CapturedPasses.hidden

    def waits(self: Any, base: Any, backbone: Any, run: Any, inputs: Any) -> Any:
        def reading(inputs: Any) -> Any:
            hidden = run(inputs)
            hidden.detach().sum().item()
            return hidden

        return plain(self, base, backbone, reading, inputs)

    monkeypatch.setattr(captured_passes.CapturedPasses, "hidden", waits)
    made = steps_of(plan)
    assert not made.built.scorer.captured.is_on
    assert made.losses == pytest.approx(first.losses, rel=1e-3)
