"""Steps whose tensors are counted on a CPU."""

from contextlib import nullcontext

import torch

from memtrain.trainers.memory_meter.phase_watch import WATCHED_STEPS, MemoryWatch, StepWeight


class Counted(nullcontext):
    """Counts nothing, and remembers that it was asked."""

    peak_bytes = live_bytes = 0
    times = 0

    def __enter__(self):
        Counted.times += 1
        return self


def counted_steps(tokens, ahead):
    """Numbers of the steps that are counted, of a run whose steps have so many tokens."""
    watch = MemoryWatch(torch.device("cpu"), 0, lambda *reported: None, counting=Counted)
    found = []
    for step, num_tokens in enumerate(tokens):
        before = Counted.times
        coming = max(tokens[step + 1 : step + 1 + ahead], default=0)
        with watch.phase("steady step", StepWeight(num_tokens, lambda coming=coming: coming)):
            pass
        found += [step] if Counted.times > before else []
    return found


def test_a_peak_comes_with_the_largest_micro_batch_of_its_step():
    noted = []
    watch = MemoryWatch(torch.device("cpu"), 100, lambda *reported: noted.append(reported))
    with watch.phase("steady step", StepWeight(10, lambda: 0, lambda: 7)):
        held = torch.zeros(64)
        del held
    with watch.phase("saving"):
        pass
    assert [(phase, allocated, tokens) for phase, allocated, _, _, tokens in noted] == [
        ("steady step", 100 + 256, 7),
        ("saving", 100, 0),
    ]


def test_what_one_phase_leaves_is_counted_once_and_no_more_when_it_is_gone():
    """Copies that each step makes anew, while those of the step before are still there, as of adapters."""
    noted = []
    watch = MemoryWatch(torch.device("cpu"), 100, lambda *reported: noted.append(reported))
    for _ in range(WATCHED_STEPS):
        with watch.phase("steady step", StepWeight(10, lambda: 0)):
            made = torch.zeros(64)
            kept = made
    with watch.phase("saving"):
        pass
    del made, kept
    with watch.phase("evaluation"):
        pass
    peaks = {phase: allocated for phase, allocated, *_ in noted}
    assert peaks == {"steady step": 100 + 2 * 256, "saving": 100 + 256, "evaluation": 100}


def test_the_heaviest_step_is_counted_and_not_each_before_it_that_is_heavier_than_those_so_far():
    """By hand: the first two; 9 is the heaviest of all; of those far ahead nothing is known."""
    tokens = [4, 3, 5, 6, 7, 2, 9, 8, 9]
    assert counted_steps(tokens, ahead=len(tokens)) == [0, 1, 6]
    assert counted_steps(tokens, ahead=1) == [0, 1, 4, 6]
    assert counted_steps(tokens, ahead=0) == [0, 1, 2, 3, 4, 6]
