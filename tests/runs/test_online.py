"""`memtrain grpo|rloo` from end to end: they learn, stop, go on, and say what is wrong."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sampled import sampled
from small_runs import ONLINE, curve, dies_at, run_in, steps

from memtrain.cli.commands.train import run_recipe
from memtrain.errors import DataError, RecipeError
from memtrain.memory.plan.plan import read_plan
from memtrain.trainers.model.offload import activations
from memtrain.trainers.model.offload.offloader import Offloader

METHODS = ("grpo", "rloo")
RECIPE = (
    ONLINE
    + """
rewards:
  functions: [{{function: "{rewards}:has_k"}}, {{function: "{rewards}:short", weight: 0.5}}]
"""
)
REWARDS = """
def has_k(completion):
    return float("k" in completion)

def short(completions, completion_ids, answer):
    assert all(text.startswith("####") for text in answer)
    return [-len(text) / 50 for text in completions]
"""


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


def bits(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def assert_same_curve(one: list[dict], other: list[dict]) -> None:
    torch.testing.assert_close(torch.tensor(curve(one)), torch.tensor(curve(other)), rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_tells_rewards_and_shows_completions(method: str, tmp_path: Path, cache: Path):
    reported = run(tmp_path, method, cache)
    for line in steps(reported):
        assert math.isfinite(line["loss"])
        assert line["grad_norm"] > 0
        assert line["reward"] == pytest.approx(line["rewards/has_k"] + 0.5 * line["rewards/short"], abs=1e-6)
        assert 0 < line["completion_tokens"] <= 10
        assert line["entropy"] > 0
        # One update a rollout by the sampler's own weights: nothing is clipped, nothing mismatched.
        assert line["clip_high"] == line["clip_low"] == 0
        assert line["mismatch/max"] < 1e-4
    held_out = [line for line in reported if line["kind"] == "eval"]
    assert [line["step"] for line in held_out] == [2, 4]
    assert held_out[0]["loss"] == pytest.approx(-held_out[0]["reward"])
    assert ("kl" in steps(reported)[-1]) == (method == "rloo")
    shown = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in shown] == sorted([1, 2, 3, 4] * 4)
    assert shown[0]["rewards"].keys() == {"has_k", "short"}
    assert shown[0]["prompt"].endswith("\n")


WAYS = (
    ("length.shared_prompts=false",),
    ("length.padding_free=false",),
    ("train.micro_tokens=140",),
    ("train.micro_batch_size=1",),
    ("generate.rows=3",),
    ("generate.backend=transformers",),
    ("memory.activation_checkpointing=on", "memory.checkpoint_every=2"),
)


@pytest.mark.parametrize(
    ("method", "overrides"),
    [
        *sampled([("grpo", way) for way in WAYS]),
        *(pytest.param("rloo", way, marks=() if way in WAYS[:1] else pytest.mark.slow) for way in WAYS),
    ],
    ids=str,
)
def test_how_it_is_computed_does_not_move_the_curve(
    method: str,
    overrides: tuple[str, ...],
    tmp_path: Path,
    cache: Path,
    plain_run: Callable[[str], list[dict]],
):
    """Also defects C1 and C7 of TRL 1.16: checkpointing lost after generation, gradients not averaged."""
    plain = plain_run(method)
    other = run(tmp_path, method, cache, *overrides, name="other")
    assert_same_curve(plain, other)
    assert [line["reward"] for line in steps(plain)] == [line["reward"] for line in steps(other)]


@pytest.mark.parametrize("how", ["on", "off"])
def test_activations_that_wait_on_the_host_do_not_move_a_run_with_a_reference_beside_it(
    how: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """With checkpointing the inputs of layers travel, without it all that layers keep. The reference's passes
    keep nothing: as many bytes come back as without it."""
    made: list[Offloader] = []

    def offloader(*args, **named) -> Offloader:
        made.append(Offloader(*args, **named, min_bytes=256))
        return made[-1]

    monkeypatch.setattr(activations, "Offloader", offloader)
    given = ("grpo.beta=0.1", "train.max_steps=2", "eval.every_steps=null")
    offloads = ("memory.activation_offloading=on", f"memory.activation_checkpointing={how}")
    plain = run(tmp_path, "grpo", cache, *given, name="plain")
    travelled = run(tmp_path, "grpo", cache, *given, *offloads, name="travelled")
    assert curve(plain) == curve(travelled)
    assert steps(plain)[-1]["kl"] > 0
    (own,) = made
    assert own.traffic.back_bytes > 0
    assert own.pool.used_bytes == 0
    run(tmp_path, "grpo", cache, "grpo.beta=0", *given[1:], *offloads, name="alone")
    assert made[-1].traffic.out_bytes == pytest.approx(own.traffic.out_bytes, rel=0.1)


def test_a_shared_prompt_is_forwarded_once(tmp_path: Path, cache: Path):
    """entropy_coef keeps every answer in: 4 prompts and 16 answers of 10 tokens at most."""
    shared = steps(run(tmp_path, "grpo", cache, "grpo.entropy_coef=1e-9", name="shared"))
    apart = run(
        tmp_path, "grpo", cache, "grpo.entropy_coef=1e-9", "length.shared_prompts=false", name="apart"
    )
    for one, other in zip(shared, steps(apart), strict=True):
        assert one["tokens"] == one["rollout_tokens"]
        prompts = one["tokens"] - one["loss_tokens"]
        assert other["tokens"] == 4 * prompts + one["loss_tokens"]


SELDOM = [
    pytest.param(loss, marks=pytest.mark.slow)
    for loss in ("grpo", "bnpo", "dr_grpo", "sapo", "luspo", "vespo")
]


@pytest.mark.parametrize("loss", ["dapo", "cispo", *SELDOM])
def test_answers_without_signal_may_be_left_out(loss: str, tmp_path: Path, cache: Path):
    """An entropy term too small to see keeps them in: same gradients, more tokens."""
    only_k = (f"grpo.loss={loss}", "rewards.functions.1.weight=0", "train.max_steps=3")
    left_out = run(tmp_path, "grpo", cache, *only_k, name="out")
    kept = run(tmp_path, "grpo", cache, *only_k, "grpo.entropy_coef=1e-12", name="in")
    assert_same_curve(left_out, kept)
    assert sum(line["tokens"] for line in steps(left_out)) < sum(line["tokens"] for line in steps(kept))
    assert steps(left_out)[0]["completions_trained"] < 1


WINDOW = ("grpo.steps_per_rollout=2", "grpo.updates_per_rollout=2", "train.max_steps=8", "grpo.beta=0.1")
RLOO_WINDOW = tuple(override.replace("grpo", "rloo") for override in WINDOW)


@pytest.mark.parametrize(
    ("method", "window"), [("grpo", WINDOW), *sampled([("rloo", RLOO_WINDOW), ("grpo", ())])]
)
def test_a_run_that_goes_on_in_the_middle_of_a_rollout_is_the_run_that_was_never_stopped(
    method: str, window: tuple[str, ...], tmp_path: Path, cache: Path
):
    """Defect C12 of TRL 1.16: the buffer was not saved, and a resumption made another rollout."""
    whole = run(tmp_path, method, cache, *window, name="whole")
    with dies_at(3):
        run(tmp_path, method, cache, *window, name="again")
    again = run(tmp_path, method, cache, *window, name="again")
    assert curve(again) == curve(whole)
    assert bits(tmp_path / "again") == bits(tmp_path / "whole")
    shown = [(tmp_path / name / "completions.jsonl").read_text() for name in ("whole", "again")]
    assert shown[0] == shown[1]


def test_a_rollout_is_trained_on_as_often_as_asked(tmp_path: Path, cache: Path):
    """Two steps of each of two updates: a new rollout every fourth step, whose facts are reported once."""
    reported = steps(run(tmp_path, "grpo", cache, *WINDOW))
    assert ["reward" in line for line in reported] == [True, False, False, False] * 2
    # In the second update the policy has moved: ratios differ from 1.
    assert reported[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert abs(reported[2]["ratio"] - 1) > 1e-4


def test_the_adapter_learns_and_the_weights_below_it_stay(tmp_path: Path, cache: Path):
    """Defects C3 and C4 of TRL 1.16: merging into the base at each rollout, and casting it, moved it."""
    given = ("model.adapter={kind: lora, r: 4}", "grpo.beta=0.1", "save.every_steps=4")
    reported = run(tmp_path, "grpo", cache, *given)
    assert read_plan(tmp_path / "run" / "plan.json").settings.reference == "adapter_off"
    # At the first step policy and reference are one: B is zero.
    assert steps(reported)[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps(reported)[-1]["kl"] > 0
    held = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in held.values())
    assert any(tensor.abs().sum() > 0 for name, tensor in held.items() if "lora_B" in name)


def test_the_reward_rises_where_it_is_easy(tmp_path: Path, cache: Path):
    """Short completions are reached by ending early: 20 steps are enough to see it."""
    given = ("rewards.functions.0.weight=0", "train.max_steps=20", "save.every_steps=20", "optim.lr=2e-2")
    reported = steps(run(tmp_path, "rloo", cache, *given, "rloo.beta=0", "optim.schedule=constant"))
    first, last = (sum(line["reward"] for line in part) / 5 for part in (reported[:5], reported[-5:]))
    assert last > first + 0.05


@pytest.mark.parametrize(
    ("method", "overrides", "words"),
    [
        ("grpo", ("train.batch_size=18",), "18 completions is not a whole number of groups of 4"),
        ("grpo", ("generate.max_tokens=128",), "leaves no room for a prompt"),
        ("grpo", ("grpo.importance_correction=token_mask", "generate.top_p=0.9"), "top_k, top_p and min_p"),
        ("grpo", ("grpo.sapo_temperature_pos=2.0",), "has no effect on loss: dapo"),
        ("grpo", ("grpo.reference=precomputed", "grpo.beta=0.1"), "generated during training"),
        ("grpo", ("train.batch_tokens=100", "train.batch_size=null"), "counts a step in completions"),
        ("grpo", ("length.packing=bfd",), "length.packing has no effect on grpo"),
        (
            "grpo",
            ("grpo.loss=vespo", "grpo.importance_correction=sequence_mask"),
            "set importance_correction: token_mask",
        ),
        ("grpo", ("grpo.beta=0.1", "grpo.kl=k1"), "its gradient, that of log p of a sampled token"),
        ("grpo", ("grpo.beta=0.1", "grpo.kl=k2", "grpo.unbiased_kl=true"), "k2 is unbiased"),
        (
            "grpo",
            ("grpo.importance_correction_max=3.0",),
            "importance_correction: auto is off, because the trained module",
        ),
        ("rloo", ("rloo.reward_clip=[1.0, 0.0]",), "is not a range"),
        ("rloo", ("rewards.functions.0.columns={completion: nothing}",), "needs the column 'nothing'"),
    ],
)
def test_a_recipe_that_cannot_be_meant_is_refused(
    method: str, overrides: tuple[str, ...], words: str, tmp_path: Path, cache: Path
):
    with pytest.raises(RecipeError) as caught:
        run(tmp_path, method, cache, *overrides)
    assert words in caught.value.text()


def test_a_reward_that_cannot_be_called_is_reported_with_its_line_before_anything_is_loaded(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("memtrain.cli.launch.local.start", lambda *given, **named: pytest.fail("started"))
    recipe = tmp_path / "grpo.yaml"
    text = RECIPE.format(method="grpo", cache=cache, rewards=cache / "rewards.py")
    recipe.write_text(text.replace("functions: [", "functions: [length, "))
    with pytest.raises(RecipeError) as caught:
        run_recipe("grpo", str(recipe), [], run_dir=str(tmp_path / "run"))
    assert "reward 'length' needs longest and room, which the rows do not have" in caught.value.text()
    line = next(n for n, line in enumerate(recipe.read_text().splitlines(), 1) if "functions:" in line)
    assert f"grpo.yaml:{line}:15" in caught.value.text()


def test_a_reward_that_fails_ends_the_run_in_words(tmp_path: Path, cache: Path):
    (tmp_path / "bad.py").write_text("def bad(completion):\n    return 1 / 0\n")
    with pytest.raises(DataError) as caught:
        run(tmp_path, "grpo", cache, f"rewards.functions.0.function={tmp_path / 'bad.py'}:bad")
    assert "reward 'bad' raised ZeroDivisionError" in caught.value.text()
    assert f"{tmp_path / 'bad.py'}:2" in caught.value.text()


def test_completions_are_judged_as_soon_as_their_group_is_written(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """One group at a time is written; when all are, the calls about each have begun. Held-out ones wait."""
    from memtrain.trainers.online.rollout.reward_scoring import RewardScoring

    begun = []
    plain = RewardScoring.score

    def verdicts(self, feed, rows, samples, early=None, environments=None):
        begun.append(sorted(early.begun) if early is not None else [])
        return plain(self, feed, rows, samples, early)

    monkeypatch.setattr(RewardScoring, "score", verdicts)
    run(tmp_path, "grpo", cache, "generate.rows=4", "train.max_steps=2")
    assert begun == [[("has_k", number) for number in range(4)]] * 2 + [[]]


@pytest.mark.parametrize(("method", "passes"), [("grpo", 0), ("rloo", 0)])
def test_no_pass_is_made_that_nothing_needs(
    method: str, passes: int, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    from memtrain.trainers.online.rollout.scoring_passes import Passes

    made = []
    plain = Passes._ask
    monkeypatch.setattr(Passes, "_ask", lambda *given: made.append(given) or plain(*given))
    run(tmp_path, method, cache, f"{method}.beta=0.0", "train.max_steps=2")
    assert len(made) == passes
    run(tmp_path, method, cache, f"{method}.beta=0.1", "train.max_steps=2", name="with")
    assert made
