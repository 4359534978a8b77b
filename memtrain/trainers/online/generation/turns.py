"""Completions of several turns: the model writes, an environment answers, until one of them is done.

Every token that the model wrote keeps its log-prob; the environment's tokens are context, and are never
trained. A turn is sampled after everything before it: the prompt, earlier turns and the environment's words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from memtrain.memory.plan.plan import Plan
from memtrain.recipes.sections.rewards import Rewards
from memtrain.trainers.build.components import Built
from memtrain.trainers.online.generation.distributed_sampler import Generating
from memtrain.trainers.online.generation.environment_words import words_of_environment
from memtrain.trainers.online.generation.protocol import Finish, Group, Sample, Sampling
from memtrain.trainers.online.rewards.environment import (
    EnvironmentClass,
    Words,
    check_environment,
    load_environment,
    replies,
)
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.seed import derive_seed

MOST_SEED = 2**31
"""Seeds that `reset` is given are below: what most generators take."""


class WritesWords(Protocol):
    """Words of an environment as tokens, and turns of the model as text."""

    def ids(self, words: str | Sequence[str], *, closes_turn: bool) -> list[int]:
        """Tokens of the environment's words up to the model's next turn; `closes_turn`: no token ended the
        model's last one."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Text of a turn of the model."""
        ...


@dataclass(slots=True)
class Episode:
    """A completion on its way."""

    group: Group
    number: int
    """Place in the group."""
    environment: Any = None
    """Object of the user's class, on the main rank."""
    ids: list[int] = field(default_factory=list[int])
    is_written: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    num_turns: int = 0
    turn: tuple[int, ...] = ()
    """Tokens of the last turn."""
    ended_by: Finish = "stop"
    """End of the last turn: a token of the model's, or a string."""
    has_failed: bool = False
    finish: Finish | None = None

    def sample(self) -> Sample:
        """The completion: the model's tokens, and all tokens with a mask of the model's."""
        assert self.finish is not None, "The conversation is over."
        written = tuple(one for one, is_own in zip(self.ids, self.is_written, strict=True) if is_own)
        own = Sample(written, tuple(self.logprobs), self.finish)
        return replace(
            own, context_ids=tuple(self.ids), is_written=tuple(self.is_written), num_turns=self.num_turns
        )


@dataclass(frozen=True, slots=True)
class Conversations:
    """Completions with their environments, group by group."""

    samples: list[list[Sample]]
    environments: list[list[Any]]
    """Objects of the user's class; None on other ranks than the main one."""
    metrics: dict[str, float]
    """Mean turns and environment's tokens of a completion, and failures of environments, if any."""


@dataclass(frozen=True, slots=True)
class TurnWriter:
    """Holds conversations between the model and environments. Called by all ranks together."""

    generating: Generating
    environment: EnvironmentClass
    rewards: Rewards
    words: WritesWords
    ranks: Ranks

    def write(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        given: Callable[[int], Mapping[str, Any]],
    ) -> Conversations:
        """The completions of each group; `given`: what `reset` may take of a group's row.

        `sampling.max_tokens` bounds a whole completion, the environment's words included.
        """
        episodes = [
            self._begun(group, number, given(at))
            for at, group in enumerate(groups)
            for number in range(group.count)
        ]
        limit = self.environment.recipe.turn_tokens or sampling.max_tokens
        first = replace(sampling, max_tokens=min(limit, sampling.max_tokens))
        for episode, sample in zip(episodes, self._flat(groups, first), strict=True):
            self._take(episode, sample, sampling.max_tokens)
        live = self._answered(episodes, sampling.max_tokens)
        while live:
            rest = max(sampling.max_tokens - len(one.ids) for one in live)
            turn = replace(sampling, max_tokens=min(limit, rest))
            for episode, sample in zip(live, self._flat([_next(one) for one in live], turn), strict=True):
                self._take(episode, sample, sampling.max_tokens)
            live = self._answered(live, sampling.max_tokens)
        return _grouped(groups, episodes)

    def _flat(self, groups: Sequence[Group], sampling: Sampling) -> list[Sample]:
        return [sample for of_group in self.generating.all(groups, sampling) for sample in of_group]

    def _begun(self, group: Group, number: int, given: Mapping[str, Any]) -> Episode:
        if not self.ranks.is_main:
            return Episode(group, number)
        seed = derive_seed(group.seed, "environment", number) % MOST_SEED
        return Episode(group, number, self.environment.begin({**given, "seed": seed}))

    def _take(self, episode: Episode, sample: Sample, max_tokens: int) -> None:
        """Put a turn of the model behind what is there, as far as there is room."""
        room = max_tokens - len(episode.ids)
        ids = sample.token_ids[:room]
        episode.ids += ids
        episode.is_written += [True] * len(ids)
        episode.logprobs += sample.logprobs[:room]
        episode.num_turns += 1
        if sample.finish == "length" or len(ids) < len(sample.token_ids):
            episode.finish = "length"
        else:
            episode.ended_by = sample.finish
            episode.turn = tuple(ids)

    def _answered(self, episodes: Sequence[Episode], max_tokens: int) -> list[Episode]:
        """Episodes that go on: environments are asked about turns that ended, their words put behind."""
        asked = [one for one in episodes if one.finish is None]

        def ask() -> list[tuple[Words | None, bool]]:
            turns = [(one.environment, self.words.text(one.turn)) for one in asked]
            return replies(self.environment, turns, self.rewards)

        answers = self.ranks.broadcast(ask() if self.ranks.is_main else [])
        for episode, (words, has_failed) in zip(asked, answers, strict=True):
            episode.has_failed = has_failed
            if words is None or episode.num_turns == self.environment.recipe.max_turns:
                episode.finish = episode.ended_by
                continue
            ids = self.words.ids(words, closes_turn=episode.ended_by == "string")
            if len(episode.ids) + len(ids) >= max_tokens:
                # No token is left for another turn.
                episode.finish = "length"
                continue
            episode.ids += ids
            episode.is_written += [False] * len(ids)
        return [one for one in asked if one.finish is None]


def _next(episode: Episode) -> Group:
    """The conversation so far as a prompt of its own, with a seed of its own for each turn."""
    seed = derive_seed(episode.group.seed, "turn", episode.num_turns, episode.number)
    return Group((*episode.group.prompt_ids, *episode.ids), 1, seed)


def _grouped(groups: Sequence[Group], episodes: Sequence[Episode]) -> Conversations:
    left = iter(episodes)
    by_group = [[next(left) for _ in range(group.count)] for group in groups]
    return Conversations(
        [[one.sample() for one in of_group] for of_group in by_group],
        [[one.environment for one in of_group] for of_group in by_group],
        _metrics(episodes),
    )


def _metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    count = max(1, len(episodes))
    read = sum(one.is_written.count(False) for one in episodes)
    failed = sum(one.has_failed for one in episodes)
    means = {"turns": sum(one.num_turns for one in episodes) / count, "environment_tokens": read / count}
    return means | ({"environment_errors": float(failed)} if failed else {})


def open_turns(
    plan: Plan, built: Built, ranks: Ranks, generating: Generating, columns: Sequence[str]
) -> TurnWriter | None:
    """Writer of conversations of a recipe with an environment; None of others. `columns`: of the rows.

    Raises: RecipeError when the class is not there, or takes what the rows do not have; DataError when the
    chat template cannot continue a conversation.
    """
    rewards = plan.recipe.rewards
    if rewards is None or rewards.environment is None:
        return None
    environment = load_environment(rewards.environment)
    check_environment(environment, columns)
    words = words_of_environment(
        built.tokenizer,
        plan.data.turn_end,
        environment.role,
        plan.recipe.data.chat_template_kwargs,
        is_chat=plan.data.turn_end is not None,
    )
    return TurnWriter(generating, environment, rewards, words, ranks)
