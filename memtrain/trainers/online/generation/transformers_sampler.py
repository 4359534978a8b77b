"""Sampling by transformers' own `generate`, in chunks of rows, where the native sampler cannot.

Prompts are forwarded for every completion, padded on the left where the model computes the same beside
padding. Tokens are chosen by the same function and the same numbers as in the native sampler; `generate` is
told to take the likeliest, which is the chosen one.
"""

# R rows of a chunk, V vocabulary.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from peft import PeftModel
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria
from transformers import StoppingCriteriaList as Criteria

from memtrain.trainers.model.attention import NAMES, attention_switched, own_implementation
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.offload.weights import compute_device
from memtrain.trainers.online.generation.native_sampler import Decode
from memtrain.trainers.online.generation.protocol import Finish, Group, OnDone, Sample, Sampling
from memtrain.trainers.online.generation.token_sampling import choose
from memtrain.trainers.runtime.seed import numpy_generator


@dataclass(frozen=True, slots=True)
class Form:
    """A way to call `generate`."""

    name: str
    summary: str
    pads: bool = False
    """Prompts of unlike lengths are written together."""
    caches: bool = False
    """Keys, or states, are kept from token to token."""


FORMS = (
    Form(
        "padding on the left", "prompts of different lengths are generated together", pads=True, caches=True
    ),
    Form("its cache", "completions are generated together only for prompts of equal length", caches=True),
    Form(
        "generation without a cache", "completions are generated without a cache, each token in a whole pass"
    ),
)
"""The fastest first; each is right for models that the one before it is wrong for."""


@dataclass(frozen=True, slots=True)
class TransformersSampler:
    """Samples with `model.generate`, `max_rows` rows at a time."""

    model: PreTrainedModel | PeftModel
    max_rows: int
    pad_id: int
    decode: Decode | None = None
    form: Form = FORMS[0]
    name: str = "transformers"

    def generate(
        self, groups: Sequence[Group], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[list[Sample]]:
        """The completions of each group, in order, with the weights as they are now."""
        wanted = [(number, sample) for number, group in enumerate(groups) for sample in range(group.count)]
        wanted.sort(key=lambda row: -len(groups[row[0]].prompt_ids))
        done: list[dict[int, Sample]] = [{} for _ in groups]
        was_training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with own_attention(base_model(self.model)):
                for rows in self._chunks(wanted, groups):
                    for (number, sample), made in zip(rows, self._chunk(rows, groups, sampling), strict=True):
                        done[number][sample] = made
                        if on_done is not None and len(done[number]) == groups[number].count:
                            on_done(number, [done[number][i] for i in range(groups[number].count)])
        finally:
            for module in was_training:
                module.training = True
        return [[held[sample] for sample in range(len(held))] for held in done]

    def _chunks(
        self, wanted: list[tuple[int, int]], groups: Sequence[Group]
    ) -> Iterator[list[tuple[int, int]]]:
        """The rows that are written together; without padding, only of prompts of one length."""

        def kind(row: tuple[int, int]) -> int:
            return 0 if self.form.pads else len(groups[row[0]].prompt_ids)

        for _, alike in groupby(wanted, key=kind):
            rows = list(alike)
            for start in range(0, len(rows), self.max_rows):
                yield rows[start : start + self.max_rows]

    def _chunk(
        self, rows: list[tuple[int, int]], groups: Sequence[Group], sampling: Sampling
    ) -> list[Sample]:
        device = compute_device(self.model)
        prompts = [groups[number].prompt_ids for number, _ in rows]
        width = max(len(prompt) for prompt in prompts)
        ids_RP = torch.full((len(rows), width), self.pad_id, device=device)
        mask_RP = torch.zeros_like(ids_RP)
        for row, prompt in enumerate(prompts):
            ids_RP[row, width - len(prompt) :] = torch.tensor(prompt, device=device)
            mask_RP[row, width - len(prompt) :] = 1
        chooser = _Chooser(sampling, width, rows, groups, mask_RP)
        stops = _Stops(sampling, width, self.decode, chooser)
        with torch.no_grad():
            self.model.generate(  # pyright: ignore[reportCallIssue]
                input_ids=ids_RP,
                attention_mask=mask_RP,
                max_new_tokens=sampling.max_tokens,
                # The model's own generation settings must not come on top of the recipe's.
                do_sample=False,
                repetition_penalty=1.0,
                use_cache=self.form.caches,
                pad_token_id=self.pad_id,
                eos_token_id=None,
                logits_processor=LogitsProcessorList([chooser]),
                stopping_criteria=Criteria([stops]),
            )
        return [chooser.sample(row, stops.finish[row], stops.ends[row]) for row in range(len(rows))]


def own_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Padded rows with a cache need attention that takes a mask: the model's own."""
    if model.config._attn_implementation not in NAMES.values():
        return nullcontext()
    return attention_switched(model, own_implementation(model))


class _Chooser(LogitsProcessor):
    """Makes the token that is to be taken the only one."""

    def __init__(
        self,
        sampling: Sampling,
        width: int,
        rows: list[tuple[int, int]],
        groups: Sequence[Group],
        mask_RP: Tensor,
    ) -> None:
        self.sampling, self.width, self.mask_RP = sampling, width, mask_RP
        drawn = [
            numpy_generator(groups[number].seed, "completion", sample).random(sampling.max_tokens)
            for number, sample in rows
        ]
        self.uniform_RT = torch.stack([torch.from_numpy(row) for row in drawn]).to(mask_RP.device)
        self.ids: list[Tensor] = []
        self.logps: list[Tensor] = []
        self.seen_RV: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        at = input_ids.shape[1] - self.width
        if self.sampling.repetition_penalty != 1:
            self._note(input_ids, scores.shape[1])
        ids_R, logp_R = choose(scores, self.uniform_RT[:, at], self.sampling, self.seen_RV)
        self.ids.append(ids_R)
        self.logps.append(logp_R)
        return torch.full_like(scores, -torch.inf).scatter(1, ids_R[:, None], 0.0)

    def _note(self, input_ids: Tensor, vocabulary: int) -> None:
        if self.seen_RV is None:
            seen_RV = torch.zeros(len(input_ids), vocabulary, device=input_ids.device)
            self.seen_RV = seen_RV.scatter_add(1, input_ids, self.mask_RP.float()) > 0
        else:
            self.seen_RV = self.seen_RV.scatter(1, input_ids[:, -1:], True)

    def sample(self, row: int, finish: Finish, end: int) -> Sample:
        """The completion of a row, up to its end."""
        ids = tuple(int(ids_R[row]) for ids_R in self.ids[:end])
        return Sample(ids, tuple(float(logp_R[row]) for logp_R in self.logps[:end]), finish)


class _Stops(StoppingCriteria):
    """Ends rows at stop tokens and stop strings, and remembers where."""

    def __init__(self, sampling: Sampling, width: int, decode: Decode | None, chooser: _Chooser) -> None:
        self.sampling, self.width, self.decode = sampling, width, decode
        count = len(chooser.uniform_RT)
        self.finish: list[Finish] = ["length"] * count
        self.ends = [sampling.max_tokens] * count
        self.is_done = [False] * count

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        tokens = input_ids.shape[1] - self.width
        for row, ids in enumerate(input_ids[:, self.width :].tolist()):
            if self.is_done[row]:
                continue
            finish: Finish | None = "stop" if ids[-1] in self.sampling.stop_ids else None
            if finish is None and self.sampling.stop_strings:
                assert self.decode is not None, "Stop strings need a tokenizer."
                text = self.decode(ids)
                finish = "string" if any(stop in text for stop in self.sampling.stop_strings) else None
            if finish is not None:
                self.is_done[row], self.finish[row], self.ends[row] = True, finish, tokens
        return torch.tensor(self.is_done, device=input_ids.device)
