"""Tensors written to their places in a file, a piece at a time; by several threads where there is much."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from memtrain.trainers.runtime.threads import do_all

NUM_THREADS = 4
"""Threads that write one file, or take checksums of several. Taste: one thread copies 1 to 3 GB/s into the
page cache, and a disk of a GPU server takes more."""
PIECE_BYTES = 64 * 2**20
"""Bytes that a thread copies from the device and writes at once; a file of fewer is written by the caller."""


def write_tensors_at(descriptor: int, placed: Iterable[tuple[Tensor, int]]) -> None:
    """Write tensors of any device, each to its place in bytes from the start of the file.

    Host memory: a piece for each thread, or one whole tensor where it is not contiguous. Raises: OSError.
    """
    held = list(placed)
    pieces = _pieces(descriptor, held)
    if sum(tensor.nbytes for tensor, _ in held) < PIECE_BYTES:
        for write in pieces:
            write()
        return
    do_all(pieces, NUM_THREADS)


def _pieces(descriptor: int, placed: Iterable[tuple[Tensor, int]]) -> Iterator[Callable[[], None]]:
    for tensor, place in placed:
        step = PIECE_BYTES if tensor.is_contiguous() else max(1, tensor.nbytes)
        for first in range(0, tensor.nbytes, step):
            yield partial(_write_piece, descriptor, tensor, first, first + step, place + first)


def _write_piece(descriptor: int, tensor: Tensor, first: int, end: int, place: int) -> None:
    plain = tensor.resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        plain = plain.cpu().contiguous()
    data = memoryview(plain.reshape(-1).view(torch.uint8)[first:end].cpu().numpy().data)
    while data:
        num_written = os.pwrite(descriptor, data, place)
        data, place = data[num_written:], place + num_written
