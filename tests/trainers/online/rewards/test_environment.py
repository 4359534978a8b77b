"""The shipped example: a calculator that answers, and a reward that reads it."""

from pathlib import Path

import pytest

from memtrain.errors import DataError, RecipeError
from memtrain.recipes.sections.rewards import Environment, RewardFunction, Rewards
from memtrain.trainers.online.rewards.answer import Answer
from memtrain.trainers.online.rewards.declared import check_declared_environment
from memtrain.trainers.online.rewards.environment import check_environment, load_environment, replies
from memtrain.trainers.online.rewards.functions import load_functions
from memtrain.trainers.online.rewards.score import score

EXAMPLE = Path(__file__).parents[4] / "examples" / "calculator.py"


def test_the_calculator_answers_and_its_rewards_read_it():
    """48 / 2 = 24; a turn that ends elsewhere is the last one."""
    names = ("right", "asked")
    rewards = Rewards(functions=tuple(RewardFunction(function=f"{EXAMPLE}:{name}") for name in names))
    made = load_environment(Environment(path=f"{EXAMPLE}:Calculator"))
    check_environment(made, ["answer"])
    first, second = made.begin({"prompt": "x", "seed": 1}), made.begin({"prompt": "x", "seed": 2})
    turns = [(first, "half is <<48/2="), (second, "I do not know")]
    assert replies(made, turns, rewards) == [("24>>", False), (None, False)]
    answers = [
        Answer("x", text, (1,), {"answer": "so 48/2 is #### 24", "environment": environment})
        for text, environment in (("half is <<48/2=24>>24", first), ("I do not know", second))
    ]
    assert score(answers, load_functions(rewards), rewards).value_RF.tolist() == [[1.0, 1 / 3], [0.0, 0.0]]


def test_a_class_that_needs_what_rows_do_not_have_is_reported(tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "class Own:\n    def reset(self, secret): ...\n    def step(self, text): ...\n"
    )
    made = load_environment(Environment(path=f"{tmp_path}/own.py:Own"))
    with pytest.raises(RecipeError, match="reset needs secret, which the rows do not have"):
        check_environment(made, ["answer"])


def test_an_environment_that_fails_is_told_with_the_line_of_its_own_file(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text("class Own:\n    def step(self, text):\n        return text[10]\n")
    made = load_environment(Environment(path=f"{path}:Own"))
    rewards = Rewards(functions=(RewardFunction(function=f"{EXAMPLE}:right"),))
    with pytest.raises(DataError, match="Own.step raised IndexError") as error:
        replies(made, [(made.begin({"prompt": "x", "seed": 1}), "short")], rewards)
    assert error.value.faults[0].where == f"{path}:3 (rewards.environment)"


CLASSES = """
import random
from elsewhere import Imported, Base
from memtrain.environments import Tools

class Own:
    def reset(self, prompt, seed, secret, hint=None): ...
    def step(self, text): ...

class Heir(Own):
    pass

class Silent:
    def reset(self): ...

class Tool(Tools):
    functions = ()

class Far(Base):
    pass

class Assigned:
    step = Own.step

def step(text): ...

Made = type("Made", (), {})
raise SystemExit("this file was run")
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Gone", "has no class 'Gone'"),
        ("Silent", "is not an environment"),
        ("step", "is not an environment"),
        ("Own", "reset needs secret, which the rows do not have"),
        ("Heir", "reset needs secret, which the rows do not have"),
    ],
)
def test_a_class_is_judged_by_its_text_before_the_run(tmp_path: Path, name: str, words: str):
    """`memtrain check` looked at reward functions alone, and the run was launched for nothing."""
    (tmp_path / "own.py").write_text(CLASSES)
    with pytest.raises(RecipeError, match=words):
        check_declared_environment(Environment(path=f"{tmp_path}/own.py:{name}"), ["answer"])


@pytest.mark.parametrize("name", ["Own", "Heir", "Tool", "Far", "Assigned", "Made", "Imported"])
def test_what_its_text_cannot_say_is_left_to_the_run(tmp_path: Path, name: str):
    (tmp_path / "own.py").write_text(CLASSES)
    check_declared_environment(Environment(path=f"{tmp_path}/own.py:{name}"), ["secret"])
    check_declared_environment(Environment(path=f"{tmp_path}/own.py:{name}"))
    check_declared_environment(Environment(path=f"some.package:{name}"), [])


def test_a_file_that_is_missing_or_no_python_is_reported(tmp_path: Path):
    path = tmp_path / "own.py"
    with pytest.raises(RecipeError, match="there is no file"):
        check_declared_environment(Environment(path=f"{path}:Own"))
    path.write_text("class Own:\n    def step(self, text)\n")
    with pytest.raises(RecipeError, match="is not valid Python") as caught:
        check_declared_environment(Environment(path=f"{path}:Own"))
    assert caught.value.faults[0].where == f"{path}:2"
