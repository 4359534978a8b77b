"""Reward functions: found, given what they take, called with deadlines; their faults reported or counted."""

import math
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from memtrain.errors import DataError, RecipeError
from memtrain.recipes.sections.rewards import Rewards
from memtrain.trainers.online.rewards.builtin import (
    exact_answer,
    matches_format,
    plain,
    repetition,
    soft_length,
)
from memtrain.trainers.online.rewards.declared import declared_functions
from memtrain.trainers.online.rewards.functions import check_columns, load_functions
from memtrain.trainers.online.rewards.score import Answer, Early, Scores, score

SOURCE = """
import asyncio, math, time

def one(completion, answer):
    return float(completion == answer)

def many(completions, prompts, answer, scale=1.0):
    return [scale * (c == a) for c, a in zip(completions, answer)]

async def patient(completion):
    await asyncio.sleep(0.01)
    return len(completion)

async def patient_batch(completions):
    await asyncio.sleep(0.01)
    return [len(c) for c in completions]

def everything(completion, **columns):
    return {"score": len(columns), "seen": 2.0}

def breaks(completion):
    return 1 / len(completion)

def hangs(completion):
    time.sleep(0.5 if completion == "a" else 0)
    return 1.0

async def hangs_async(completion):
    await asyncio.sleep(60 if completion == "a" else 0)
    return 1.0

def undecided(completion):
    return {"a": None, "b": math.nan}.get(completion, 1.0)

def short(completions):
    return [1.0]

def absurd(completion):
    return 1e300

def huge(completion):
    return 10 ** 400

def words(completion):
    return "good"

def empty(completion):
    return {"grade": 1}

def own_timeout(completion):
    raise TimeoutError("the judge is busy")

seen = []

def noted(completion):
    seen.append(completion)
    return float(len(completion))

kept = []

async def keeps_its_loop(completion):
    kept.append(asyncio.get_running_loop())
    return float(kept[0] is kept[-1])
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def answers(*completions: str, **columns: object) -> list[Answer]:
    return [Answer("p", text, tuple(range(len(text))), {"answer": "a", **columns}) for text in completions]


def scored(path: Path, name: str, *completions: str, function: dict | None = None, **settings) -> Scores:
    given = {"function": f"{path}:{name}", **(function or {})}
    rewards = Rewards.model_validate({"functions": [given], **settings})
    return score(answers(*completions), load_functions(rewards), rewards)


@pytest.mark.parametrize("name", ["one", "many"])
def test_a_function_is_given_the_columns_it_names(reward_file, name):
    assert scored(reward_file, name, "a", "b").value_RF.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("name", ["patient", "patient_batch"])
def test_async_functions_are_awaited(reward_file, name):
    assert scored(reward_file, name, "a", "bcd").value_RF.tolist() == [[1.0], [3.0]]


def test_args_and_renamed_columns_reach_the_function(reward_file):
    made = scored(reward_file, "many", "p", function={"args": {"scale": 5}})
    assert made.value_RF.tolist() == [[0.0]]
    rewards = Rewards.model_validate(
        {"functions": {"function": f"{reward_file}:one", "columns": {"answer": "solution"}}}
    )
    made = score(answers("x", solution="x"), load_functions(rewards), rewards)
    assert made.value_RF.tolist() == [[1.0]]


def test_a_mapping_is_a_score_and_what_is_reported_beside_it(reward_file):
    made = scored(reward_file, "everything", "a")
    assert made.value_RF.tolist() == [[3.0]]  # prompt, completion_ids, answer
    assert made.metrics["rewards/everything/seen"] == 2.0


def test_a_group_is_judged_while_others_are_written_and_never_twice(reward_file: Path):
    names = ("noted", "many", "breaks")
    rewards = Rewards.model_validate(
        {"functions": [f"{reward_file}:{name}" for name in names], "on_error": "skip"}
    )
    functions = load_functions(rewards)
    early, written = Early(functions, rewards), answers("a", "bb", "", "dddd")
    early.begin(1, written[2:])
    early.begin(1, written[2:])
    until = time.monotonic() + 5
    while len(functions[0].call.__globals__["seen"]) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    assert sorted(functions[0].call.__globals__["seen"]) == ["", "dddd"]
    made = score(written, functions, rewards, group_size=2, early=early)
    alone = score(written, functions, rewards, group_size=2)
    assert made.value_RF.nan_to_num(-1).tolist() == alone.value_RF.nan_to_num(-1).tolist()
    assert made.value_RF[:, 0].tolist() == [1, 2, 0, 4]
    assert made.metrics["rewards/breaks/errors"] == 1
    assert sorted(functions[0].call.__globals__["seen"]) == sorted(2 * ["a", "bb", "", "dddd"])


def test_what_an_async_function_keeps_between_calls_stays_of_one_event_loop(reward_file: Path):
    for _ in range(2):
        assert scored(reward_file, "keeps_its_loop", "a", "b").value_RF.flatten().tolist() == [1, 1]


def test_an_exception_stops_the_run_and_says_where(reward_file):
    with pytest.raises(DataError) as caught:
        scored(reward_file, "breaks", "a", "")
    fault = caught.value.faults[0]
    assert "raised ZeroDivisionError: division by zero (completion 1" in fault.what
    assert fault.where == f"{reward_file}:22"
    assert "rewards.on_error: zero or skip" in fault.fix


def test_exceptions_are_counted_when_they_do_not_stop_the_run(reward_file):
    zero = scored(reward_file, "breaks", "ab", "", on_error="zero")
    assert zero.value_RF.tolist() == [[0.5], [0.0]]
    assert zero.metrics == {"rewards/breaks": 0.25, "rewards/breaks/errors": 1.0}
    skip = scored(reward_file, "breaks", "ab", "", on_error="skip")
    assert math.isnan(skip.value_RF[1, 0])
    assert skip.metrics["rewards/breaks"] == 0.5
    assert skip.metrics["rewards/breaks/no_verdict"] == 1.0


@pytest.mark.parametrize("name", ["hangs", "hangs_async"])
def test_a_call_that_hangs_is_left_at_its_deadline(reward_file, name):
    started = time.monotonic()
    made = scored(reward_file, name, "a", "b", timeout_s=0.05, on_error="skip")
    assert time.monotonic() - started < 0.4
    assert math.isnan(made.value_RF[0, 0])
    assert made.value_RF[1, 0] == 1.0


EXITS = """
import asyncio, sys

def leaves(completion):
    sys.exit(3) if completion == "b" else None
    return 1.0

async def leaves_async(completion):
    await asyncio.sleep(0)
    return leaves(completion)

def all_leave(completions):
    raise KeyboardInterrupt

def says(completion):
    raise ValueError("not \\udce9 a text")
"""


@pytest.fixture
def exits(tmp_path: Path) -> Path:
    path = tmp_path / "exits.py"
    path.write_text(EXITS)
    return path


@pytest.mark.parametrize("name", ["leaves", "leaves_async"])
def test_a_call_that_exits_is_reported_as_that_and_later_calls_are_made(exits: Path, name: str):
    """It was taken for one that hangs; an async one ended the loop that all later calls need."""
    with pytest.raises(DataError) as caught:
        scored(exits, name, "a", "b", timeout_s=30)
    fault = caught.value.faults[0]
    assert "tried to end the process: sys.exit(3) (completion 1" in fault.what
    assert fault.where.startswith(f"{exits}:")
    made = scored(exits, name, "a", "b", "c", timeout_s=30, on_error="zero")
    assert made.value_RF.flatten().tolist() == [1.0, 0.0, 1.0]


def test_a_batched_call_that_interrupts_is_reported(exits: Path):
    with pytest.raises(DataError, match="tried to end the process: KeyboardInterrupt"):
        scored(exits, "all_leave", "a", timeout_s=30)


def test_half_a_letter_in_an_error_is_spelled_out(exits: Path):
    with pytest.raises(DataError) as caught:
        scored(exits, "says", "a")
    assert r"raised ValueError: not \udce9 a text" in caught.value.text()
    caught.value.text().encode()


def test_a_reward_file_that_exits_when_it_is_imported_is_reported(tmp_path: Path):
    (tmp_path / "leaves.py").write_text("raise SystemExit('no licence')")
    with pytest.raises(RecipeError, match="cannot be imported: SystemExit: no licence"):
        load_functions(Rewards.model_validate({"functions": [f"{tmp_path / 'leaves.py'}:score"]}))


def test_a_hanging_call_says_how_long_was_waited(reward_file):
    with pytest.raises(DataError, match="took longer than 0.05 s"):
        scored(reward_file, "hangs", "a", timeout_s=0.05)


def test_a_timeout_of_the_functions_own_is_reported_as_such(reward_file):
    with pytest.raises(DataError, match="raised TimeoutError: the judge is busy"):
        scored(reward_file, "own_timeout", "a")


def test_a_reward_beyond_reason_is_a_fault_as_nan_is(reward_file):
    for name in ("absurd", "huge"):
        with pytest.raises(DataError, match=r"returned (1e\+300|inf)"):
            scored(reward_file, name, "a")
        assert scored(reward_file, name, "a", on_nan="zero").value_RF.tolist() == [[0.0]]


def test_none_is_no_verdict_and_nan_a_fault(reward_file):
    with pytest.raises(DataError, match="returned nan"):
        scored(reward_file, "undecided", "a", "b")
    made = scored(reward_file, "undecided", "a", "b", "c", on_nan="zero")
    assert math.isnan(made.value_RF[0, 0])
    assert made.value_RF[1:, 0].tolist() == [0.0, 1.0]
    assert made.metrics["rewards/undecided/not_finite"] == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [("short", "returned 1 values for 2"), ("words", "returned a str"), ("empty", "without 'score'")],
)
def test_what_is_no_list_of_numbers_is_reported_whatever_the_policy(reward_file, name, message):
    with pytest.raises(DataError, match=message):
        scored(reward_file, name, "a", "b", on_error="skip", on_nan="skip")


def test_all_wrong_functions_are_reported_at_once(reward_file):
    given = [f"{reward_file}:absent", "./nowhere.py:f", {"function": f"{reward_file}:one", "args": {"x": 1}}]
    with pytest.raises(RecipeError) as caught:
        load_functions(Rewards.model_validate({"functions": given}))
    reported = [fault.what for fault in caught.value.faults]
    assert "has no function 'absent'" in reported[0]
    assert "there is no file 'nowhere.py'" in reported[1]
    assert "has no parameter 'x'" in reported[2]


def test_what_a_function_takes_is_read_without_running_its_file(tmp_path: Path, reward_file: Path):
    source = (
        reward_file.read_text() + "\ndef more(completions, /, *rest, key, other=1, **columns):\n    pass\n"
    )
    text = tmp_path / "text.py"
    text.write_text(f"from somewhere import imported\n{source}\nraise SystemExit('this file was run')\n")
    names = ("one", "many", "patient_batch", "everything", "noted")
    read = declared_functions(
        Rewards.model_validate({"functions": [f"{text}:{name}" for name in (*names, "imported")]})
    )
    loaded = load_functions(
        Rewards.model_validate({"functions": [f"{reward_file}:{name}" for name in names]})
    )
    assert sorted(read) == [0, 1, 2, 3, 4]
    for index, function in enumerate(loaded):
        for what in ("takes", "needs", "takes_all", "is_batched"):
            assert getattr(read[index], what) == getattr(function, what)
    functions = [{"function": f"{text}:{name}"} for name in ("more", "nothing")]
    functions += [{"function": "format", "args": {"patern": "x"}}]
    with pytest.raises(RecipeError) as caught:
        declared_functions(Rewards.model_validate({"functions": functions}))
    assert [fault.where for fault in caught.value.faults] == [f"rewards.functions.{n}" for n in range(3)]
    assert [fault.what for fault in caught.value.faults] == [
        "reward 'more' takes completions by position only",
        f"{text} has no function 'nothing'",
        "reward 'format' has no parameter 'patern'",
    ]


def test_a_column_that_is_missing_is_reported_before_the_run():
    functions = load_functions(Rewards.model_validate({"functions": "exact_answer"}))
    check_columns(dict(enumerate(functions)), ["answer"])
    with pytest.raises(RecipeError, match="needs answer, which the rows do not have") as caught:
        check_columns(dict(enumerate(functions)), ["solution"])
    assert "columns: {answer: ...}" in caught.value.faults[0].fix


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"functions": "exact_anwser"}, "unknown built-in reward 'exact_anwser'"),
        ({"functions": ["length", "length"]}, "two rewards have the name 'length'"),
        ({"functions": {"function": "length", "weight": 0}}, "there is nothing to learn"),
        ({"functions": "file.py:a-b"}, "is not a function"),
    ],
)
def test_wrong_sections_are_refused(rewards, message):
    with pytest.raises(ValidationError, match=message):
        Rewards.model_validate(rewards)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("1 + 2 = 3\n#### 3", "#### 3", 1.0),
        ("#### 4\nno: #### 3", "3", 1.0),
        ("#### 1,200.0", "#### 1200", 1.0),
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("#### 3\nor rather \\boxed{4}", "#### 4", 1.0),
        ("\\boxed{x_{1} + 2}", "x_{1}+2", 1.0),
        ("\\boxed{\\boxed{7}", "7", 1.0),
        ("#### $5", "5", 1.0),
        ("#### 50%", "50", 1.0),
        ("\\boxed{50\\%}", "50.0", 1.0),
        ("#### 50%", "0.5", 0.0),
        ("3", "3", 0.0),
        ("#### 3 apples", "3", 0.0),
        ("####", "3", 0.0),
        ("#### 1e999999999", "3", 0.0),
        ("\\boxed{3", "3", 0.0),
    ],
)
def test_exact_answers(completion, answer, expected):
    assert exact_answer(completion, answer) == expected


def test_an_answer_is_read_and_never_run():
    assert plain("__import__('os').system('x')") == "__import__('os').system('x')"
    assert plain("2**999999999") == "2**999999999"


def test_format_length_and_repetition_by_hand():
    assert matches_format("3 - 1 = 2\n#### 2") == 1.0
    assert matches_format("#### 2 or so") == 0.0
    assert [soft_length(range(n), longest=10, room=4) for n in (6, 7, 10, 12)] == [0.0, -0.25, -1.0, -1.0]
    # a b a b a: the 2-grams ab, ba, ab, ba: two of four came before.
    assert repetition("a b a b a", ngram=2) == -0.5
    assert repetition("a b", ngram=3) == 0.0
    # a a a a a: of four 2-grams all but the first came before.
    assert repetition("a a a a A", ngram=2, penalty=2.0) == -1.5
    assert repetition("a b c d e", ngram=2) == 0.0
