"""Environments of the package `verifiers` (0.1), turn by turn, with its rubric as the reward. No torch."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

from memtrain.errors import DataError, LaunchError, words_of
from memtrain.recipes.sections.evaluation import REWARD
from memtrain.trainers.online.rewards.tool_calls import tool_calls


class Verifiers:
    """An environment of the package `verifiers` (0.1: `MultiTurnEnv`, `ToolEnv`), installed beside memtrain.

    A subclass names it: `env_id = "wordle"`, `args = {...}` for its `load_environment`, `role` of its
    messages ("user", or "tool" of a ToolEnv). Its rows are written by `write_rows`; its rubric is the reward:

        async def score(environment):
            return await environment.reward()
    """

    env_id: ClassVar[str] = ""
    args: ClassVar[Mapping[str, Any]] = {}
    role = "user"

    @classmethod
    def environment(cls) -> Any:
        """verifiers' own object, loaded once.

        Raises: LaunchError where the package is not installed, or is one without these environments.
        """
        return _loaded(cls.env_id, json.dumps(dict(cls.args), sort_keys=True))

    @classmethod
    def write_rows(cls, path: str | Path, limit: int | None = None) -> int:
        """Write the environment's data as rows for `data.train` (JSON Lines); how many there are."""
        rows = _rows(cls.environment())
        chosen = range(len(rows) if limit is None else min(limit, len(rows)))
        with Path(path).open("w", encoding="utf-8") as file:
            for at in chosen:
                row = rows[at]
                tools = _definitions(cls.environment(), row)
                own = {"prompt": row["prompt"], "answer": row.get("answer", ""), "example": at}
                file.write(json.dumps(own | ({"tools": tools} if tools else {}), default=_plain) + "\n")
        return len(chosen)

    def reset(self, example: int) -> None:
        """Begin with a row of the environment's data, by its number."""
        row = dict(_rows(self.environment())[example])
        self.state = _state(row)
        self.is_set_up = False

    async def step(self, text: str) -> list[str] | None:
        """The environment's messages after a turn of the model; None where it is over.

        Raises: DataError where a message has another role than the class says.
        """
        made, state = self.environment(), await self.set_up()
        turn = _assistant(text)
        before = [*self._messages()]
        state["trajectory"].append({"prompt": before, "completion": [turn], "extras": {}})
        state["turn"] = len(state["trajectory"])
        state["completion"] = [*before, turn][len(state["prompt"]) :]
        if await _is_over(made, state):
            return None
        given = await made.env_response([*before, turn], state)
        # Earlier releases of 0.1 return the state beside the messages.
        messages = [_message(one) for one in (given[0] if isinstance(given, tuple) else given)]
        if isinstance(given, tuple):
            self.state = state = given[1]
        state["completion"] = [*state["completion"], *messages]
        if state.get("final_env_response") is not None or not messages:
            return None
        for one in messages:
            if _field(one, "role") != self.role:
                raise DataError(
                    f"{self.env_id} answers with role {_field(one, 'role')}, and the class has {self.role}",
                    "rewards.environment",
                    f'set `role = "{_field(one, "role")}"` in the class',
                )
        return [str(_field(one, "content")) for one in messages]

    async def reward(self) -> float:
        """The reward of the conversation by the environment's rubric. A turn that was cut is not in it."""
        rubric: Any = self.environment().rubric
        state = await self.set_up()
        scored = await rubric.score_rollout(state)
        return float((scored or state)[REWARD])

    async def set_up(self) -> Any:
        """The state, with what the environment puts into it at the beginning."""
        if not self.is_set_up:
            self.state = await self.environment().setup_state(self.state) or self.state
            self.is_set_up = True
        return self.state

    def _messages(self) -> Iterator[Any]:
        """The conversation before the model's turn."""
        yield from self.state["prompt"]
        yield from self.state["completion"] or ()


@cache
def _loaded(env_id: str, args: str) -> Any:
    try:
        import verifiers  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise LaunchError(
            "verifiers is not installed", "rewards.environment", "pip install 'verifiers<0.2'"
        ) from None
    package: Any = verifiers
    try:
        load = package.load_environment
    except AttributeError as error:
        version = getattr(package, "__version__", "of this version")
        # Where a package that it needs is missing, verifiers says so in this error.
        is_plain = "has no attribute" in str(error)
        why = "its environments run the model themselves" if is_plain else words_of(error)
        raise LaunchError(
            f"verifiers {version} has no load_environment: {why}",
            "rewards.environment",
            "pip install 'verifiers<0.2', or write the environment as a class with `step`",
        ) from None
    made = load(env_id, **json.loads(args))
    if not hasattr(made, "env_response"):
        raise LaunchError(
            f"{env_id} is a {type(made).__name__}, which answers no turns (it has no env_response)",
            "rewards.environment",
            "take an environment of several turns: a MultiTurnEnv or a ToolEnv",
        )
    return made


def _rows(made: Any) -> Any:
    """The training data of an environment."""
    return made.get_dataset()


def _definitions(made: Any, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of an environment as chat templates take them."""
    info: Any = row.get("info")
    given: Any = (info or {}).get("tool_defs") if isinstance(info, dict) else None
    tools = given or getattr(made, "tool_defs", None) or getattr(made, "oai_tools", None) or []
    plain = [_plain(one) for one in tools]
    return [
        one
        if "function" in one
        else {"type": "function", "function": {k: v for k, v in one.items() if v is not None}}
        for one in plain
    ]


def _plain(value: Any) -> Any:
    """A message or a definition as a mapping."""
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value


def _state(row: dict[str, Any]) -> Any:
    """A state as verifiers' `init_state` makes it, without a client: memtrain writes the turns."""
    fields = {
        "input": row,
        "prompt": [_message(one) for one in row["prompt"]],
        "answer": row.get("answer", ""),
        "info": row.get("info") or {},
        "task": row.get("task", "default"),
        "trajectory": [],
        "completion": [],
        "responses": [],
        "turn": 0,
        "is_completed": False,
        "is_truncated": False,
        REWARD: None,
        "metrics": None,
        "error": None,
        "final_env_response": None,
        "timing": _timing(),
    }
    kind = getattr(_types(), "State", dict)
    return kind(fields)


def _timing() -> Any:
    """The times of a rollout, none of them measured here: an object, or a mapping before verifiers 0.1.13.

    Rubrics write the time of scoring into it.
    """
    kind = getattr(_types(), "RolloutTiming", None)
    if inspect.isclass(kind) and hasattr(kind, "model_validate"):
        return kind()
    return {"start_time": time.time(), "generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0}


def _types() -> Any:
    import verifiers.types as types  # pyright: ignore[reportMissingImports]

    return types


KINDS = {
    "user": "UserMessage",
    "system": "SystemMessage",
    "assistant": "AssistantMessage",
    "tool": "ToolMessage",
}


def _message(given: Any) -> Any:
    """A message as the installed release has it: an object, or a mapping in earlier ones."""
    if not isinstance(given, Mapping):
        return given
    kind = getattr(_types(), KINDS.get(str(given["role"]), ""), None)
    has_fields = inspect.isclass(kind) and hasattr(kind, "model_validate")
    return cast(Any, kind).model_validate(dict(given)) if has_fields else dict(given)


def _assistant(text: str) -> Any:
    """A turn of the model as a message, with its tool calls."""
    try:
        calls = tool_calls(text)
    except ValueError:
        calls = []
    given: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        given["tool_calls"] = [
            {"id": f"call_{at}", "name": one.name, "arguments": json.dumps(one.arguments)}
            for at, one in enumerate(calls)
        ]
    return _message(given)


async def _is_over(made: Any, state: Any) -> bool:
    """Whether the environment ends here. Earlier releases take the messages too."""
    takes = inspect.signature(made.is_completed).parameters
    if "messages" in takes:
        return bool(await made.is_completed(state["completion"], state))
    return bool(await made.is_completed(state))


def _field(message: Any, name: str) -> Any:
    return message[name] if isinstance(message, Mapping) else getattr(message, name)
