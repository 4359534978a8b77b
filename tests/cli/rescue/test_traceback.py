"""Messages of torch, old and new, and the moments of frames."""

import pytest

from memtrain.cli.rescue.traceback import MOMENTS, read_traceback

GIB = 2**30
NEW = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 9, in <module>\n    trainer.train()\n'
    '  File "trainer.py", line 2, in training_step\n    self.accelerator.backward(loss)\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
    "79.15 GiB of which 1.25 GiB is free. Process 2116 has 10.00 GiB memory in use. Including non-PyTorch "
    "memory, this process has 67.90 GiB memory in use. Of the allocated memory 60.10 GiB is allocated by "
    "PyTorch, and 6.20 GiB is reserved by PyTorch but unallocated."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 86.00 MiB (GPU 0; 79.35 GiB total capacity; 77.00 "
    "GiB already allocated; 20.00 MiB free; 78.00 GiB reserved in total by PyTorch)"
)


def test_a_message_of_today_says_who_held_the_card():
    died = read_traceback(NEW)
    assert died.moment == "backward pass"
    assert died.asked_bytes == 2.5 * GIB
    assert died.capacity_bytes == round(79.15 * GIB)
    assert died.allocated_bytes == round(60.10 * GIB)
    assert died.idle_bytes == round(6.20 * GIB)
    assert died.others_bytes == pytest.approx(10.0 * GIB, rel=1e-3)
    assert not died.on_host


def test_a_message_of_earlier_years_says_it_too():
    died = read_traceback(OLD)
    assert (died.asked_bytes, died.moment) == (86 * 2**20, None)
    assert died.capacity_bytes == round(79.35 * GIB)
    assert died.idle_bytes == 1 * GIB
    assert died.others_bytes == pytest.approx(0.33 * GIB, abs=0.01 * GIB)


@pytest.mark.parametrize(
    ("line", "moment"),
    [
        ("loss = cross_entropy(logits, labels)", "loss"),
        ("optimizer.step()", "optimizer step"),
        ("state['exp_avg_sq'] = torch.zeros_like(p)", "optimizer step"),
        ("output = self.evaluation_loop(loader)", "evaluation"),
        ("self.save_model(output_dir)", "saving"),
        ("model = AutoModel.from_pretrained(path)", "load"),
        ("out = model.generate(**inputs)", "generation"),
        ("return self.forward(*args)", "forward pass"),
    ],
)
def test_frames_tell_the_moment(line: str, moment: str):
    text = f'Traceback (most recent call last):\n  File "x.py", line 3, in y\n    {line}\n{OLD}'
    assert read_traceback(text).moment == moment
    assert moment in {name for _, name in MOMENTS}


def test_a_killed_process_is_the_hosts_memory():
    assert read_traceback("worker died: exitcode: -9 (pid: 3)").on_host
    assert read_traceback("DefaultCPUAllocator: not enough memory: you tried to allocate 90 bytes").on_host
    assert not read_traceback(OLD).on_host


def test_text_that_is_no_traceback_says_nothing():
    died = read_traceback("all is well\n" * 10)
    assert (died.moment, died.asked_bytes, died.capacity_bytes, died.on_host) == (None, None, None, False)
