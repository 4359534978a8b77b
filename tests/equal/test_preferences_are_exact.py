"""DPO, KTO and reward models: what saves memory or time gives the loss and gradients of the plain form."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from memtrain.memory.plan.plan import Plan
from memtrain.trainers.tools.verify.compare import gradient_difference
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts
from memtrain.trainers.tools.verify.plans import built_side
from memtrain.trainers.tools.verify.record import Side

PLAIN = ("length.shared_prompts=false", "length.padding_free=false", "train.micro_batch_size=1")
METHODS = ("dpo", "kto", "reward")

MakePlan = Callable[..., Plan]
Step = tuple[float, dict[str, Tensor]]


def step_of(plan: Plan, step: int = 1) -> Step:
    """Loss and gradients of one optimizer step of a plan, away from its start."""
    side = Side(plan, built_side(plan, is_plain=False), Rollouts(), is_plain=False)
    recorded = side.step(step, want_stats=True)
    return recorded.loss, recorded.gradients


@pytest.fixture(scope="module")
def plain(plan_of: MakePlan) -> Callable[[str], Step]:
    """The step of a method with one padded row an answer, worked once."""
    return cache(lambda method: step_of(plan_of(method, *PLAIN)))


def assert_same(found: Step, expected: Step) -> None:
    """Log-probs of answers are sums of up to a hundred: rounding them in float32 moves a loss by 1e-5."""
    assert found[0] == pytest.approx(expected[0], abs=2e-5)
    error, name = gradient_difference(found[1], expected[1])
    assert error < 5e-5, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.micro_batch_size=1",),
        ("train.micro_batch_size=4",),
        ("length.shared_prompts=false",),
        ("length.shared_prompts=false", "train.micro_batch_size=1"),
        ("length.shared_prompts=false", "length.padding_free=false"),
        ("length.pad_to_multiple_of=16",),
        ("model.attention=masked",),
        ("memory.activation_checkpointing=off",),
        ("memory.activation_offloading=on",),
        ("memory.loss=full",),
    ],
    ids=" ".join,
)
def test_every_form_of_a_step_is_the_step_of_one_padded_row_an_answer(
    plan_of: MakePlan, plain: Callable[[str], Step], method: str, overrides: tuple[str, ...]
):
    assert_same(step_of(plan_of(method, *overrides)), plain(method))


@pytest.mark.parametrize("method", METHODS)
def test_lora_with_a_shared_prompt_is_lora_with_one_for_each_answer(plan_of: MakePlan, method: str):
    adapter = "model.adapter={r: 4, target_modules: [q_proj, v_proj, down_proj]}"
    shared, plain = plan_of(method, adapter), plan_of(method, adapter, *PLAIN)
    assert shared.settings.shared_prompts
    assert not plain.settings.shared_prompts
    assert_same(step_of(shared), step_of(plain))


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_reference_asked_before_training_is_the_live_one(plan_of: MakePlan, method: str):
    before = plan_of(method, f"{method}.reference=precomputed")
    live = plan_of(method, f"{method}.reference=copy")
    assert_same(step_of(before), step_of(live))
    assert_same(step_of(before), step_of(live))  # from the cache this time


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_an_adapter_switched_off_is_the_model_before_it(plan_of: MakePlan, method: str):
    adapter = "model.adapter={r: 4}"
    off = plan_of(method, adapter, f"{method}.reference=adapter_off")
    for other in ("copy", "precomputed"):
        assert_same(step_of(plan_of(method, adapter, f"{method}.reference={other}")), step_of(off))


def test_pairs_of_one_prompt_in_one_sequence_are_the_pairs_alone(plan_of: MakePlan, tmp_path: Path):
    rows = [
        f'{{"prompt": "Ana has {n} pens. ", "chosen": "{n} - {k}", "rejected": "{k} + {n} = {k}"}}'
        for n in (3, 4)
        for k in (1, 2, 5)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    data = f"data.train={tmp_path}/pairs.jsonl"
    grouped = plan_of("dpo", data, "length.group_prompts=true", "train.batch_size=2")
    alone = plan_of("dpo", data, *PLAIN)
    assert_same(step_of(grouped, step=0), step_of(alone, step=0))


def test_answers_without_a_prompt_are_rows_of_their_own(plan_of: MakePlan, tmp_path: Path):
    rows = [f'{{"prompt": "", "chosen": "{n} pens", "rejected": "no {n}"}}' for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    data = f"data.train={tmp_path}/pairs.jsonl"
    assert_same(step_of(plan_of("dpo", data), step=0), step_of(plan_of("dpo", data, *PLAIN), step=0))


@pytest.mark.parametrize(
    "knobs",
    [
        "dpo.ld_alpha=0.3",
        "dpo.use_weighting=true",
        "dpo.loss=[sigmoid, sft]",
        "dpo.loss=orpo",
        "dpo.loss=simpo",
        "dpo.loss=ipo",
    ],
)
def test_the_losses_of_pairs_do_not_depend_on_the_micro_batch(plan_of: MakePlan, knobs: str):
    assert_same(step_of(plan_of("dpo", knobs)), step_of(plan_of("dpo", knobs, *PLAIN)))


def test_a_loss_that_sorts_pairs_takes_the_step_whole(plan_of: MakePlan):
    plan = plan_of("dpo", "dpo.loss=aot")
    assert (plan.settings.micro_batch_size, plan.settings.micro_tokens) == (6, None)
    assert step_of(plan)[0] > 0
