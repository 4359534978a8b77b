"""`memtrain online-dpo|ppo` from end to end, judges, and reward models: they learn, stop and go on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sampled import sampled
from small_runs import ONLINE, curve, dies_at, run_in, steps

from memtrain.errors import DataError, RecipeError
from memtrain.memory.plan.plan import read_plan

METHODS = ("online_dpo", "ppo")
RECIPE = (
    ONLINE
    + """
rewards: {{functions: [{{function: "{rewards}:short"}}]}}
"""
)
REWARDS = """
def short(completions):
    return [-len(text) / 50 for text in completions]

def shorter(completions, prompts, answer):
    assert len(completions) == len(prompts) == len(answer)
    return [None if len(a) == len(b) else int(len(b) < len(a)) for a, b in completions]

def first(completions):
    return [0 for _ in completions]

def wrong(completions):
    return ["left" for _ in completions]
"""
OWN_VALUE = ("ppo.value=own",)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def run(folder: Path, method: str, cache: Path, *overrides: str, name: str = "run") -> list[dict]:
    """Train to the end; the lines of the metrics."""
    recipe = RECIPE.format(method=method, cache=cache, rewards=cache / "rewards.py")
    return run_in(folder, method, recipe, overrides, name)


@pytest.fixture(scope="module")
def plain_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    """The lines of a method's run as the recipe has it, which is made once."""
    return functools.cache(lambda method: run(tmp_path_factory.mktemp(method), method, cache))


def test_online_dpo_begins_at_log_2_and_tells_its_pairs(plain_run: Callable[[str], list[dict]]):
    """Policy and reference are one at first: each pair's loss is log 2, and nothing else is in the mean."""
    reported = plain_run("online_dpo")
    first = steps(reported)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["pairs"] == pytest.approx(4 * (1 - first["zero_std_groups"]))
    assert first["completions_trained"] == pytest.approx(first["pairs"] * 2 / 16)
    assert first["pairs/margin"] == pytest.approx(0, abs=1e-4)
    assert steps(reported)[-1]["pairs/margin"] != 0
    assert [line["step"] for line in reported if line["kind"] == "eval"] == [2, 4]


def test_ppo_tells_its_values_and_saves_its_value_model(tmp_path: Path, cache: Path):
    reported = run(tmp_path, "ppo", cache)
    first = steps(reported)[0]
    # The value head begins at 0, and policy and reference are one.
    assert first["value/mean"] == 0
    assert first["kl"] == pytest.approx(0, abs=1e-5)
    assert first["beta"] == 0.05
    assert ["reward" in line for line in steps(reported)] == [True, False, False, False]
    assert abs(steps(reported)[3]["ratio"] - 1) > 1e-4
    head = load_file(tmp_path / "run" / "final" / "value_head.safetensors")
    assert head["weight"].shape == (1, 32)
    assert head["weight"].abs().sum() > 0


def test_a_value_model_of_its_own_leaves_the_policys_trunk_alone(tmp_path: Path, cache: Path):
    """With advantages of 0 (no reward, no KL term) only the value model could move, and it is right at 0."""
    given = (*OWN_VALUE, "ppo.beta=0", "rewards.functions.0.weight=1e-30", "ppo.normalize_advantages=false")
    reported = run(tmp_path, "ppo", cache, *given, "train.max_steps=2")
    assert all(line["grad_norm"] < 1e-6 for line in steps(reported))
    assert read_plan(tmp_path / "run" / "plan.json").settings.value == "own"
    assert (tmp_path / "run" / "final" / "value" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("method", "overrides"),
    sampled(
        [
            ("online_dpo", ("length.shared_prompts=false",)),
            ("online_dpo", ("train.micro_batch_size=1",)),
            ("online_dpo", ("length.padding_free=false",)),
            ("ppo", ("length.padding_free=false",)),
            ("ppo", ("train.micro_batch_size=1",)),
            ("ppo", ("memory.activation_checkpointing=on",)),
        ]
    ),
    ids=str,
)
def test_how_it_is_computed_does_not_move_the_curve(
    method: str,
    overrides: tuple[str, ...],
    tmp_path: Path,
    cache: Path,
    plain_run: Callable[[str], list[dict]],
):
    """Also defects C6 and C7 of TRL 1.16's Online DPO.

    It attended to the pads of shorter prompts, and summed the gradients of micro-batches, without a mean.
    """
    plain = plain_run(method)
    other = run(tmp_path, method, cache, *overrides, name="other")
    torch.testing.assert_close(torch.tensor(curve(plain)), torch.tensor(curve(other)), rtol=3e-4, atol=3e-6)


SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "rloo", "online_dpo")]


@pytest.mark.parametrize("method", ["ppo", *SLOWLY])
def test_a_rehearsal_leaves_no_trace_in_the_numbers(method: str, tmp_path: Path, cache: Path):
    """Completions of full length are tried before step 1, and not one number of the run is another.

    They are written beside the optimizer's states, and stepped over gradients where a step has several
    micro-batches: so heavy is a run from its second step on.
    """
    given = ("train.max_steps=2", "memory.measure_peaks=true", "eval.every_steps=2")
    if method == "ppo":
        given = (*given, "ppo.kl_target=0.1")
    plain = run(tmp_path, method, cache, *given, "memory.preflight=off", name="plain")
    tried = run(tmp_path, method, cache, *given, "memory.preflight=on", name="tried")
    assert curve(tried) == curve(plain)
    (note,) = [line["text"] for line in tried if line["kind"] == "note"]
    assert note.startswith("dry run of completions of full length for the longest prompts, ")
    peaks = {line["phase"]: line["allocated"] for line in tried if line["kind"] == "memory"}
    phases = ("generation", "first step", "steady step", "saving")
    assert all(peaks[f"dry run: {phase}"] > 0 for phase in phases)
    assert peaks["dry run: steady step"] >= peaks["steady step"]
    predicted = read_plan(tmp_path / "tried" / "plan.json").prediction.phases
    (generation,) = [phase.num_bytes for phase in predicted if phase.phase == "generation"]
    assert peaks["dry run: generation"] == pytest.approx(generation, rel=0.05)
    assert peaks["evaluation"] > 0
    files = [tmp_path / name / "final" / "model.safetensors" for name in ("plain", "tried")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_update_on_pairs_forwards_each_prompt_once(tmp_path: Path, cache: Path):
    shared = steps(run(tmp_path, "online_dpo", cache, "train.max_steps=1"))[0]
    apart = steps(
        run(tmp_path, "online_dpo", cache, "train.max_steps=1", "length.shared_prompts=false", name="apart")
    )[0]
    prompts = shared["tokens"] - shared["loss_tokens"]
    assert apart["tokens"] == 2 * prompts + apart["loss_tokens"]


WINDOW = ("steps_per_rollout=2", "updates_per_rollout=2")


@pytest.mark.parametrize(
    ("method", "given"),
    sampled(
        [
            ("online_dpo", WINDOW),
            ("ppo", (*WINDOW, "kl_target=0.01", "kl_horizon=40")),
            ("ppo", (*WINDOW, "value=own")),
        ]
    ),
    ids=str,
)
def test_a_run_that_goes_on_in_the_middle_of_a_rollout_is_the_run_that_was_never_stopped(
    method: str, given: tuple[str, ...], tmp_path: Path, cache: Path
):
    overrides = (*(f"{method}.{one}" for one in given), "train.max_steps=8")
    whole = run(tmp_path, method, cache, *overrides, name="whole")
    with dies_at(5):
        run(tmp_path, method, cache, *overrides, name="again")
    again = run(tmp_path, method, cache, *overrides, name="again")
    assert curve(again) == curve(whole)
    for file in ("final/model.safetensors", "completions.jsonl"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    if method == "ppo":
        betas = [line["beta"] for line in steps(whole) if "beta" in line]
        assert (betas[0] != betas[1]) == ("kl_target=0.01" in given)


def test_a_pairwise_judge_chooses_as_the_reward_of_its_order_does(tmp_path: Path, cache: Path):
    """The judge prefers the shorter of two: its best and worst are those of minus the length."""
    judge = f'{{functions: [{{function: "{cache / "rewards.py"}:shorter", pairwise: true}}]}}'
    by_reward = run(
        tmp_path, "online_dpo", cache, "data.eval_fraction=0", "eval.every_steps=null", name="reward"
    )
    by_judge = run(
        tmp_path,
        "online_dpo",
        cache,
        f"rewards={judge}",
        "data.eval_fraction=0",
        "eval.every_steps=null",
        name="judge",
    )
    assert curve(by_judge) == curve(by_reward)
    assert steps(by_judge)[0]["rewards/shorter"] == pytest.approx(0.5)


def test_a_judge_that_likes_the_first_helps_nobody_when_asked_both_ways(tmp_path: Path, cache: Path):
    judge = f'{{function: "{cache / "rewards.py"}:first", pairwise: true, both_orders: true}}'
    given = (f"rewards={{functions: [{judge}]}}", "data.eval_fraction=0", "eval.every_steps=null")
    reported = steps(run(tmp_path, "online_dpo", cache, *given, "train.max_steps=2"))
    assert [line["zero_std_groups"] for line in reported] == [1.0, 1.0]
    assert [line["grad_norm"] for line in reported] == [0.0, 0.0]


def test_a_judge_that_gives_no_verdict_that_is_one_ends_the_run_in_words(tmp_path: Path, cache: Path):
    judge = f'{{function: "{cache / "rewards.py"}:wrong", pairwise: true}}'
    given = (f"rewards={{functions: [{judge}]}}", "data.eval_fraction=0", "eval.every_steps=null")
    with pytest.raises(DataError) as caught:
        run(tmp_path, "online_dpo", cache, *given)
    assert "judge 'wrong' returned 'left' for pair 0" in caught.value.text()


@pytest.mark.parametrize(
    ("method", "overrides", "words"),
    [
        ("online_dpo", ("generate.num_generations=1",), "generate.num_generations is 1"),
        ("online_dpo", ("online_dpo.beta=0",), "beta"),
        ("online_dpo", ("online_dpo.loss=hinge",), "sigmoid"),
        ("ppo", ("ppo.kl_horizon=5",), "kl_horizon has no effect without kl_target"),
        ("ppo", ("ppo.beta=0", "ppo.kl_target=1.0"), "kl_target adapts beta"),
        ("ppo", ("rewards.functions.0.pairwise=true",), "held-out prompts get one each"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(
    method: str, overrides: tuple[str, ...], words: str, tmp_path: Path, cache: Path
):
    with pytest.raises(RecipeError) as caught:
        run(tmp_path, method, cache, *overrides)
    assert words in caught.value.text()


def test_one_completion_a_prompt_is_enough_for_ppo(tmp_path: Path, cache: Path):
    reported = steps(run(tmp_path, "ppo", cache, "generate.num_generations=1", "train.max_steps=2"))
    assert reported[0]["reward_std"] > 0


@pytest.mark.slow
def test_a_value_model_of_its_own_needs_what_was_predicted(tmp_path: Path, cache: Path):
    """Weights, gradients and moments again, and the activations of both at once; few rows are the longest."""
    wide = (
        "model.config={model_type: qwen3, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 3,"
        " num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32}"
    )
    given = (
        wide,
        "memory.measure_peaks=true",
        "generate.max_tokens=48",
        "train.max_steps=4",
        "eval.every_steps=null",
    )
    needs: dict[str, dict[str, tuple[int, int]]] = {}
    for value in ("shared", "own"):
        reported = run(
            tmp_path, "ppo", cache, *given, f"ppo.value={value}", "data.eval_fraction=0", name=value
        )
        predicted = {
            one.phase: one.num_bytes for one in read_plan(tmp_path / value / "plan.json").prediction.phases
        }
        measured = {line["phase"]: line["allocated"] for line in reported if line["kind"] == "memory"}
        needs[value] = {phase: (predicted[phase], measured[phase]) for phase in ("steady step", "saving")}
        predicted_step, measured_step = needs[value]["steady step"]
        assert measured_step <= predicted_step <= 1.2 * measured_step
    for phase, rel in (("steady step", 0.2), ("saving", 0.01)):
        predicted_more, measured_more = (
            own - shared for own, shared in zip(needs["own"][phase], needs["shared"][phase], strict=True)
        )
        assert predicted_more == pytest.approx(measured_more, rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize("value", ["shared", "own"])
def test_ppo_learns_to_be_short(value: str, tmp_path: Path, cache: Path):
    """Short completions are reached by ending early; 25 rollouts are enough to see it."""
    given = (f"ppo.value={value}", "ppo.beta=0", "train.max_steps=50", "ppo.updates_per_rollout=2")
    reported = run(tmp_path, "ppo", cache, *given, "save.every_steps=50", "optim.schedule=constant")
    rewards = [line["reward"] for line in steps(reported) if "reward" in line]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_a_reward_model_judges_and_is_counted_in_the_plan(tmp_path: Path, cache: Path):
    """A sequence classifier with one number, of the policy's own kind and vocabulary."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from memtrain.recipes.sections.model import Model
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    tokenizer = tokenizer_of(Model(path="builtin:tiny"))
    widths = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 1, "pad_token_id": 0}
    config = AutoConfig.for_model("qwen3", vocab_size=len(tokenizer), **widths, **heads)
    judge = AutoModelForSequenceClassification.from_config(config)
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    given = f"rewards={{functions: [{{model: {tmp_path / 'judge'}}}]}}"
    reported = run(tmp_path, "online_dpo", cache, given, "train.max_steps=2", "eval.every_steps=null")
    assert steps(reported)[0]["rewards/judge"] == pytest.approx(steps(reported)[0]["reward"])
    assert steps(reported)[0]["pairs"] == 4
    owners = {
        one.owner: one.num_bytes for one in read_plan(tmp_path / "run" / "plan.json").prediction.peak.owners
    }
    # A dtype of 4 bytes; the score's row of 16 is the only part that the estimate leaves out.
    weights = sum(one.numel() for one in judge.parameters()) - 16
    assert owners["reward models"] == 4 * weights
