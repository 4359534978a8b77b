"""The protocol of generation back ends: groups of completions of a prompt, by token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Finish = Literal["stop", "string", "length"]


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt, and the number of its completions."""

    prompt_ids: tuple[int, ...]
    count: int
    seed: int
    """Completion i depends on weights, prompt, sampling, this seed and i, and on nothing that runs beside."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Choice of the next token. Defaults change nothing of the model's distribution."""

    max_tokens: int
    temperature: float = 1.0
    """0: the likeliest token."""
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion; they are part of it."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a completion, with the token that completes them."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be chosen: the sampler's distribution is then not the trainer's."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts that were chosen for the tokens of a completion and its prompt, by layer; -1: not known."""

    prompt: NDArray[np.int16]
    """[tokens of the prompt, layers, experts of a token]"""
    own: NDArray[np.int16]
    """[tokens of the completion, ...]; the last token was not read, and has none."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token under softmax(logits / temperature), before penalty and truncation, as the trainer
    computes it for the same weights. At temperature 0: under softmax(logits)."""
    finish: Finish
    """`stop`: a stop token; `string`: a stop string; `length`: cut at max_tokens."""
    context_ids: tuple[int, ...] = ()
    """Of several turns: all tokens behind the prompt, the environment's among them. Else empty."""
    is_written: tuple[bool, ...] = ()
    """Of several turns: which of these the model wrote; they are `token_ids`, in order."""
    num_turns: int = 1
    routes: Routes | None = None
    """The experts of its tokens, where the sampler records them."""


OnDone = Callable[[int, list[Sample]], None]
"""Called with the number of a group and its completions, as soon as all of them are there."""


class Sampler(Protocol):
    """A generation back end. It samples with the weights that the training module has now."""

    @property
    def name(self) -> str:
        """Name in the plan."""
        ...

    def generate(
        self, groups: Sequence[Group], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[list[Sample]]:
        """The completions of each group, in order."""
        ...
