"""Groups over the ranks, and again with fewer rows at a time when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from memtrain.errors import OutOfMemory
from memtrain.trainers.online.generation.protocol import Group, OnDone, Sample, Sampler, Sampling
from memtrain.trainers.runtime.oom_errors import attempt, free
from memtrain.trainers.runtime.ranks import Ranks


@dataclass(slots=True)
class Generating:
    """Sampler of completions over all ranks. The same completions for any number of ranks, and of rows at a
    time."""

    make: Callable[[int], Sampler]
    """A sampler of so many rows."""
    max_rows: int
    ranks: Ranks
    emit: Callable[[str], None] = lambda text: None
    close: Callable[[], None] = lambda: None
    """Ends the sampler's other processes."""
    writing: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context of the passes of all ranks, where each of them gathers layers."""

    def all(
        self, groups: Sequence[Group], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[list[Sample]]:
        """The completions of all groups, on every rank; called by all of them together.

        `on_done` is told of each group that this rank writes when it is there, and again where memory ran out
        and it was written again: the same completions.
        Raises: OutOfMemory, on every rank, when not even one row at a time can be written.
        """
        rank, world = self.ranks.rank, self.ranks.world
        # Neighbours are dealt to different ranks, so that no rank gets all the long ones.
        own = groups[rank::world]
        made: list[list[Sample]] | None = None

        def report_group(place: int, samples: list[Sample]) -> None:
            if on_done is not None:
                on_done(rank + place * world, samples)

        with self.writing():
            while made is None and self.max_rows:
                made, is_whole = attempt(
                    lambda: self.make(self.max_rows).generate(own, sampling, report_group)
                )
                if not is_whole:
                    free()
                    self._halve()
        shares = self.ranks.gather(made)
        if any(share is None for share in shares):
            raise OutOfMemory(
                "out of memory while a single completion was generated",
                "generate.max_tokens",
                "lower generate.max_tokens or length.max_prompt, or train an adapter on quantized weights",
            )
        whole: list[list[Sample]] = [[] for _ in groups]
        for number, share in enumerate(shares):
            assert share is not None
            whole[number::world] = share
        return whole

    def _halve(self) -> None:
        self.max_rows //= 2
        self.emit(
            f"out of memory while completions were generated: {self.max_rows} at a time from now on, with "
            "the same completions"
        )
