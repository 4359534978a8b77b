"""What a rollout has so far is reported once, in any order, and only the rest is written by somebody else."""

from collections.abc import Sequence

from memtrain.trainers.online.generation.progress import Progress
from memtrain.trainers.online.generation.protocol import Group, OnDone, Sample, Sampling


class _Writer:
    """Writes each group's seed as its one token."""

    name = "writer"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def generate(
        self, groups: Sequence[Group], sampling: Sampling, on_done: OnDone | None = None
    ) -> list[list[Sample]]:
        self.asked = [group.seed for group in groups]
        made = [[Sample((group.seed,), (0.0,), "length")] for group in groups]
        assert on_done is not None
        for place in reversed(range(len(made))):
            on_done(place, made[place])
        return made

    def close(self) -> None:
        pass


def _groups() -> list[Group]:
    return [Group((1, 2), 1, seed) for seed in (10, 11, 12)]


def test_only_what_is_missing_is_written_by_another_and_each_group_is_reported_once() -> None:
    reported: list[int] = []
    progress = Progress(_groups(), lambda number, samples: reported.append(number))
    progress.add(1, [Sample((11,), (0.0,), "length")])
    writer = _Writer()
    progress.finish_with(writer, Sampling(max_tokens=1))
    assert writer.asked == [10, 12]
    assert reported == [1, 2, 0]
    assert [samples[0].token_ids for samples in progress.in_order()] == [(10,), (11,), (12,)]


def test_nobody_is_asked_when_nothing_is_missing() -> None:
    progress = Progress(_groups()[:1])
    progress.add(0, [Sample((10,), (0.0,), "length")])
    writer = _Writer()
    progress.finish_with(writer, Sampling(max_tokens=1))
    assert writer.asked == []
