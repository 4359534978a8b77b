"""Steps by bucket: whole buckets or none, in the order of the tensors."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from memtrain.trainers.optim.buckets import buckets_of, step_by_bucket


def weights(*sizes: int) -> list[Tensor]:
    made = [torch.zeros(size, requires_grad=True) for size in sizes]
    for one in made:
        one.grad = torch.ones_like(one)
    return made


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 10, []),
        ([3, 3, 3], 6, [[3, 3], [3]]),
        ([9, 1, 1, 9], 4, [[9], [1, 1], [9]]),
        ([2, 2, 2], 100, [[2, 2, 2]]),
    ],
)
def test_a_bucket_holds_as_much_as_the_limit_or_one_tensor(sizes, limit, expected):
    found = buckets_of(weights(*sizes), limit, lambda one: one.numel())
    assert [[one.numel() for one in bucket] for bucket in found] == expected


def one_by_one(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    return buckets_of(tensors, 1, lambda one: 1)


def test_each_step_is_given_its_bucket_and_no_gradient_lies_on_a_weight():
    parameters = weights(1, 2, 3)
    parameters[1].grad = None
    stepped: list[int] = []

    def step(bucket: list[Tensor], gradients: dict[Tensor, Tensor]) -> None:
        assert all(one.grad is None for one in parameters)
        assert set(gradients) == {parameters[0], parameters[2]}
        stepped.append(bucket[0].numel())

    kept = [one.grad for one in parameters]
    step_by_bucket(parameters, one_by_one, step)
    assert stepped == [1, 3]
    assert all(one.grad is grad for one, grad in zip(parameters, kept, strict=True))


def test_a_step_that_breaks_off_leaves_the_gradients_of_what_was_not_stepped():
    parameters = weights(1, 2, 3)

    def step(bucket: list[Tensor], gradients: dict[Tensor, Tensor]) -> None:
        if bucket[0].numel() == 2:
            raise MemoryError

    with pytest.raises(MemoryError):
        step_by_bucket(parameters, one_by_one, step)
    assert [one.grad is None for one in parameters] == [True, False, False]
