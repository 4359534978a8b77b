"""Benchmark of one variant in a process of its own: peak memory, speed and losses of a plan's first steps.

    python -m memtrain.trainers.tools.bench PLAN.json NUM_STEPS

Prints one line of JSON (`Benched`). Completions of online methods are fixed ones: what writes them is not
timed. Two steps come before the timed ones: optimizer states appear in the first, and on a CPU both are
counted tensor by tensor, which costs time. After them comes the heaviest micro-batch that the data can make,
which is what a plan predicts the peak of: few of the timed steps meet it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from memtrain.errors import MemtrainError
from memtrain.memory.plan.plan import Plan, read_plan
from memtrain.trainers.batches.answer_batch import AnswerBatch
from memtrain.trainers.batches.collate import MicroBatch
from memtrain.trainers.build.bare_steps import Stepper
from memtrain.trainers.build.components import build
from memtrain.trainers.build.engine import make_accelerator
from memtrain.trainers.loop.oom.heaviest_batch import longest_together, step_of
from memtrain.trainers.loop.oom.preflight_online import made_up_rollout
from memtrain.trainers.memory_meter.live_tensors import TensorPeak, resident
from memtrain.trainers.memory_meter.workspaces import begin_peak, peak_of_tensors
from memtrain.trainers.model.loading.load import local_device
from memtrain.trainers.online.rollout.online_loop import OnlineSteps
from memtrain.trainers.online.rollout.rollout_batches import PolicyMicro
from memtrain.trainers.protocols.feed import Feed, Ints
from memtrain.trainers.runtime.oom_errors import is_out_of_memory
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts, online_source

WARM_STEPS = 2
OUT_OF_MEMORY = 7
"""Exit code of this process when memory runs out, as of a run."""


@dataclass(frozen=True, slots=True)
class Benched:
    """Memory and time that the steps of one variant needed."""

    peak_bytes: int
    """Highest sum of live tensors on the device, in steps with the heaviest micro-batch among them."""
    reserved_bytes: int
    """Most memory that CUDA's caching allocator held; 0 on a CPU."""
    rss_bytes: int
    """Highest resident memory of the process, less that after its imports."""
    tokens: int
    """Of the timed steps, without padding."""
    seconds: float
    """Of the timed steps."""
    losses: tuple[float, ...]
    """Of every step, the first ones among them."""
    heaviest: tuple[int, int, int, int]
    """Rows, tokens without padding, loss tokens, tokens of the longest row of the heaviest micro-batch."""


def bench(plan: Plan, num_steps: int) -> Benched:
    """Make `num_steps` timed steps of `plan` on this process, after two that are not timed."""
    imported = psutil.Process().memory_info().rss
    make_accelerator(plan.settings)
    built = build(plan)
    device = local_device(plan.settings)
    stepper = Stepper(plan, built, online_source(plan, built, Rollouts()))
    held = resident(built.held)
    is_cuda = device.type == "cuda"
    if is_cuda:
        begin_peak(device)
    counted = None if is_cuda else TensorPeak()
    with counted or nullcontext():
        first = [stepper.step(number) for number in range(WARM_STEPS)]
    timed = [stepper.step(WARM_STEPS + number) for number in range(num_steps)]
    with counted or nullcontext():
        heaviest = try_heaviest(stepper, step=WARM_STEPS + num_steps)
    counted_bytes = counted.peak_bytes if counted is not None else 0
    return Benched(
        peak_bytes=peak_of_tensors(device) if is_cuda else held + counted_bytes,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if is_cuda else 0,
        rss_bytes=max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - imported),
        tokens=sum(one.num_tokens for one in timed),
        seconds=sum(one.seconds for one in timed),
        losses=tuple(one.loss for one in (*first, *timed)),
        heaviest=heaviest,
    )


def try_heaviest(stepper: Stepper, *, step: int) -> tuple[int, int, int, int]:
    """Step by the heaviest micro-batch that the data can make, over gradients where steps have several.

    It is logged, as the prediction takes it: entropies of full logits need memory of their own. Its rows,
    tokens, loss tokens, and tokens of its longest row.
    """
    steps = stepper.steps
    # Rollouts of the steps before the last one are gone.
    past = range(step - 1 if isinstance(steps, OnlineSteps) else 0, step)
    has_more = any(len(stepper.work(number).micro_batches) > 1 for number in past)
    with ExitStack() as held:
        if isinstance(steps, OnlineSteps):
            sequences = held.enter_context(made_up_rollout(steps))
        else:
            sequences = heaviest_sequences(stepper, until=step)
        work = step_of(steps.feed, sequences, step=step, has_more=has_more)
        stepper.gradients(work, want_stats=True, is_trial=True)
        stepper.update(work)
        micro_batch = micro_batch_of(steps.feed, sequences)
    rows, longest = micro_batch.input_ids.shape
    return rows, micro_batch.num_tokens, micro_batch.num_loss_tokens, longest


def heaviest_sequences(stepper: Stepper, *, until: int) -> Ints:
    """The longest rows together; or, where padding takes more, a micro-batch of the steps before `until`."""
    feed, settings = stepper.steps.feed, stepper.plan.settings
    longest = longest_together(feed, settings)
    if settings.padding_free:
        return longest
    met = [micro_batch for step in range(until) for micro_batch in stepper.work(step).micro_batches]
    return max([longest, *met], key=lambda sequences: micro_batch_of(feed, sequences).input_ids.numel())


def micro_batch_of(feed: Feed, sequences: Ints) -> MicroBatch:
    """Micro-batch that the model is given of some sequences."""
    made = feed.micro_batch(sequences)
    answers = made.answers if isinstance(made, PolicyMicro) else made
    micro_batch = answers.micro_batch if isinstance(answers, AnswerBatch) else answers
    assert isinstance(micro_batch, MicroBatch)
    return micro_batch


def main() -> int:
    """The exit code: 0, 7 out of memory, or that of the fault."""
    plan = read_plan(Path(sys.argv[1]))
    try:
        print(json.dumps(asdict(bench(plan, int(sys.argv[2])))), flush=True)
    except MemtrainError as error:
        print(error.text(), file=sys.stderr)
        return error.exit_code
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        print(str(error).splitlines()[0], file=sys.stderr)
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Without destructors: of a process group, they may wait for ever.
    os._exit(code)
