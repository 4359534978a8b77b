"""Optimizer steps bucket by bucket; gradients that were not stepped stay where a step breaks off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor

Item = TypeVar("Item")


def buckets_of(
    items: Iterable[Item], limit_bytes: int, bytes_of: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Items of at most `limit_bytes` together by `bytes_of`, in their order; or one item alone."""
    bucket: list[Item] = []
    num_bytes = 0
    for item in items:
        size = bytes_of(item)
        if bucket and num_bytes + size > limit_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(item)
        num_bytes += size
    if bucket:
        yield bucket


def step_by_bucket(
    parameters: Iterable[Tensor],
    buckets: Callable[[list[Tensor]], Iterable[list[Tensor]]],
    step: Callable[[list[Tensor], dict[Tensor, Tensor]], None],
) -> None:
    """Step the parameters that have a gradient; `step` is given a bucket and all gradients.

    When it breaks off, the gradients of buckets that are done are gone, and all others are there.
    """
    gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    left = dict(gradients)
    for parameter in gradients:
        parameter.grad = None
    try:
        for bucket in buckets(list(gradients)):
            step(bucket, gradients)
            for parameter in bucket:
                del left[parameter]
        left = gradients
    finally:
        for parameter, gradient in left.items():
            parameter.grad = gradient
