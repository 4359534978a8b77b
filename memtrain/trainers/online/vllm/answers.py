"""Completions of another program, taken only where every id, count, length and number is possible.

A server is somebody's, and an engine may be broken: one NaN, one id beyond the vocabulary or one completion
of another prompt would be trained on. Nothing is mended here, nothing left out: an answer is right, or a
fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from memtrain.trainers.online.generation.protocol import Finish, Group, Sample, Sampling

ROUNDING = 1e-3
"""Nats by which a log-prob may lie above 0: a log-softmax in bfloat16 rounds the last digit. Taste."""

NO_PROBABILITY = -9999.0
"""What vLLM's server writes in place of minus infinity (serving_completion.py, vLLM 0.32). A token that was
drawn had a probability; the ratio to such a one is no finite number."""

SHOWN = 120
"""Letters of a wrong value that are shown."""


class Impossible(Exception):
    """An answer that no engine gives which does as it was asked."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine was asked for."""

    sampling: Sampling
    vocab_size: int
    room: int | None
    """Tokens of a prompt with its completion that it takes; None: not said, so that max_tokens ends all."""
    has_logprobs: bool
    """Whether the log-probs were asked for."""

    def samples(self, given: object, group: Group) -> list[Sample]:
        """The completions of a group, each `{ids, logprobs, finish}`, in order. Raises: Impossible."""
        found = items(given, "the completions")
        if len(found) != group.count:
            raise Impossible(f"{len(found)} completions came, and {group.count} were asked")
        return [self.sample(fields(one, "a completion"), group) for one in found]

    def sample(self, given: Mapping[str, object], group: Group) -> Sample:
        """One completion. Raises: Impossible."""
        ids = tuple(whole(one, "a token id") for one in items(given.get("ids"), "the token ids"))
        if not 0 < len(ids) <= self.sampling.max_tokens:
            raise Impossible(
                f"a completion has {len(ids):,} tokens, and max_tokens is {self.sampling.max_tokens:,}"
            )
        if beyond := [one for one in ids if not 0 <= one < self.vocab_size]:
            raise Impossible(f"token id {beyond[0]} is outside of the vocabulary of {self.vocab_size:,}")
        logprobs = (math.nan,) * len(ids)
        if self.has_logprobs:
            logprobs = tuple(logprob(one) for one in items(given.get("logprobs"), "the log-probs"))
            if len(logprobs) != len(ids):
                raise Impossible(f"{len(logprobs):,} log-probs came with {len(ids):,} tokens")
        return Sample(ids, logprobs, self._finish(given.get("finish"), ids, group))

    def _finish(self, given: object, ids: Sequence[int], group: Group) -> Finish:
        """Why the completion ended, which its tokens must bear out."""
        stops, limit = self.sampling.stop_ids, self.sampling.max_tokens
        if any(one in stops for one in ids[:-1]):
            raise Impossible("a completion goes on after a token that ends it")
        if self.room is not None:
            limit = min(limit, self.room - len(group.prompt_ids))
        possible = {
            "stop": ids[-1] in stops,
            "string": bool(self.sampling.stop_strings),
            "length": len(ids) >= limit,
        }
        if not isinstance(given, str) or not possible.get(given, False):
            raise Impossible(f"a completion of {len(ids):,} tokens cannot have ended by {shown(given)}")
        return cast(Finish, given)


def of_choice(choice: Mapping[str, object], sampling: Sampling) -> dict[str, object]:
    """A choice of /v1/completions in the form of `Asked.sample`. Raises: Impossible."""
    finish, reason = choice.get("finish_reason"), choice.get("stop_reason")
    if finish == "stop" and isinstance(reason, str):
        if reason not in sampling.stop_strings:
            raise Impossible(f"a completion is said to have ended by {shown(reason)}, which was not asked")
        finish = "string"
    beside = choice.get("logprobs")
    given = None if beside is None else fields(beside, "logprobs").get("token_logprobs")
    return {"ids": choice.get("token_ids"), "logprobs": given, "finish": finish}


def choices_of(answer: Mapping[str, object], group: Group) -> list[dict[str, Any]]:
    """The choices of an answer in the order of their `index`, each there once. Raises: Impossible."""
    found = [fields(one, "a choice") for one in items(answer.get("choices"), "choices")]
    numbers = sorted(whole(one.get("index"), "the index of a choice") for one in found)
    if numbers != list(range(group.count)):
        raise Impossible(f"choices {shown(numbers)} came, and {group.count} were asked")
    for one in found:
        read = one.get("prompt_token_ids")
        if read is not None and read != list(group.prompt_ids):
            raise Impossible("another prompt was read than the one that was sent")
    return sorted(found, key=lambda one: one["index"])


def logprob(value: object) -> float:
    """A log-prob of a token that was drawn. Raises: Impossible where it is null, NaN, infinite or above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Impossible(f"a log-prob is {shown(value)}")
    if not NO_PROBABILITY < value <= ROUNDING:
        raise Impossible(
            f"a log-prob is {shown(value)}; a token that was drawn has one above {NO_PROBABILITY:g}, up to 0"
        )
    return float(value)


def whole(value: object, what: str) -> int:
    """A whole number. Raises: Impossible."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Impossible(f"{what} is {shown(value)}, no whole number")
    return value


def items(value: object, what: str) -> list[object]:
    """A list. Raises: Impossible."""
    if not isinstance(value, list):
        raise Impossible(f"{what}: {shown(value)} came in place of a list")
    return cast(list[object], value)


def fields(value: object, what: str) -> dict[str, Any]:
    """An object of JSON. Raises: Impossible."""
    if not isinstance(value, dict):
        raise Impossible(f"{what}: {shown(value)} came in place of an object")
    return cast(dict[str, Any], value)


def shown(value: object) -> str:
    """A wrong value, as far as a message has room for it."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
