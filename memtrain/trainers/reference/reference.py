"""The reference model: where its log-probs of a batch's answers come from."""

# A answers

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from peft import PeftModel
from torch import Tensor, nn

from memtrain.trainers.batches.answer_batch import AnswerBatch
from memtrain.trainers.runtime.weight_layout import local_of

AskLogps = Callable[[nn.Module, AnswerBatch], Tensor]
"""Log-probs [A] of a batch's answers under a scorer."""


class Reference(Protocol):
    """Model that a policy is compared with."""

    def logps(self, batch: AnswerBatch, ask: AskLogps) -> Tensor:
        """Log-probs [A] of the answers, constants."""
        ...


class Precomputed:
    """Log-probs that came with the batch: no model is there."""

    def logps(self, batch: AnswerBatch, ask: AskLogps) -> Tensor:
        """Log-probs of the batch."""
        assert batch.reference_A is not None, "The feed was given the reference's log-probs."
        return batch.reference_A


@dataclass(frozen=True, slots=True)
class FrozenReference:
    """A model that is asked for every batch: a frozen copy, or the policy without its adapter."""

    scorer: nn.Module
    switched: Callable[[], AbstractContextManager[object]] = nullcontext
    """Makes the scorer the reference while it is asked."""

    def logps(self, batch: AnswerBatch, ask: AskLogps) -> Tensor:
        """A forward pass without gradients, dropout or checkpointing."""
        with torch.no_grad(), self.switched(), evaluating(self.scorer):
            return ask(self.scorer, batch)


@dataclass(frozen=True, slots=True)
class EmaReference:
    """A copy that follows the policy: reference <- mixup * policy + (1 - mixup) * reference.

    Source: Gorbatovski et al. 2024 (TR-DPO), arXiv:2404.09656, eqs. 2 and 3; with `every_steps` 1 it is a
    moving average.
    """

    scorer: nn.Module
    policy: nn.Module
    """Not wrapped for its ranks."""
    every_steps: int
    mixup: float

    def logps(self, batch: AnswerBatch, ask: AskLogps) -> Tensor:
        """A forward pass of the copy, without gradients."""
        return FrozenReference(self.scorer).logps(batch, ask)

    def stepped(self, num_steps: int) -> None:
        """Follow the policy, after every `every_steps` optimizer steps."""
        if num_steps % self.every_steps:
            return
        with torch.no_grad():
            for own, other in zip(self.scorer.parameters(), self.policy.parameters(), strict=True):
                local_of(own.detach()).lerp_(local_of(other.detach()), self.mixup)

    def kept_state(self) -> dict[str, Tensor]:
        """The weights of the copy: they cannot be made again from the policy's."""
        return {name: one.detach() for name, one in self.scorer.named_parameters()}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode inside: no dropout, no checkpointing; the model's own mode again after it."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def at_its_start(scorer: nn.Module) -> FrozenReference:
    """The policy with its trained weights as they are now, as a reference: what is trained is held twice.

    The numbers change places for the pass and back again, in the same storage: recorded passes and sharding
    keep their addresses, and autograd, which waits for the policy's own, finds them as they were.
    """
    trained = [one for one in scorer.parameters() if one.requires_grad]
    held = [(one, local_of(one.detach()).clone()) for one in trained]

    def change_places() -> None:
        for one, other in held:
            # `.data`: no new version of a tensor that the backward pass is going to read.
            own = local_of(one.data)
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)

    @contextmanager
    def switched() -> Iterator[None]:
        change_places()
        try:
            yield
        finally:
            change_places()

    return FrozenReference(scorer, switched)


def without_adapter(scorer: nn.Module, model: PeftModel) -> FrozenReference:
    """The policy with its adapter switched off, as a reference."""
    return FrozenReference(scorer, lambda: cast(AbstractContextManager[object], model.disable_adapter()))
