"""The finished groups of a rollout, kept while engines fail and are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memtrain.trainers.online.generation.protocol import Group, OnDone, Sample, Sampler, Sampling


@dataclass(slots=True)
class Progress:
    """The completions of a rollout's groups, by the group's place; each is told of once, when it is there."""

    groups: Sequence[Group]
    on_done: OnDone | None = None
    done: dict[int, list[Sample]] = field(default_factory=dict[int, list[Sample]])

    @property
    def missing(self) -> list[int]:
        """Places of the groups that are still to be written, in order."""
        return [number for number in range(len(self.groups)) if number not in self.done]

    def add(self, number: int, samples: list[Sample]) -> None:
        """Take the completions of one group."""
        self.done[number] = samples
        if self.on_done is not None:
            self.on_done(number, samples)

    def finish_with(self, sampler: Sampler, sampling: Sampling) -> None:
        """Have another sampler write the missing groups."""
        missing = self.missing

        def add(place: int, samples: list[Sample]) -> None:
            self.add(missing[place], samples)

        if missing:
            sampler.generate([self.groups[number] for number in missing], sampling, add)

    def in_order(self) -> list[list[Sample]]:
        """The completions of every group, in the order of the groups."""
        return [self.done[number] for number in range(len(self.groups))]
