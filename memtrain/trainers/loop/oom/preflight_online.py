"""The preflight of a run that writes its completions: made-up ones of the greatest length.

The longest prompts, completions of `generate.max_tokens` tokens, rewards that differ within each group;
nothing is judged. Who writes completions in this process reads the prompts into keys of full length, and
writes one token of each: the keys are there from the first. What vLLM fills it has taken when it started.
"""

# A answers.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from memtrain.trainers.loop.oom.heaviest_batch import longest_of
from memtrain.trainers.online.generation.backend import sampling_of
from memtrain.trainers.online.generation.protocol import Group, Sample
from memtrain.trainers.online.rollout.advantages import AdvantageStep
from memtrain.trainers.online.rollout.mismatch_guard import SeesMismatch
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.online.rollout.protocol import WeightsTokens
from memtrain.trainers.online.rollout.rollout_batches import Rollout, new_window
from memtrain.trainers.protocols.feed import Ints
from memtrain.trainers.run_folder.report.report import DRY_RUN


@contextmanager
def made_up_rollout(steps: OnlineSteps) -> Iterator[Ints]:
    """The heaviest micro-batch of a rollout that was weighed; the one at hand is back after it.

    Called by all ranks together.
    """
    method, feed = steps.method, steps.feed
    before = feed.window, feed.norms, method.metrics
    kept = method.kept() if isinstance(method, WeightsTokens) else {}
    try:
        yield _heaviest(steps, weighed(steps))
    finally:
        feed.window, feed.norms, method.metrics = before
        if isinstance(method, SeesMismatch):
            method.seen.clear()
        if isinstance(method, WeightsTokens):
            method.go_on(kept)


def next_rollout(steps: OnlineSteps) -> None:
    """Write and weigh completions beside the optimizer's states, as every rollout but the first one is.

    Within `made_up_rollout`, after its steps.
    """
    write_longest(steps)
    weighed(steps)


def write_longest(steps: OnlineSteps) -> None:
    """Write a token of as many completions of the longest prompts as are written at a time."""
    plan = steps.plan
    if plan.settings.sampler not in ("native", "transformers"):
        return
    count = plan.recipe.generation.num_generations
    num_groups = steps.ranks.world * max(1, -(-plan.settings.rollout_rows // count))
    groups = [Group(steps.prompts.ids(row), count, seed=0) for row in longest_rows(steps, num_groups)]
    every_id = tuple(range(len(steps.built.tokenizer)))
    sampling = replace(sampling_of(plan, steps.built), stop_ids=every_id, stop_strings=())
    steps.written(groups, sampling, phase=f"{DRY_RUN}generation")


def longest_rows(steps: OnlineSteps, count: int) -> list[int]:
    """Indices of so many prompts, the longest first; the same again where there are fewer."""
    order = np.argsort(-steps.prompts.tokens, kind="stable")
    return [int(order[place % len(order)]) for place in range(count)]


def fullest_rows(steps: OnlineSteps) -> list[int]:
    """Prompts whose groups fill a micro-batch of an update: from the longest down, each that still fits."""
    settings, groups = steps.plan.settings, steps.feed.groups
    prompts, answers = steps.prompts.tokens, groups.learned * groups.own_tokens
    tokens = answers + (prompts if groups.is_shared else groups.learned * prompts)
    in_step = groups.most_rows(settings.batch_size or settings.micro_batch_size)
    most = max(1, min(settings.micro_batch_size, in_step) // groups.learned)
    return longest_of(tokens, most, settings.micro_tokens).tolist()


def weighed(steps: OnlineSteps) -> Rollout:
    """A rollout of made-up completions, with advantages and the passes that come before the update.

    Of prompts that fill a micro-batch, and the longest others; of no more than a rollout has: passes over
    more would take memory that no run takes.
    """
    settings, generate = steps.plan.settings, steps.plan.recipe.generation
    count, length = generate.num_generations, generate.max_tokens
    num_groups = steps.ranks.world * max(1, -(-settings.pass_factor * settings.micro_batch_size // count))
    num_rows = min(num_groups, steps.prompts_per_rollout)
    fullest = fullest_rows(steps)
    others = [row for row in longest_rows(steps, num_rows + len(fullest)) if row not in fullest]
    rows = [*fullest, *others, *fullest * num_rows][:num_rows]
    prompts = [steps.prompts.ids(row) for row in rows]
    samples = [[Sample((prompt[-1],) * length, (0.0,) * length, "stop")] * count for prompt in prompts]
    window = new_window(0, rows, [0] * len(rows), prompts, samples, len(steps.judging.functions))
    window.reward_AF[:] = (np.arange(window.num_answers) % 2)[:, None]
    weighing = AdvantageStep(steps.method, steps.feed, steps.passes, steps.judging.weight_F, count)
    with steps.watch.phase(f"{DRY_RUN}log-probs"):
        weighing.weigh(window)
    return window


def _heaviest(steps: OnlineSteps, window: Rollout) -> Ints:
    work = steps.work_of(window, steps.position.step, 0, rank=0, num_ranks=1)
    return max(work.micro_batches, key=lambda micro_batch: int(steps.feed.tokens[micro_batch].sum()))
