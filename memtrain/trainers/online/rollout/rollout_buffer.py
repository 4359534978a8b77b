"""A rollout as training uses it: ragged answers with their log-probs and advantages, as arrays.

It is saved with a checkpoint, so that a run that stopped between two steps of a rollout goes on with the very
same completions.
"""

# A answers, N tokens of all answers end to end, Q prompts, F reward functions.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtrain.trainers.online.generation.protocol import Sample

Ids = NDArray[np.int32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Rollout:
    """The completions of a rollout, with their facts."""

    number: int
    """Number of the rollout in the run."""
    prompt_ids: Ids
    """Prompts end to end."""
    prompt_ptr: Ints
    """[Q + 1]"""
    row_Q: Ints
    """Number of each prompt in its feed."""
    part_A: Ints
    """Optimizer step of the rollout that learns from each answer."""
    prompt_A: Ints
    """The prompt of each answer."""
    ids_N: Ids
    answer_ptr: Ints
    """[A + 1] where each answer's tokens begin."""
    sampler_N: Floats
    """Log-probs as recorded while sampling."""
    is_cut_A: NDArray[np.bool_]
    """Answers that reached the limit."""
    reward_AF: NDArray[np.float64]
    advantage_A: Floats
    is_trained_A: NDArray[np.bool_]
    """Answers that are forwarded; the others would add nothing."""
    old_N: Floats | None = None
    reference_N: Floats | None = None
    is_kept_N: NDArray[np.bool_] | None = None
    """Tokens that a top-entropy mask keeps."""
    value_N: Floats | None = None
    """Expectation of the value model before each token."""
    token_advantage_N: Floats | None = None
    return_N: Floats | None = None
    """Return from each token on: the value model's target."""
    kept: dict[str, float] = field(default_factory=dict)
    """Numbers of the method that follow the rollouts, as they are after this one."""
    norms: list[dict[str, float]] = field(default_factory=list)
    """By part: answers and tokens that the loss is divided by."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the rollout."""
    context_ids: Ids | None = None
    """Of answers of several turns: all their tokens, the environment's among them, end to end. The tokens N
    of every other field are those that the model wrote."""
    context_ptr: Ints | None = None
    """[A + 1] where the tokens of each begin in `context_ids`."""
    is_written: NDArray[np.bool_] | None = None
    """Mask of `context_ids`: tokens that the model wrote."""

    prompt_routes: NDArray[np.int16] | None = None
    """[tokens of `prompt_ids`, layers, experts of a token]: those that the sampler chose."""
    routes_N: NDArray[np.int16] | None = None
    """The same of the tokens of answers; -1 for the last of each, which was not read."""

    @property
    def num_answers(self) -> int:
        """Answers of the rollout."""
        return len(self.prompt_A)

    @property
    def num_prompts(self) -> int:
        """Prompts of the rollout."""
        return len(self.row_Q)

    @property
    def length_A(self) -> Ints:
        """Tokens of each answer."""
        return np.diff(self.answer_ptr)

    def prompt(self, answer: int) -> Ids:
        """Tokens of the prompt of an answer."""
        at = int(self.prompt_A[answer])
        return self.prompt_ids[self.prompt_ptr[at] : self.prompt_ptr[at + 1]]

    def answer(self, answer: int) -> Ids:
        """Tokens of an answer."""
        return self.ids_N[self.answer_ptr[answer] : self.answer_ptr[answer + 1]]

    @property
    def context_length_A(self) -> Ints:  # noqa: N802
        """Tokens of each answer that enter the model."""
        return self.length_A if self.context_ptr is None else np.diff(self.context_ptr)

    def context(self, answer: int) -> tuple[Ids, NDArray[np.bool_]]:
        """(tokens of an answer that enter the model, which of them it wrote)."""
        if self.context_ptr is None or self.context_ids is None or self.is_written is None:
            ids = self.answer(answer)
            return ids, np.ones(len(ids), np.bool_)
        span = slice(int(self.context_ptr[answer]), int(self.context_ptr[answer + 1]))
        return self.context_ids[span], self.is_written[span]

    def tokens_of(self, answers: Ints) -> Ints:
        """Places in `ids_N` of the tokens of some answers, answer after answer."""
        ptr = self.answer_ptr
        spans = [np.arange(int(ptr[one]), int(ptr[one + 1])) for one in answers.tolist()]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def state(self) -> dict[str, Any]:
        """All of it, as a checkpoint holds it."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def window_of(state: Mapping[str, Any]) -> Rollout:
    """The window that a checkpoint holds."""
    return Rollout(**state)


def new_window(
    number: int,
    rows: Sequence[int],
    parts: Sequence[int],
    prompts: Sequence[Sequence[int]],
    samples: Sequence[Sequence[Sample]],
    num_functions: int,
) -> Rollout:
    """A rollout of `prompts` with `samples`, not judged yet; `parts`: which step learns from each prompt."""
    flat = [sample for group in samples for sample in group]
    sizes = [len(group) for group in samples]
    prompt_A = np.repeat(np.arange(len(samples)), sizes)
    count = len(flat)
    has_turns = any(sample.context_ids for sample in flat)
    return Rollout(
        number=number,
        prompt_ids=_ids([token for prompt in prompts for token in prompt]),
        prompt_ptr=_ptr([len(prompt) for prompt in prompts]),
        row_Q=np.array(rows, np.int64),
        part_A=np.array(parts, np.int64)[prompt_A],
        prompt_A=prompt_A,
        ids_N=_ids([token for sample in flat for token in sample.token_ids]),
        answer_ptr=_ptr([len(sample.token_ids) for sample in flat]),
        sampler_N=np.array([x for sample in flat for x in sample.logprobs], np.float32),
        is_cut_A=np.array([sample.finish == "length" for sample in flat], np.bool_),
        reward_AF=np.full((count, num_functions), np.nan),
        advantage_A=np.zeros(count, np.float32),
        is_trained_A=np.ones(count, np.bool_),
        context_ids=_ids([token for sample in flat for token in sample.context_ids]) if has_turns else None,
        context_ptr=_ptr([len(sample.context_ids) for sample in flat]) if has_turns else None,
        is_written=np.array([own for sample in flat for own in sample.is_written], np.bool_)
        if has_turns
        else None,
        **_routes(samples),
    )


def _routes(samples: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """The experts of all tokens, where the sampler recorded them."""
    of_prompts = [group[0].routes for group in samples if group]
    own = [sample.routes for group in samples for sample in group]
    if not own or any(one is None for one in own):
        return {}
    return {
        "prompt_routes": np.concatenate([one.prompt for one in of_prompts if one is not None]),
        "routes_N": np.concatenate([one.own for one in own if one is not None]),
    }


def _ids(tokens: Sequence[int]) -> Ids:
    return np.array(tokens, np.int32)


def _ptr(lengths: Sequence[int]) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))])
