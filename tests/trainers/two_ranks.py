"""Two processes of a test that talk to each other."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from memtrain.trainers.runtime.ranks import Ranks, current_ranks


def on_two_ranks(folder: Path, act: Callable[[Ranks], None]) -> None:
    """Do it in two forked processes on gloo; each must come through."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
                act(current_ranks())
                dist.barrier()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
