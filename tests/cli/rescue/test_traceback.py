"""Messages of torch, old and new, and the moments of frames."""

import re
from collections.abc import Iterator
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]

import pytest

from memtrain.cli.rescue import traceback
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
        ("get_peft_model(model)  # .lm_head.to(torch.float32)", "load"),
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


def test_torch_2_1_spells_the_capacity_otherwise():
    died = read_traceback(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a "
        "total capacty "
        "of 23.69 GiB of which 43.31 MiB is free."
    )
    assert died.capacity_bytes == round(23.69 * GIB)


TWO_RANKS = (
    "[rank3]: Traceback (most recent call last):\n[rank1]: Traceback (most recent call last):\n"
    '[rank3]:   File "t.py", line 9, in step\n[rank1]:   File "t.py", line 7, in step\n'
    "[rank1]:     self.optimizer.step()\n[rank3]:     return run_backward(x)\n"
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB. GPU 3 has a total "
    "capacity "
    "of 79.14 GiB of which 9.80 GiB is free. Including non-PyTorch memory, this process has 69.33 GiB "
    "memory in "
    "use.\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 15.10 GiB. GPU 1 has a "
    "total "
    "capacity of 39.00 GiB of which 9.80 GiB is free. Of the allocated memory 30.00 GiB is allocated by "
    "PyTorch\n"
)


def test_lines_of_several_ranks_are_told_apart():
    """The first death is rank 3's: its frames and its message alone; bytes of rank 1 are not filled in."""
    died = read_traceback(TWO_RANKS)
    assert (died.moment, died.asked_bytes, died.ranks, died.device) == ("backward pass", 16 * GIB, 4, 3)
    assert died.capacity_bytes == round(79.14 * GIB)
    assert died.allocated_bytes is None


def test_words_of_a_log_before_the_traceback_are_no_frames():
    text = f"rollout: vllm, entropy_from_logits: true\n{NEW}"
    assert read_traceback(text).moment == "backward pass"


def test_others_are_what_torch_does_not_hold():
    """Two processes, neither called its own: torch holds 600 MiB, one context is taken to be this one's."""
    died = read_traceback(
        "CUDA out of memory. Tried to allocate 148.00 MiB. GPU 0 has a total capacity of 31.60 GiB of "
        "which 87.44 "
        "MiB is free. Process 441650 has 30.51 GiB memory in use. Process 449657 has 1022.00 MiB memory "
        "in use. Of "
        "the allocated memory 594.01 MiB is allocated by PyTorch, and 5.99 MiB is reserved by PyTorch "
        "but unallocated."
    )
    assert died.others_bytes == pytest.approx(29.93 * GIB, rel=1e-3)


@pytest.mark.parametrize(("held", "others_gib"), [("68.17", 0.01), ("40.00", 2.06)])
def test_a_process_alone_on_the_card_is_this_one_whatever_it_holds_beside_torch(held: str, others_gib: float):
    """Context and communicators, 3 GiB, were taken for another process's; 40 GiB are less than reserved."""
    died = read_traceback(
        "CUDA out of memory. Tried to allocate 23.19 GiB. GPU 1 has a total capacity of 79.25 GiB of which "
        f"11.07 GiB is free. Process 99 has {held} GiB memory in use. Of the allocated memory 60.01 GiB is "
        "allocated by PyTorch, and 5.11 GiB is reserved by PyTorch but unallocated."
    )
    assert died.others_bytes == pytest.approx(others_gib * GIB, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "Out of memory: Killed process 4121 (python3) total-vm:98234532kB",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1234.0.",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "  exitcode  : -9 (pid: 4121)",
    ],
)
def test_the_kernel_slurm_and_ray_kill_for_the_hosts_memory(text: str):
    assert read_traceback(text).on_host
    assert read_traceback(f"Loading checkpoint shards:  50%\n{text}").moment == "load"
    assert not read_traceback(f"{text}\n{OLD}").on_host


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ValueError: Free memory on device (20.11/79.10 GiB) on startup is less than desired GPU memory "
         "utilization (0.6, 47.46 GiB).", "start"),
        ("ValueError: No available memory for the cache blocks.", "cache"),
        ("9.1 GiB KV cache is needed, which is larger than the available KV cache memory", "length"),
    ],
)  # fmt: skip
def test_vllms_own_refusals_are_told_apart(text: str, kind: str):
    assert read_traceback(text).vllm == kind


@pytest.mark.parametrize(
    "text",
    [
        "[rank1]: ncclUnhandledCudaError: Call to CUDA function failed.\n[rank1]: Last error:\n"
        "[rank1]: Cuda failure 2 'out of memory'",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nFailed to CUDA calloc async 608 bytes",
        "node3:71:85 [0] NCCL WARN Cuda failure 'out of memory'",
    ],
)
def test_nccls_own_buffers_are_told_apart(text: str):
    assert read_traceback(text).in_nccl
    assert not read_traceback(text).on_host
    assert not read_traceback(f"NCCL version 2.21.5\n{OLD}").in_nccl


def test_frames_behind_the_message_are_those_of_another_rank():
    """LlamaFactory#1936: ranks write into one another, and the first message stands before any frame."""
    text = (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total "
        "capacty of 23.65 GiB of which 93.81 MiB is free.\nTraceback (most recent call last):\n"
        '  File "trainer.py", line 456, in __init__\n    self._move_model_to_device(model, args.device)\n'
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.\n"
        "    loss.backward()\n"
    )
    died = read_traceback(text)
    assert (died.moment, died.asked_bytes) == ("load", 136 * 2**20)


@pytest.mark.parametrize(
    ("file", "engine"),
    [
        ("torch/distributed/fsdp/_flat_param.py", "fsdp2"),
        ("torch/distributed/_composable/fsdp/_fsdp_param.py", "fsdp2"),
        ("deepspeed/runtime/zero/stage3.py", "zero3"),
        ("deepspeed/runtime/zero/partition_parameters.py", "zero3"),
        ("deepspeed/runtime/zero/stage_1_and_2.py", "zero2"),
        ("torch/nn/parallel/distributed.py", None),
    ],
)
def test_the_engine_is_known_by_its_frames(file: str, engine: str | None):
    assert read_traceback(f'  File "/x/site-packages/{file}", line 3, in step\n{NEW}').engine == engine


def most_repeats(part: object) -> Iterator[int]:
    """The most times that each part of a parsed pattern may repeat."""
    if isinstance(part, (list, tuple, _parser.SubPattern)):
        items = list(part)
        if items and str(items[0]).endswith("_REPEAT"):
            yield int(items[1][1])
        for one in items:
            yield from most_repeats(one)


def test_no_part_of_a_pattern_repeats_without_end(monkeypatch):
    """A repetition without end is begun anew at each letter that it reads: blank lines, digits, a word."""
    seen: set[str] = set()
    search = re.search

    def spied(pattern, *rest, **named):
        seen.add(pattern)
        return search(pattern, *rest, **named)

    monkeypatch.setattr(traceback.re, "search", spied)
    for text in (NEW, OLD, "Killed", "", "vllm", "NCCL"):
        read_traceback(text)
    tables = (traceback.MOMENTS, traceback._VLLM, traceback._ENGINES)
    patterns = seen | {words for table in tables for words, _ in table}
    patterns |= set(traceback._HOST_MOMENTS.values()) | {traceback.HOST, traceback._FRAME}
    patterns |= {one.pattern for one in vars(traceback).values() if isinstance(one, re.Pattern)}
    assert len(patterns) > 30
    assert [one for one in patterns if max(most_repeats(_parser.parse(one)), default=0) > 2000] == []
    assert max(most_repeats(_parser.parse("a(b|c*)d"))) > 2000
