"""verifiers' environments turn by turn, against a stand-in of the interface of verifiers 0.1."""

import asyncio
import json
import sys
from types import ModuleType

import pytest

from memtrain.errors import DataError, LaunchError
from memtrain.trainers.online.rewards import verifiers_adapter
from memtrain.trainers.online.rewards.verifiers_adapter import Verifiers


class Rubric:
    async def score_rollout(self, state):
        # As verifiers 0.1.8 to 0.1.12 do, whose states have it from the beginning.
        state["timing"]["scoring_ms"] = 1.0
        state["timing"]["total_ms"] += state["timing"]["scoring_ms"]
        said = [one["content"] for one in state["completion"] if one["role"] == "assistant"]
        state["reward"] = float(state["answer"] in said[-1]) + len(state["trajectory"]) / 10


class Guess:
    """Says higher until the number is there, at most three turns, as a MultiTurnEnv."""

    rubric = Rubric()
    tool_defs = [{"name": "look", "description": "d", "parameters": {}}]

    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": f"guess {n}"}], "answer": str(n)} for n in (4, 7)]

    async def setup_state(self, state):
        state["asked"] = 0

    async def is_completed(self, state):
        return len(state["trajectory"]) == 3 or state["answer"] in state["completion"][-1]["content"]

    async def env_response(self, messages, state, **kwargs):
        assert [one["role"] for one in messages[-1:]] == ["assistant"]
        state["asked"] += 1
        return [{"role": "user", "content": f"higher ({len(messages)})"}]


@pytest.fixture
def package(monkeypatch):
    """A module `verifiers` with State and load_environment, and nothing of an earlier test."""
    made, types = ModuleType("verifiers"), ModuleType("verifiers.types")
    made.load_environment = lambda env_id, **args: Guess()
    types.State = dict
    monkeypatch.setitem(sys.modules, "verifiers", made)
    monkeypatch.setitem(sys.modules, "verifiers.types", types)
    verifiers_adapter._loaded.cache_clear()
    yield made
    verifiers_adapter._loaded.cache_clear()


class Game(Verifiers):
    env_id = "guess"


def test_a_conversation_goes_turn_by_turn_and_the_rubric_reads_it_whole(package):
    """Two turns: the first is answered, the second is right: 1 + 2 / 10."""
    made = Game()
    made.reset(example=1)
    assert asyncio.run(made.step("is it 5?")) == ["higher (2)"]
    assert asyncio.run(made.step("it is 7")) is None
    assert made.state["asked"] == 1
    assert [one["role"] for one in made.state["completion"]] == ["assistant", "user", "assistant"]
    assert asyncio.run(made.reward()) == pytest.approx(1.2)


def test_its_data_become_rows_of_conversations_with_their_tools(package, tmp_path):
    assert Game.write_rows(tmp_path / "rows.jsonl", limit=1) == 1
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["prompt"] == [{"role": "user", "content": "guess 4"}]
    assert (row["answer"], row["example"]) == ("4", 0)
    assert row["tools"] == [{"type": "function", "function": Guess.tool_defs[0]}]


def test_messages_of_another_role_than_the_class_says_are_an_error(package):
    class Tool(Game):
        role = "tool"

    made = Tool()
    made.reset(example=0)
    with pytest.raises(DataError, match="answers with role user, and the class has tool"):
        asyncio.run(made.step("is it 5?"))


def test_what_cannot_be_used_is_reported_with_the_way_out(package, monkeypatch):
    package.load_environment = lambda env_id: object()
    with pytest.raises(LaunchError, match="guess is a object, which answers no turns"):
        Game.environment()
    package.__version__ = "0.4.0"
    del package.load_environment
    with pytest.raises(LaunchError, match="0.4.0 has no load_environment: its environments run the model"):
        Game.environment()

    def lazy(name):
        raise AttributeError(f"To use verifiers.{name}, install as `verifiers[all]`.")

    package.__getattr__ = lazy
    with pytest.raises(
        LaunchError, match=r"has no load_environment: To use .* install as `verifiers\[all\]`"
    ):
        Game.environment()
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(LaunchError, match="verifiers is not installed"):
        Game.environment()
