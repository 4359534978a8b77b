"""Live bytes counted by hand."""

import gc

import torch

from memtrain.trainers.memory_meter.live_tensors import Recorder, TensorPeak
from memtrain.trainers.memory_meter.resized_storages import ResizedPeak

KIB = 1024


def kib(number):
    return torch.empty(number * KIB, dtype=torch.uint8)


def test_the_peak_is_what_lives_at_once_and_what_is_left_lives_on():
    with TensorPeak() as counted:
        first = kib(4)
        second = kib(3)
        del first
        third = kib(2)
    assert (counted.peak_bytes, counted.live_bytes) == (7 * KIB, 5 * KIB)
    del second, third
    assert counted.live_bytes == 0


def test_views_and_tensors_from_before_are_not_counted():
    before = torch.ones(KIB)
    with TensorPeak() as counted:
        view = before.view(2, -1).t()[1:]
        before.add_(1)
        same = torch.ops.aten._unsafe_view(before, (KIB,))
    assert counted.peak_bytes == 0
    del before, view, same
    assert counted.live_bytes == 0


def test_what_autograd_keeps_is_counted_until_the_backward_pass_lets_go():
    weight = torch.ones(KIB, requires_grad=True)
    with TensorPeak() as counted:
        loss = (weight.exp().sin()).sum()
        # The results of exp (kept by exp and by sin), of sin (gone after the sum) and the sum.
        assert counted.live_bytes == 4 * KIB + 4
        loss.backward()
        del loss
        assert counted.live_bytes == 4 * KIB
    assert counted.peak_bytes == 3 * 4 * KIB + 4 + 4


def test_tensors_of_another_device_are_not_counted():
    with TensorPeak() as counted:
        torch.empty(KIB, device="meta")
    assert counted.peak_bytes == 0


def test_a_recorder_knows_phases_owners_and_the_moment_of_the_peak():
    weight = torch.ones(KIB)
    recorder = Recorder()
    with recorder:
        recorder.own([weight], "weights")
        recorder.enter("one")
        first = kib(4)
        recorder.enter("two")
        second = kib(8)
        del first
        recorder.own([second], "gradients")
        recorder.enter("three")
        third = kib(1)
    assert recorder.phase_peaks == {"start": 4 * KIB, "one": 8 * KIB, "two": 16 * KIB, "three": 13 * KIB}
    owners = recorder.owners_at_peaks()
    assert owners["two"] == {"weights": 4 * KIB, "": 4 * KIB, "gradients": 8 * KIB}
    assert {phase: sum(sizes.values()) for phase, sizes in owners.items()} == recorder.phase_peaks
    del third


def test_scratch_of_a_kernel_counts_while_it_runs():
    scratch = {torch.ops.aten.mm.default: lambda args, kwargs, out: 10 * KIB}
    with Recorder(scratch=scratch) as recorder:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert recorder.peak_bytes == 3 * 16 + 10 * KIB
    assert recorder.live_bytes == 0


def test_counting_keeps_no_tensor_alive():
    gc.disable()
    try:
        with Recorder() as recorder:
            layer = torch.nn.Linear(8, 8)
            layer(torch.ones(2, 8)).sum().backward()
            del layer
        assert recorder.live_bytes == 0
    finally:
        gc.enable()


def test_the_end_of_a_storage_that_was_resized_is_taken_off_with_what_it_grew_by():
    """A weak reference's callback that fails is told to nobody: what FSDP2 freed was counted on."""
    with ResizedPeak() as counted:
        made = torch.empty(4)
        made.untyped_storage().resize_(64)
        assert counted.live_bytes == 64
        del made
        assert counted.live_bytes == 0
    assert counted.peak_bytes == 64
