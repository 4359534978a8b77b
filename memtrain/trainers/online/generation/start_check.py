"""The start-up check of a run's own sampler: its log-probs of a few tokens against the model's own, alone."""

# T tokens of a prompt with its completion.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from memtrain.errors import LaunchError, OutOfMemory, first_line_of
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.online.generation.protocol import Group, Sample, Sampler, Sampling
from memtrain.trainers.online.generation.transformers_sampler import FORMS, Form
from memtrain.trainers.online.vllm.weight_check import furthest
from memtrain.trainers.runtime.oom_errors import is_out_of_memory
from memtrain.trainers.runtime.ranks import Ranks

TOKENS = 8
"""Tokens of each completion. Taste: what is kept in a wrong place shows from the second one on."""

LONGEST = 64
"""Tokens of the longer prompt; the other has half of them, so that one is padded beside the other."""

EXACT = 1e-3
"""Nats that a log-prob may be off in float32. Measured on a CPU over the families of
tests/runs/test_causal_lms.py: rounding stays below 1e-5, the smallest fault found was 4e-3."""

HALF = 0.3
"""The same in bfloat16 and float16, where it is `generate.max_logprob_gap` too: smaller differences are left
to the alarm of the run."""


def check_groups(prompt: Sequence[int], longer: Sequence[int] = ()) -> list[Group]:
    """Two completions of a prompt's beginning and of the half of it; and one of a `longer` prompt."""
    whole = tuple(prompt[:LONGEST])
    groups = [Group(whole, 2, 0), Group(whole[: max(1, len(whole) // 2)], 2, 1)]
    return [*groups, Group(tuple(longer), 1, 2)] if longer else groups


@dataclass(frozen=True, slots=True)
class StartCheck:
    """The check, for samplers that hold the trained module itself."""

    model: PreTrainedModel | PeftModel
    ranks: Ranks
    emit: Callable[[str], None]
    writing: Callable[[], AbstractContextManager[None]]
    """Context of the passes of all ranks, where each of them gathers layers."""

    def passing(self, make: Callable[[Form], Sampler], first: Form, groups: Sequence[Group]) -> Form:
        """The first form of sampling, from `first` on, that gives the model's own log-probs.

        Called by all ranks together. The choice is reported where it is another than `first`.
        Raises: LaunchError where none does.
        """
        sampler = make(first)
        forms = FORMS[FORMS.index(first) :] if sampler.name == "transformers" else (first,)
        faults: list[str] = []
        for form in forms:
            fault = self.fault(make(form), groups)
            if not fault:
                if faults:
                    self.emit(f"{form.summary}, which is slower: {'; '.join(faults)}")
                return form
            faults.append(f"{form.name} {fault}")
        others = {"native": "transformers or vllm", "transformers": "vllm"}
        raise LaunchError(
            f"the {sampler.name} sampler does not give the model's own log-probs: {'; '.join(faults)}",
            "generate.backend",
            f"set generate.backend: {others.get(sampler.name, 'native')}, or use another model; please "
            f"report that {type(base_model(self.model)).__name__} samples like this",
        )

    def fault(self, sampler: Sampler, groups: Sequence[Group]) -> str:
        """Fault of a sampler; empty when there is none. Called by all ranks together."""
        weight = next(self.model.parameters())
        limit = EXACT if weight.dtype == torch.float32 else HALF
        with self.writing():
            try:
                # Every rank writes all of them: each finds the same, and none is left behind in a pass.
                samples = sampler.generate(groups, Sampling(max_tokens=TOKENS))
            except (ValueError, RuntimeError, TypeError, AttributeError, LookupError) as error:
                if is_out_of_memory(error) or isinstance(error, OutOfMemory):
                    raise
                return f"fails ({first_line_of(error)})"
            found = self._difference(groups, samples)
        worst = max(self.ranks.gather(found))
        return "" if worst <= limit else f"is off by {worst:.2g} nats"

    def _difference(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> float:
        pairs = [(group, sample) for group, of in zip(groups, samples, strict=True) for sample in of]
        found = [furthest(self.model, group, sample) for group, sample in pairs]
        # A NaN is no small difference.
        return max(value if value == value else float("inf") for value in found)
