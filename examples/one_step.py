"""One optimizer step of SFT, and one of GRPO, by the parts that every run is made of: the code's first page.

    python examples/one_step.py

Read it from top to bottom: a recipe becomes a plan, a plan a model with rows, rows micro-batches, and those a
loss, gradients and moved weights; GRPO writes and judges its rows first. A run makes the very same steps
(`memtrain/trainers/loop/loop.py`), and adds what is around them: checkpoints, recovery, evaluation, metrics.
A test holds both against such runs.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from memtrain.cli.plan.make_plan import make_plan
from memtrain.memory.plan.plan import Plan
from memtrain.recipes.reading.load import load_recipe
from memtrain.trainers.batches.prompt_batches import PromptFeed
from memtrain.trainers.build.components import Built, build
from memtrain.trainers.memory_meter.phase_watch import MemoryWatch
from memtrain.trainers.online.generation.backend import open_generating, sampling_of
from memtrain.trainers.online.generation.protocol import Group
from memtrain.trainers.online.rollout.advantages import AdvantageStep
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.online.rollout.reward_scoring import build_reward_scoring
from memtrain.trainers.online.rollout.rollout_batches import new_window
from memtrain.trainers.protocols.feed import Feed, Steps, StepWork
from memtrain.trainers.protocols.position import TrainState
from memtrain.trainers.runtime.ranks import Ranks
from memtrain.trainers.runtime.seed import derive_seed, seed_step


@dataclass(frozen=True)
class Made:
    """What a step was."""

    loss: float
    grad_norm: float
    num_tokens: int


def planned(recipe: str, folder: Path, *overrides: str) -> Plan:
    """The plan of a recipe: its rows tokenized into a store, and every setting decided, with its reason.

    `memtrain/memory/rules` has the decisions, `memtrain/memory/planner` the search among what fits.
    """
    loaded = load_recipe(recipe, overrides)
    return make_plan(loaded, run_dir=str(folder)).plan


def moved(plan: Plan, built: Built, feed: Feed, work: StepWork) -> Made:
    """The optimizer step itself: losses of all micro-batches, their gradients, then the update.

    `OptimizerStep` (`memtrain/trainers/build/step.py`) is this, with ranks, recorded passes and offloading.
    """
    recipe, loss = plan.recipe, 0.0
    for number, sequences in enumerate(work.micro_batches):
        # Rows as the model takes them: packed or padded, prompts once for answers that share them.
        micro_batch = feed.micro_batch(sequences)
        seed_step(recipe.train.seed, work.step, number, 0)
        # The method asks the scorer for log-probs or a loss; each is divided by the count of the whole step,
        # so that micro-batches add up to one large batch. Logits are scored in tiles and never whole.
        made = built.method.loss(built.scorer, micro_batch, denominator=work.denominator, want_stats=False)
        made.value.backward()
        loss += made.value.item()
    weights = list(built.trained.values())
    norm = torch.nn.utils.clip_grad_norm_(weights, recipe.optim.max_grad_norm or float("inf"))
    for group in built.optimizer.param_groups:
        group["lr"] = recipe.optim.lr
    built.optimizer.step()
    built.optimizer.zero_grad(set_to_none=True)
    return Made(loss, float(norm), work.num_tokens)


def sft_step(folder: Path) -> Made:
    """A step of supervised fine-tuning: its rows are there."""
    plan = planned("smoke/sft", folder)
    built = build(plan)
    steps = Steps(built.train, plan.settings, plan.recipe.train.seed, plan.recipe.train.shuffle)
    return moved(plan, built, built.train, steps.work(0, rank=0, num_ranks=1))


def grpo_step(folder: Path) -> Made:
    """A step of GRPO: the model writes its rows, rewards judge them, groups give them advantages."""
    plan = planned("smoke/grpo", folder)
    built, ranks, recipe = build(plan), Ranks(), plan.recipe
    prompts = built.train
    assert isinstance(prompts, PromptFeed), "Rows of an online method are prompts."
    generating = open_generating(plan, built, ranks, version=lambda: 0, emit=print)
    judging = build_reward_scoring(plan, built, ranks, print)
    steps = OnlineSteps(
        plan=plan,
        built=built,
        ranks=ranks,
        watch=MemoryWatch(torch.device("cpu"), 0, note=lambda *measured: None, is_on=False),
        emit=print,
        generating=generating,
        judging=judging,
        prompts=prompts,
        held_out=None,
        position=TrainState(),
    )
    # 1. Completions: a group of them for each prompt of the step.
    rows = [int(row) for row in steps.base.work(0, rank=0, num_ranks=1).sequences]
    count = recipe.generation.num_generations
    seeds = [derive_seed(recipe.train.seed, "completions", "rollout", 0, place) for place in range(len(rows))]
    groups = [Group(prompts.ids(row), count, seed) for row, seed in zip(rows, seeds, strict=True)]
    samples = generating.all(groups, sampling_of(plan, built))
    # 2. Rewards: [answers, functions], NaN where a function gives no verdict.
    reward_AF, _ = judging.score(prompts, rows, samples)
    # 3. Advantages: the reward against the others of the group; log-probs before the update where needed.
    asked = [prompts.ids(row) for row in rows]
    window = new_window(0, rows, [0] * len(rows), asked, samples, len(judging.functions))
    window.reward_AF = reward_AF
    AdvantageStep(steps.method, steps.feed, steps.passes, judging.weight_F, count).weigh(window)
    # 4. The step, as above: the answers are its rows.
    return moved(plan, built, steps.feed, steps.work_of(window, 0, 0, rank=0, num_ranks=1))


def main() -> None:
    """Make both steps, and print what they were."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        for name, step in (("sft", sft_step), ("grpo", grpo_step)):
            made = step(Path(place) / name)
            print(
                f"{name}: loss {made.loss:.6f}, gradient norm {made.grad_norm:.4f}, {made.num_tokens} tokens"
            )


if __name__ == "__main__":
    main()
