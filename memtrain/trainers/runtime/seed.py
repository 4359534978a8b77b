"""Randomness that a resumption, a batch size or a number of processes does not move.

A draw is named by what it is for (the seed, the step, the row, ...) and not by how many were made before it.
What must go through torch's global generator (dropout) is seeded anew for every micro-batch.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

SEED_BITS = 63
"""torch.Generator takes 64 bits with a sign."""


def derive_seed(seed: int, *names: int | str) -> int:
    """A seed of 63 bits for the draw of these names: the same on every machine and in every process.

    Names are told apart in order and type: (1, 23), (12, 3) and ("1", 23) give different seeds.
    """
    text = repr((seed, *names)).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def torch_generator(seed: int, *names: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for the draw of these names."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *names))


def numpy_generator(seed: int, *names: int | str) -> np.random.Generator:
    """A numpy generator (Philox, counter-based) for the draw of these names."""
    return np.random.Generator(np.random.Philox(derive_seed(seed, *names)))


def seed_everything(seed: int, *names: int | str) -> None:
    """Seed the global generators of Python, numpy and torch (every CUDA device as well)."""
    derived = derive_seed(seed, *names)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived)


def seed_step(seed: int, step: int, micro_batch_id: int, rank: int = 0) -> None:
    """Seed torch's global generators for one micro-batch, so that dropout depends on nothing before it.

    Where `micro_id` counts the micro-batches of a step over all ranks, and `rank` is left out, two processes
    drop what one would.
    """
    seed_torch(derive_seed(seed, "micro-batch", step, micro_batch_id, rank))


def seed_torch(seed: int) -> None:
    """Seed the global generators of the CPU and of CUDA devices: the numbers of `torch.manual_seed`.

    That one also notes a call for each kind of device that is not in use, with the stack as text: 0.5 ms each
    on a CPU.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def random_state() -> dict[str, Any]:
    """The state of every global generator, as `state_io` saves it; of the current CUDA device only."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put every global generator where `random_state` found it."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
