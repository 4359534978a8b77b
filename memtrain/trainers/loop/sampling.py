"""Completions of fixed prompts while a run goes on, and metrics of completions of held-out prompts.

Nothing of the training moves: weights are read, no random state is drawn from (each completion has a seed of
its own), and modules are back in training mode afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.build.components import Built
from memtrain.trainers.memory_meter.phase_watch import MemoryWatch
from memtrain.trainers.online.generation.backend import build_sampler, stop_tokens
from memtrain.trainers.online.generation.distributed_sampler import Generating
from memtrain.trainers.online.generation.lockstep import Lockstep
from memtrain.trainers.online.generation.protocol import Group, Sample, Sampling
from memtrain.trainers.online.generation.transformers_sampler import FORMS
from memtrain.trainers.protocols.events import SampleEvent
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.seed import derive_seed

PHASE = "samples"
"""Name of the phase in the plan, and of its measured peak."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes completions with the weights of a run as they are now. Every method is called by all ranks
    together."""

    plan: Plan
    built: Built
    watch: MemoryWatch
    generating: Generating

    def write(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, name: str
    ) -> list[Sample]:
        """A completion of each prompt; `name` tells seeds of one purpose from another's."""
        seed = self.plan.recipe.train.seed
        groups = [
            Group(tuple(prompt), 1, derive_seed(seed, name, number)) for number, prompt in enumerate(prompts)
        ]
        sampling = Sampling(max_tokens, temperature=temperature, stop_ids=stop_tokens(self.built))
        spread = self.built.spread
        laid = spread.streamed(self.built.scorer) if shards_weights(self.plan.settings) else nullcontext()
        with self.watch.phase(PHASE), laid:
            return [samples[0] for samples in self.generating.all(groups, sampling)]

    def text(self, sample: Sample) -> str:
        """A completion as text, without the token that ended it."""
        ids = sample.token_ids[:-1] if sample.finish == "stop" else sample.token_ids
        return str(self.built.tokenizer.decode(list(ids), skip_special_tokens=False))


def open_writer(
    plan: Plan, built: Built, ranks: Ranks, watch: MemoryWatch, emit: Callable[[str], None]
) -> Writer | None:
    """Writer of a run that asks for completions beside its training; None for other runs."""
    if not plan.recipe.eval.writes:
        return None
    generating = Generating(
        # Of a model that attends for itself, prompts of one length at a time: padding may change it.
        lambda rows: build_sampler(plan, built, max_rows=rows, form=FORMS[1]),
        plan.settings.sample_rows,
        ranks,
        emit,
    )
    if built.spread.is_sharded:
        generating.writing = Lockstep(built.model).writing
    return Writer(plan, built, watch, generating)


def sampled(writer: Writer, step: int) -> SampleEvent:
    """The completions of the recipe's prompts after `step`."""
    asked, prompts = writer.plan.recipe.eval.samples, writer.plan.data.samples
    assert asked is not None, "Only a recipe with eval.samples has prompts."
    started = time.perf_counter()
    written = writer.write(
        [prompt.ids for prompt in prompts],
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        name="samples",
    )
    return SampleEvent(
        step=step,
        texts=tuple(writer.text(sample) for sample in written),
        seconds=time.perf_counter() - started,
    )
