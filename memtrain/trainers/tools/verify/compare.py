"""Distance between two recordings of the same step, and its limits.

Float32: fixed limits, of what the order of sums may move. Half precision: the planned side may be as far from
a float32 run of the same weights as the plain side is, give or take a factor: rounding is the plain run's
own, and no fixed number fits models of all depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from memtrain.trainers.tools.verify.record import Recorded

LOGP_LIMIT = 1e-4
"""Nats, float32. A log-prob of 10 has a rounding step of 1e-6, and a sum over a vocabulary and the layers'
roundings add up to tens of them; measured 4e-6 for 2 layers (tests/equal), CPU."""

LOSS_LIMIT = 2e-5
"""Over the larger of 1 and the loss, float32; besides one rounding step of the summed log-probs of the
longest answer, where a loss reads those (float32 has 24 bits, a sum of 1,000 nats is known to 6e-5)."""

GRADIENT_LIMIT = 1e-4
"""Norm of the difference over the norm, float32; measured up to 3e-5 for preferences (tests/equal), CPU."""

GRADIENT_FLOOR = 1e-3
"""Share of the mean gradient below which one is compared with that share: the gradient of a bias of keys is 0
but for rounding, and a relative difference of it says nothing."""

UPDATE_LIMIT = 1e-4
"""Difference of the moved weights over the largest move, with one gradient on both sides, float32; besides
two rounding steps of the weight itself."""

STILL_LIMIT = 0.01
"""Share of the weights that had to move and may stand still: none do but for a step of float32 that is itself
at the limit."""

LOSS_HALF = 1e-2
"""Bound of a step without log-probs, in half precision: bfloat16's precision of a nat."""

HALF_FACTOR = 2.0
"""Factor by which half precision may be further from float32 than the plain side. Packed rows sum in another
order, so a rounding error is another draw of the same size; tests/equal holds 1.5 over whole models."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A distance, its limit, and its place."""

    value: float
    limit: float
    where: str = ""
    """The parameter that is furthest off, or the place in the step."""

    @property
    def is_within(self) -> bool:
        """Whether it is allowed; a NaN is not."""
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Moves:
    """Weights that a step had to move, and those of them that it left where they were."""

    num_due: int
    num_still: int
    where: str = ""
    """The parameter with the most that stand still."""

    @property
    def is_fine(self) -> bool:
        """Whether they moved."""
        return self.num_still <= STILL_LIMIT * self.num_due


@dataclass(frozen=True, slots=True)
class StepDifferences:
    """Differences of a step between two sides."""

    loss: Difference
    scores: Difference | None
    """Of log-probs in nats, or of rewards; None where the step was made without them."""
    gradients: Difference
    update: Difference
    """Of the weights after the step, by the same gradient on both sides."""
    by_parameter: Mapping[str, float]
    """Differences of which `gradients` is the largest."""
    moves: Moves
    """Of the planned side: both sides may have an optimizer that does nothing."""

    def named(self) -> dict[str, Difference]:
        """Differences that were measured."""
        found = {"loss": self.loss, "log-probs": self.scores, "gradients": self.gradients}
        return {name: one for name, one in (found | {"update": self.update}).items() if one is not None}


def differences(
    planned: Recorded,
    plain: Recorded,
    before: Mapping[str, Tensor],
    yardstick: Recorded | None,
) -> StepDifferences:
    """A step of the planned side against the plain one from the same weights `before`.

    `yardstick`: the same step in float32, for half precision.
    """
    by_parameter = gradient_differences(planned.gradients, plain.gradients)
    loss, scores = abs(planned.loss - plain.loss), score_difference(planned, plain)
    loss_limit, score_limit, gradient_limit = _loss_limit(plain), LOGP_LIMIT, GRADIENT_LIMIT
    if yardstick is not None:
        loss = abs(planned.loss - yardstick.loss)
        scores = score_difference(planned, yardstick)
        by_parameter = gradient_differences(planned.gradients, yardstick.gradients)
        rounded = score_difference(plain, yardstick)
        score_error = rounded[0] if rounded else 0.0
        # By chance the plain loss may be right; its log-probs are not, and the loss sums up so many.
        loss_limit += HALF_FACTOR * abs(plain.loss - yardstick.loss)
        loss_limit += (score_error or LOSS_HALF) * max(1, plain.longest_answer) ** 0.5
        score_limit += HALF_FACTOR * score_error
        gradient_limit += HALF_FACTOR * gradient_difference(plain.gradients, yardstick.gradients)[0]
    gradients = worst_of(by_parameter)
    return StepDifferences(
        loss=Difference(loss, loss_limit),
        scores=None if scores is None else Difference(scores[0], score_limit, scores[1]),
        gradients=Difference(gradients[0], gradient_limit, gradients[1]),
        update=update_difference(planned.weights, plain.weights, before),
        by_parameter=by_parameter,
        moves=moves_of(planned, before, yardstick),
    )


def gradient_differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The relative difference of each parameter's gradient.

    A parameter that has a gradient on one side only is infinitely far off.
    """
    sizes = {name: float(torch.linalg.vector_norm(g.float())) for name, g in expected.items()}
    count = sum(g.numel() for g in expected.values())
    mean = (sum(size**2 for size in sizes.values()) / max(1, count)) ** 0.5
    errors = dict.fromkeys(sorted(found.keys() ^ expected.keys()), float("inf"))
    for name in expected.keys() & found.keys():
        floor = GRADIENT_FLOOR * mean * expected[name].numel() ** 0.5
        apart = float(torch.linalg.vector_norm(found[name].float() - expected[name].float()))
        errors[name] = apart / max(sizes[name], floor, 1e-30)
    return errors


def gradient_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """(the largest relative difference of a parameter's gradient, its name)."""
    return worst_of(gradient_differences(found, expected))


def worst_of(errors: Mapping[str, float]) -> tuple[float, str]:
    """(the largest difference, its parameter); a NaN is larger than all."""
    worst = 0.0, ""
    for name, error in errors.items():
        # A NaN is larger than nothing: `not <=` takes it.
        if not error <= worst[0]:
            worst = error, name
    return worst


def score_difference(found: Recorded, expected: Recorded) -> tuple[float, str] | None:
    """(the largest difference, the place of the token among the step's); None where either has none."""
    if found.score_N is None or expected.score_N is None:
        return None
    if found.score_N.shape != expected.score_N.shape:
        return float("inf"), f"{len(found.score_N)} are scored, and {len(expected.score_N)} plainly"
    apart_N = (found.score_N - expected.score_N).abs()
    if not len(apart_N):
        return 0.0, ""
    at = int(apart_N.argmax())
    return float(apart_N[at]), f"token {at:,} of {len(apart_N):,}"


def update_difference(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> Difference:
    """The parameter whose weights are furthest over their limit."""
    worst = Difference(0.0, 0.0)
    for name, weight in expected.items():
        eps = float(torch.finfo(weight.dtype).eps)
        wide = weight.double()
        move = float((wide - before[name].double()).abs().max())
        limit = UPDATE_LIMIT * move + 2 * eps * float(wide.abs().max())
        apart = float((found[name].double() - wide).abs().max())
        if not apart - limit <= worst.value - worst.limit or not worst.where:
            worst = Difference(apart, limit, name)
    return worst


def moves_of(planned: Recorded, before: Mapping[str, Tensor], yardstick: Recorded | None) -> Moves:
    """Weights that had to move by two rounding steps or more, and did not move at all.

    By the float32 step of the same gradients; without one, where nothing moved, by the rate times the
    gradients, which is what gradient descent moves by and less than other optimizers do.
    """
    num_due, still = 0, dict[str, int]()
    moved = {name: planned.weights[name] != weight for name, weight in before.items()}
    if yardstick is None and any(bool(one.any()) for one in moved.values()):
        return Moves(0, 0)
    for name, weight in before.items():
        if yardstick is not None:
            update = (yardstick.weights[name].double() - weight.double()).abs()
        else:
            update = planned.rate * planned.gradients.get(name, torch.zeros_like(weight)).double().abs()
        info = torch.finfo(weight.dtype)
        due = update >= 2 * info.eps * weight.double().abs().clamp(min=float(info.tiny))
        num_due += int(due.sum())
        if count := int((due & ~moved[name]).sum()):
            still[name] = count
    return Moves(num_due, sum(still.values()), max(still, key=lambda name: still[name], default=""))


def _loss_limit(plain: Recorded) -> float:
    size = max(1.0, abs(plain.loss))
    summed = 0.0
    if plain.score_N is not None and len(plain.score_N):
        summed = float(plain.score_N.abs().mean()) * plain.longest_answer
    return LOSS_LIMIT * size + float(torch.finfo(torch.float32).eps) * summed
