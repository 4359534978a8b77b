"""One variant of a benchmark in a process of its own: peak memory, speed and losses of a plan's first steps.

    python -m memtrain.trainers.bench PLAN.json NUM_STEPS

Prints one line of JSON (`Benched`). Completions of online methods are fixed ones: what writes them is not
timed. Two steps come before the timed ones: optimizer states appear in the first, and on a CPU both are
counted tensor by tensor, which costs time.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from memtrain.errors import MemtrainError
from memtrain.memory.plan import Plan, read_plan
from memtrain.trainers.build import build
from memtrain.trainers.engine import make_accelerator
from memtrain.trainers.memory_errors import is_out_of_memory
from memtrain.trainers.model.load import local_device
from memtrain.trainers.stepping import Stepper
from memtrain.trainers.trace.recorder import TensorPeak
from memtrain.trainers.verify.rollout import Rollouts, online_source
from memtrain.trainers.worker import resident

WARM_STEPS = 2
OUT_OF_MEMORY = 7
"""Exit code of this process when memory runs out, as of a run."""


@dataclass(frozen=True, slots=True)
class Benched:
    """What the steps of one variant needed."""

    peak_bytes: int
    """Highest sum of live tensors on the device."""
    reserved_bytes: int
    """What CUDA's caching allocator held at most; 0 on a CPU."""
    rss_bytes: int
    """Highest resident memory of the process, above what it had after its imports."""
    tokens: int
    """Of the timed steps, without padding."""
    seconds: float
    """Of the timed steps."""
    losses: tuple[float, ...]
    """Of every step, the first ones among them."""


def bench(plan: Plan, num_steps: int) -> Benched:
    """Make `num_steps` timed steps of `plan` on this process, after two that are not timed."""
    imported = psutil.Process().memory_info().rss
    make_accelerator(plan.settings)
    built = build(plan)
    device = local_device(plan.settings)
    stepper = Stepper(plan, built, online_source(plan, built, Rollouts()))
    held = resident(built.weights)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    with nullcontext() if is_cuda else TensorPeak() as counted:
        first = [stepper.step(number) for number in range(WARM_STEPS)]
    timed = [stepper.step(WARM_STEPS + number) for number in range(num_steps)]
    counted_bytes = counted.peak_bytes if counted is not None else 0
    return Benched(
        peak_bytes=torch.cuda.max_memory_allocated(device) if is_cuda else held + counted_bytes,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if is_cuda else 0,
        rss_bytes=max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - imported),
        tokens=sum(one.num_tokens for one in timed),
        seconds=sum(one.seconds for one in timed),
        losses=tuple(one.loss for one in (*first, *timed)),
    )


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
