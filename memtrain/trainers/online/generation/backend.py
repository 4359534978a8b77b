"""The sampler of a run, as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from memtrain.memory.generation.decode_bytes import READ_TOKENS
from memtrain.memory.model_shape.length_rules import PROBE_PAST, length_rules, reached
from memtrain.memory.plan.plan import Plan
from memtrain.memory.rules.attention import AttentionBackend, model_facts
from memtrain.trainers.build.components import Built, longest_row
from memtrain.trainers.model.heads.backbone import base_model
from memtrain.trainers.model.heads.lm_head import Scorer
from memtrain.trainers.online.generation.decode_graphs import DecodeGraphs
from memtrain.trainers.online.generation.distributed_sampler import Generating
from memtrain.trainers.online.generation.lockstep import Lockstep
from memtrain.trainers.online.generation.native_sampler import NativeSampler
from memtrain.trainers.online.generation.protocol import Sampler, Sampling
from memtrain.trainers.online.generation.start_check import LONGEST, StartCheck, check_groups
from memtrain.trainers.online.generation.transformers_sampler import FORMS, Form, TransformersSampler
from memtrain.trainers.online.vllm.open import open_engine
from memtrain.trainers.runtime.cuda_graphs import CudaGraphs
from memtrain.trainers.runtime.ranks import Ranks

Ints = NDArray[np.int64]


def open_generating(
    plan: Plan, built: Built, ranks: Ranks, *, version: Callable[[], int], emit: Callable[[str], None]
) -> Generating:
    """Sampler of a run's completions, as its plan says.

    `version` grows whenever the weights change. Engines of their own are opened here, once, and choose
    themselves how many they write at a time.
    """
    rows = plan.settings.rollout_rows
    if plan.settings.sampler not in ("vllm", "vllm_server"):
        graphs = DecodeGraphs(CudaGraphs, emit) if plan.settings.cuda_graphs else None
        made = Generating(OwnSampler(plan, built, graphs), rows, ranks, emit)
        if built.spread.is_sharded and not plan.settings.gather_weights:
            made.writing = Lockstep(built.model).writing
        return made
    feeds = [feed for feed in (built.train, built.eval) if feed is not None]
    engine = open_engine(
        plan,
        built,
        ranks,
        longest_prompt=max(int(feed.tokens.max()) for feed in feeds),
        version=version,
        emit=emit,
        native=lambda: build_sampler(plan, built, max_rows=rows),
    )
    return Generating(lambda rows: engine, rows, ranks, emit, engine.close)


class HasPrompts(Protocol):
    """Prompts by their numbers."""

    @property
    def tokens(self) -> Ints:
        """Tokens of each."""
        ...

    def ids(self, number: int, /) -> tuple[int, ...]:
        """Tokens of one."""
        ...


@dataclass(slots=True)
class OwnSampler:
    """Makes the sampler of a plan, on the trained module."""

    plan: Plan
    built: Built
    graphs: DecodeGraphs | None = None
    """Recordings of the passes that write a token."""
    form: Form = FORMS[0]
    """Form of the calls of transformers' `generate`."""

    def __call__(self, rows: int) -> Sampler:
        """Sampler of so many rows at a time."""
        return build_sampler(self.plan, self.built, max_rows=rows, form=self.form, graphs=self.graphs)

    def check(self, generating: Generating, prompts: HasPrompts) -> None:
        """Take the first form of sampling that gives the model's own log-probs; called by all ranks together.

        Captured passes that do not give them are given up. Raises: LaunchError where no form does.
        """
        config = base_model(self.built.model).config.to_dict()
        # A state runs through padding too: in bfloat16 the difference may be too small to be noticed.
        first = FORMS[1] if model_facts(config)["own_layers"] else FORMS[0]
        longer = _past_a_length(self.plan, config, prompts.ids(int(prompts.tokens.argmax())))
        start = StartCheck(self.built.model, generating.ranks, generating.emit, generating.writing)
        few = min(generating.max_rows, CHECKED_ROWS)
        groups = check_groups(prompts.ids(int(prompts.tokens.argmax())), longer)
        if self.graphs is not None:
            captured = build_sampler(self.plan, self.built, max_rows=few, graphs=self.graphs)
            fault = start.fault(captured, groups)
            if fault:
                self.graphs.give_up(f"with CUDA graphs the sampler {fault}")
        self.form = start.passing(
            lambda form: build_sampler(self.plan, self.built, max_rows=few, form=form), first, groups
        )


CHECKED_ROWS = 4
"""Completions that the start-up check writes at a time: more than one, so that rows have neighbours."""


def _past_a_length(plan: Plan, config: dict[str, Any], prompt: Sequence[int]) -> tuple[int, ...]:
    """A prompt from which a completion grows past a length where the model changes, if completions of the
    run may; else none."""
    rule = reached(length_rules(config), longest_row(plan), "place")
    if rule is None or rule.tokens <= LONGEST:
        return ()
    return tuple(islice(cycle(prompt), rule.tokens - PROBE_PAST))


TOKENS_PER_SYNC = {"cpu": 1, "cuda": 8}
"""Tokens of a row that are written before the host looks at them: a look costs a GPU a pause, a CPU nothing.
Half of so many are written in vain after a row's end, on average. Taste."""


def build_sampler(
    plan: Plan,
    built: Built,
    *,
    max_rows: int,
    form: Form = FORMS[0],
    graphs: DecodeGraphs | None = None,
) -> NativeSampler | TransformersSampler:
    """The back end of the plan, on the trained module, `max_rows` completions at a time."""
    tokenizer, settings = built.tokenizer, plan.settings

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    if settings.sampler != "transformers" and settings.attention != "transformers":
        backend = AttentionBackend(settings.attention)
        return NativeSampler(
            built.model,
            backend,
            max_rows,
            read_tokens=READ_TOKENS,
            decode=decode,
            tokens_per_sync=TOKENS_PER_SYNC[settings.device],
            graphs=graphs,
            replay=built.scorer.replay if isinstance(built.scorer, Scorer) else None,
        )
    pad_id = cast(int | None, tokenizer.pad_token_id)
    pad_id = pad_id if pad_id is not None else 0
    return TransformersSampler(built.model, max_rows, pad_id, decode=decode, form=form)


def sampling_of(plan: Plan, built: Built, *, is_evaluation: bool = False) -> Sampling:
    """Choice of tokens. Held-out prompts: at `eval_temperature`, nothing else cut or penalised."""
    generate = plan.recipe.generation
    stop_ids = stop_tokens(built)
    if is_evaluation:
        return Sampling(
            max_tokens=generate.max_tokens,
            temperature=generate.eval_temperature,
            stop_ids=stop_ids,
            stop_strings=generate.stop,
        )
    return Sampling(
        max_tokens=generate.max_tokens,
        temperature=generate.temperature,
        top_k=generate.top_k,
        top_p=generate.top_p,
        min_p=generate.min_p,
        repetition_penalty=generate.repetition_penalty,
        stop_ids=stop_ids,
        stop_strings=generate.stop,
    )


def stop_tokens(built: Built) -> tuple[int, ...]:
    """The end-of-sequence tokens of the tokenizer and of the model's generation settings."""
    found: set[int] = set()
    config = getattr(built.model, "generation_config", None)
    for source in (built.tokenizer.eos_token_id, getattr(config, "eos_token_id", None)):
        if isinstance(source, int):
            found.add(source)
        elif isinstance(source, list | tuple):
            found.update(int(one) for one in source)
    return tuple(sorted(found))
