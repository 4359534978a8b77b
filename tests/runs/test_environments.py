"""Completions of several turns: environments answer, and nothing of their words is trained."""

from pathlib import Path

import pytest
from small_runs import ONLINE, curve, dies_at, run_in, steps

from memtrain.errors import DataError, RecipeError

RECIPE = (
    ONLINE
    + """
rewards:
  functions: [{{function: "{file}:heard"}}, {{function: "{file}:short", weight: 0.1}}]
  environment: {{path: "{file}:Echo", max_turns: 3}}
"""
)
FILE = """
class Echo:
    def reset(self, prompt, answer, seed):
        self.turns, self.word = [], " ok" if seed % 2 else " no"

    def step(self, text):
        self.turns.append(text)
        return self.word * len(self.turns)

class Late:
    def step(self, text):
        return 7

def heard(completion, environment):
    return completion.count(" ok") + 0.1 * len(environment.turns)

def short(completions):
    return [-len(text) / 50 for text in completions]
"""
TURNS = (
    *("generate.stop=[a, e, i, o, t, '1', '2', '4']", "generate.max_tokens=24", "length.max_length=160"),
    *("grpo.beta=0.1", "grpo.steps_per_rollout=2", "grpo.importance_correction=token_truncate"),
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    (folder / "echo.py").write_text(FILE)
    return folder


def run(folder: Path, cache: Path, *overrides: str, name: str = "run") -> list[dict]:
    recipe = RECIPE.format(method="grpo", cache=cache, file=cache / "echo.py")
    return run_in(folder, "grpo", recipe, (*TURNS, *overrides), name)


def test_a_conversation_is_trained_as_it_was_sampled_and_goes_on_after_a_kill(tmp_path: Path, cache: Path):
    """The trainer's log-probs of the model's own tokens are the sampler's: the context is the same, and no
    token of the environment is among them. Killed in the middle of a rollout, the run is the same."""
    whole = run(tmp_path, cache, name="whole")
    first = steps(whole)[0]
    assert 1.5 < first["turns"] <= 3
    assert first["environment_tokens"] > 1
    assert all(line["mismatch/max"] < 1e-4 for line in steps(whole))
    with dies_at(3):
        run(tmp_path, cache, name="again")
    assert curve(run(tmp_path, cache, name="again")) == curve(whole)
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1]


def test_how_rows_are_laid_out_does_not_move_the_curve(tmp_path: Path, cache: Path):
    short = "train.max_steps=2"
    plain = run(tmp_path, cache, short, name="plain")
    apart = run(tmp_path, cache, short, "length.padding_free=false", "train.micro_batch_size=3", name="apart")
    for one, other in zip(curve(plain), curve(apart), strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=2e-6)


@pytest.mark.slow
def test_two_processes_hold_the_conversations_of_one(tmp_path: Path, cache: Path):
    """The main process asks the environments for both; each writes half of the groups, by their own seeds."""
    one = run(tmp_path, cache, "train.max_steps=2", name="one")
    two = run(tmp_path, cache, "train.max_steps=2", "cluster.processes=2", name="two")
    for name in ("turns", "environment_tokens", "reward"):
        assert steps(two)[0][name] == pytest.approx(steps(one)[0][name])
    for first, second in zip(curve(one), curve(two), strict=True):
        assert second == pytest.approx(first, rel=2e-4, abs=2e-6)


def test_zero_std_groups_are_replaced_by_other_prompts(tmp_path: Path, cache: Path):
    """Some completions have a k: a few groups are alike at first."""
    (cache / "rare.py").write_text("def rare(completion):\n    return float('k' in completion)\n")
    given = (
        f"rewards.functions=[{cache}/rare.py:rare]",
        *("rewards.environment=null", "train.max_steps=1", "grpo.steps_per_rollout=1"),
        *("generate.stop=[]", "generate.max_tokens=10"),
    )
    plain = steps(run(tmp_path, cache, *given, name="plain"))[0]
    other = steps(run(tmp_path, cache, *given, "grpo.dynamic_sampling=4", name="dynamic"))[0]
    assert plain["zero_std_groups"] > 0
    assert other["groups_resampled"] >= plain["zero_std_groups"] * 4
    assert other["zero_std_groups"] < plain["zero_std_groups"]
    assert other["reward"] == pytest.approx(other["rewards/rare"])


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("{file}:heard", RecipeError, "is not an environment: it is not a class with a method `step`"),
        ("{file}:Nobody", RecipeError, "has no class 'Nobody'"),
        ("{file}:Late", DataError, "step returned a int"),
        ("Echo", RecipeError, "'Echo' is not a class"),
    ],
)
def test_an_environment_that_cannot_answer_is_reported(
    override: str, error: type[Exception], words: str, tmp_path: Path, cache: Path
):
    path = override.format(file=cache / "echo.py")
    given = (f"rewards.environment={path}", f"rewards.functions=[{cache}/echo.py:short]")
    with pytest.raises(error, match=words.replace("(", r"\(")):
        run(tmp_path, cache, *given)
