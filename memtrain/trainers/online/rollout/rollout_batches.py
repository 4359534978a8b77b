"""Answers of a rollout as a feed: prompts once for the answers that share a micro-batch, nothing padded."""

# A answers, N tokens of all answers end to end, Q prompts, F reward functions.
# A answers of a micro-batch, N their tokens.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memtrain.memory.plan.prompt_groups import PromptGroups
from memtrain.memory.plan.settings import Settings
from memtrain.trainers.batches.answer_batch import Answer, AnswerBatch, Group, collate_answers
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.losses.policy.registry import Norms
from memtrain.trainers.online.generation.protocol import Sample
from memtrain.trainers.protocols.events import DataEvent

# A rollout as training uses it: ragged answers with their log-probs and advantages, as arrays.
#
# It is saved with a checkpoint, so that a run that stopped between two steps of a rollout goes on with the
# very same completions.


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


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PolicyMicro:
    """Inputs of a forward pass over answers, and of their loss.

    advantage_A: float32. sampler_N, old_N, reference_N: float32 log-probs of their tokens, answer after
    answer; None where nothing asks for them. is_kept_N: bool, tokens that a top-entropy mask keeps.
    value_N, token_advantage_N, return_N: float32, of methods that weigh single tokens.
    """

    answers: AnswerBatch
    advantage_A: Tensor
    sampler_N: Tensor
    old_N: Tensor | None
    reference_N: Tensor | None
    is_kept_N: Tensor | None
    norms: Norms
    value_N: Tensor | None = None
    token_advantage_N: Tensor | None = None
    return_N: Tensor | None = None
    routes_TLK: Tensor | None = None
    """int16, the experts that the sampler chose for every token of the rows; -1: none."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return self.answers.num_tokens

    @property
    def num_loss_tokens(self) -> int:
        """Tokens of the answers."""
        return len(self.sampler_N)

    def to(self, device: torch.device | str) -> PolicyMicro:
        """The same with its tensors on `device`."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=True)

        return replace(
            self,
            answers=self.answers.to(device),
            advantage_A=self.advantage_A.to(device, non_blocking=True),
            sampler_N=self.sampler_N.to(device, non_blocking=True),
            old_N=moved(self.old_N),
            reference_N=moved(self.reference_N),
            is_kept_N=moved(self.is_kept_N),
            value_N=moved(self.value_N),
            token_advantage_N=moved(self.token_advantage_N),
            return_N=moved(self.return_N),
            routes_TLK=moved(self.routes_TLK),
        )


class PolicyFeed:
    """The answers of the rollout at hand: sequence a is answer a, and weighs its tokens.

    Answers of one prompt that stand next to each other in a micro-batch share it.
    """

    def __init__(self, prompts: PromptFeed, settings: Settings, norms: Norms, groups: PromptGroups) -> None:
        self.prompts = prompts
        self.settings = settings
        self.norms = norms
        self.groups = groups
        """The groups that the plan counts micro-batches by."""
        self.window: Rollout | None = None
        self._tokens: Ints = np.zeros(0, np.int64)

    @property
    def epoch_ptr(self) -> Ints:
        """All answers are of one rollout."""
        return np.array([0, len(self.tokens)], np.int64)

    @property
    def tokens(self) -> Ints:
        """Tokens that each answer puts into the model; a shared prompt counts for its first answer."""
        return self._tokens

    @property
    def weights(self) -> Ints:
        """Tokens of each answer."""
        return self._at_hand.length_A

    @property
    def loss_tokens(self) -> Ints:
        """Tokens of each answer."""
        return self.weights

    def sequences_of(self, answers: Ints) -> Ints:
        """The sequences of some answers: each is one."""
        return answers

    def answers_of(self, sequences: Ints) -> Ints:
        """The answers of some sequences, in the order of their micro-batch."""
        return sequences

    def deal(self, answers: Ints, *, micro_batch_size: int, micro_tokens: int | None) -> list[Ints]:
        """The answers in micro-batches, in order, and `tokens` counted for them.

        A group is divided only where it does not fit a micro-batch of its own; its prompt is then computed
        once in each. No micro-batch has more tokens than the plan counts for its rows, though groups be left
        of which few answers are learned from.
        """
        window = self._at_hand
        micro_tokens = self._planned_tokens(micro_batch_size, micro_tokens)
        self._tokens = window.context_length_A + np.diff(window.prompt_ptr)[window.prompt_A]
        made: list[list[int]] = [[]]
        used = 0
        for _, members in groupby(answers.tolist(), key=lambda answer: int(window.prompt_A[answer])):
            group = list(members)
            whole = self._group_tokens(group)
            fits_alone = len(group) <= micro_batch_size and (micro_tokens is None or whole <= micro_tokens)
            fits_here = len(made[-1]) + len(group) <= micro_batch_size and (
                micro_tokens is None or used + whole <= micro_tokens
            )
            if made[-1] and fits_alone and not fits_here:
                made.append([])
                used = 0
            for answer in group:
                shares = self._shares(made[-1], answer)
                cost = self._cost(answer, shares=shares)
                if made[-1] and (
                    len(made[-1]) >= micro_batch_size
                    or (micro_tokens is not None and used + cost > micro_tokens)
                ):
                    made.append([])
                    used, shares = 0, False
                    cost = self._cost(answer, shares=False)
                self._tokens[answer] = cost
                made[-1].append(answer)
                used += cost
        return [np.array(micro_batch, np.int64) for micro_batch in made]

    def micro_batch(self, sequences: Ints) -> PolicyMicro:
        """Some answers with their prompts; none gives a micro-batch that teaches nothing."""
        window = self._at_hand
        places = window.tokens_of(sequences)

        def taken(values: NDArray[np.generic] | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(np.ascontiguousarray(values[places]))

        return PolicyMicro(
            answers=self._collated(sequences.tolist()),
            advantage_A=torch.from_numpy(window.advantage_A[sequences]),
            sampler_N=torch.from_numpy(window.sampler_N[places]),
            old_N=taken(window.old_N),
            reference_N=taken(window.reference_N),
            is_kept_N=taken(window.is_kept_N),
            norms=self.norms,
            value_N=taken(window.value_N),
            token_advantage_N=taken(window.token_advantage_N),
            return_N=taken(window.return_N),
            routes_TLK=self._routes(sequences.tolist()),
        )

    def sample_prompt(self) -> Tensor:
        """int64 [T], the shortest prompt."""
        return self.prompts.sample_prompt()

    def data_event(self, split: str) -> DataEvent:
        """Effects of truncation on the prompts."""
        return self.prompts.data_event(split)

    def _collated(self, answers: Sequence[int]) -> AnswerBatch:
        window = self._at_hand
        groups: list[Group] = []
        for _, members in groupby(answers, key=lambda answer: int(window.prompt_A[answer])):
            of_group = list(members)
            # The environment's tokens are read and not scored: no loss, ratio or KL term has them.
            written = tuple(Answer(*window.context(one)) for one in of_group)
            groups.append(Group(window.prompt(of_group[0]), written))
        return collate_answers(
            groups,
            [0.0] * len(answers),
            None,
            is_shared=self.settings.shared_prompts,
            is_flat=self.settings.padding_free,
            pad_id=self.prompts.pad_id,
            multiple=self.settings.pad_to_multiple_of,
            by_row=self.settings.positions_by_row,
        )

    def _routes(self, answers: Sequence[int]) -> Tensor | None:
        """The sampler's choices for the rows of some answers, which are laid out as their tokens are."""
        window = self._at_hand
        if window.routes_N is None or window.prompt_routes is None:
            return None
        num_prompt = len(window.prompt_ids)
        groups: list[Group] = []
        for at, members in groupby(answers, key=lambda answer: int(window.prompt_A[answer])):
            prompt = np.arange(window.prompt_ptr[at], window.prompt_ptr[at + 1], dtype=np.int32)
            spans = [window.answer_ptr[one : one + 2] + num_prompt for one in members]
            places = [np.arange(first, end, dtype=np.int32) for first, end in spans]
            groups.append(Group(prompt, tuple(Answer(own, np.ones(len(own), np.bool_)) for own in places)))
        laid = collate_answers(
            groups,
            [0.0] * len(answers),
            None,
            is_shared=self.settings.shared_prompts,
            is_flat=self.settings.padding_free,
            pad_id=-1,
            multiple=self.settings.pad_to_multiple_of,
            by_row=self.settings.positions_by_row,
        )
        place_T = laid.micro_batch.input_ids.reshape(-1).numpy()
        routes_TLK = np.full((len(place_T), *window.routes_N.shape[1:]), -1, np.int16)
        of_prompt, own = (place_T >= 0) & (place_T < num_prompt), place_T >= num_prompt
        routes_TLK[of_prompt] = window.prompt_routes[place_T[of_prompt]]
        routes_TLK[own] = window.routes_N[place_T[own] - num_prompt]
        return torch.from_numpy(routes_TLK)

    def _planned_tokens(self, micro_batch_size: int, micro_tokens: int | None) -> int | None:
        """The limit of tokens, or the plan's most tokens of so many answers where these are fewer."""
        if not self.groups.is_shared:
            return micro_tokens
        most = self.groups.most_tokens(self._longest_prompts, micro_batch_size)
        return most if micro_tokens is None else min(most, micro_tokens)

    @cached_property
    def _longest_prompts(self) -> list[int]:
        """Tokens of the prompts, longest first."""
        return np.sort(self.prompts.tokens)[::-1].tolist()

    @property
    def _at_hand(self) -> Rollout:
        assert self.window is not None, "A rollout is at hand."
        return self.window

    def _group_tokens(self, group: Sequence[int]) -> int:
        return sum(self._cost(answer, shares=index > 0) for index, answer in enumerate(group))

    def _shares(self, micro_batch: Sequence[int], answer: int) -> bool:
        prompt_A = self._at_hand.prompt_A
        return bool(micro_batch) and bool(prompt_A[micro_batch[-1]] == prompt_A[answer])

    def _cost(self, answer: int, *, shares: bool) -> int:
        window = self._at_hand
        own = int(window.context_length_A[answer])
        if shares and self.settings.shared_prompts:
            return own
        at = int(window.prompt_A[answer])
        return own + int(window.prompt_ptr[at + 1] - window.prompt_ptr[at])
