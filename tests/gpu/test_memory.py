"""Memory of a GPU: counters, the allocator's settings, what happens when it runs out, and the doctor."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memtrain.memory.hardware.devices import detect
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.checkpoints.manifest import device_name
from memtrain.trainers.loop.worker import work
from memtrain.trainers.memory_meter.phase_watch import MemoryWatch, StepWeight
from memtrain.trainers.memory_meter.workspaces import workspace_bytes
from memtrain.trainers.runtime.allocator import expandable_in_force, fixed_segments, use_expandable_segments
from memtrain.trainers.runtime.oom_errors import attempt, free, is_out_of_memory
from memtrain.trainers.tools.bench import bench
from memtrain.trainers.tools.doctor import examine
from memtrain.trainers.tools.peak_of_call import measure

pytestmark = pytest.mark.gpu
MIB = 2**20
WIDE = (
    "{model_type: qwen3, hidden_size: 1024, intermediate_size: 2048, num_hidden_layers: 6,"
    " num_attention_heads: 8, num_key_value_heads: 4, head_dim: 128, tie_word_embeddings: true}"
)
"""Activations of some GiB: a segment of the allocator is little beside them."""


def test_expandable_segments_are_in_force_when_they_are_asked_for(cuda: torch.device):
    with fixed_segments():
        beside = [torch.empty(64 * MIB, dtype=torch.uint8, device=cuda) for _ in range(2)]
    beside.pop()
    use_expandable_segments(True)
    assert expandable_in_force(), "Though fixed ones are cached."


def test_the_peak_of_a_phase_is_the_allocators(cuda: torch.device):
    noted: list[tuple[str, int, int, int, int]] = []
    watch = MemoryWatch(cuda, 0, lambda *reported: noted.append(reported))
    before = torch.cuda.memory_allocated() - workspace_bytes(cuda)
    with watch.phase("steady step", StepWeight(10, lambda: 0, lambda: 7)):
        held = torch.empty(64 * MIB, dtype=torch.uint8, device=cuda)
        del held
    ((phase, allocated, reserved, _, tokens),) = noted
    assert tokens == 7
    assert phase == "steady step"
    assert allocated == before + 64 * MIB
    assert reserved >= allocated


def test_workspaces_of_products_are_no_tensors(cuda: torch.device):
    """They stay as large as they were counted, whatever is multiplied, forward and backward."""
    torch.cuda.synchronize()
    workspace_bytes.cache_clear()
    counted = workspace_bytes(cuda)
    assert counted >= 2 * 8 * MIB
    before = torch.cuda.memory_allocated()
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.randn(512, 2048, device=cuda).to(dtype).requires_grad_()
        torch.nn.functional.linear(left, left, left[:, 0]).sum().backward()
        del left
    assert torch.cuda.memory_allocated() == before


def test_memory_that_runs_out_is_reported_and_given_back(cuda: torch.device):
    free()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 256 * MIB) / total)
    before = torch.cuda.memory_allocated()

    def fill() -> list[torch.Tensor]:
        return [torch.empty(100 * MIB, dtype=torch.uint8, device=cuda) for _ in range(8)]

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fill()
    assert is_out_of_memory(caught.value)
    del caught
    assert attempt(fill) == (None, False)
    free()
    assert torch.cuda.memory_allocated() == before


def test_a_run_goes_on_with_smaller_micro_batches_when_memory_runs_out(
    plan_of: Callable[..., Plan], tmp_path: Path, cuda: torch.device
):
    """With memory for half of the rows: the same losses as with enough, to the rounding of other sums."""
    words = (
        f"model.config={WIDE}",
        "data.train.limit=256",
        "train.batch_size=64",
        "memory.activation_checkpointing=off",
        "memory.activation_offloading=off",
        "memory.streamed_layers=off",
        "memory.loss=full",
        "length.padding_free=false",
        "train.micro_batch_size=64",
        "memory.oom_recovery=on",
        "memory.preflight=off",
    )
    plan = plan_of("sft", *words, dtype="float32")
    needs = [measure(_with_rows(plan, rows), steps=2).peak_bytes for rows in (64, 32)]
    free()
    enough = _losses(plan.model_copy(update={"run_dir": str(tmp_path / "enough")}))
    free()
    room = (needs[0] + needs[1]) // 2
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.mem_get_info()[1])
    use_expandable_segments(True)
    little = _losses(plan.model_copy(update={"run_dir": str(tmp_path / "little")}))
    assert little == pytest.approx(enough, rel=1e-3)


def _with_rows(plan: Plan, rows: int) -> Plan:
    settings = plan.settings.model_copy(update={"micro_batch_size": rows})
    return plan.model_copy(update={"settings": settings})


def _losses(plan: Plan) -> list[float]:
    folder = Path(plan.run_dir)
    folder.mkdir()
    plan.write(folder)
    work(plan, resume=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_a_bench_reports_what_the_allocator_held(plan_of: Callable[..., Plan], device: torch.device):
    made = bench(plan_of("sft"), 2)
    assert made.peak_bytes > 0
    assert len(made.losses) == 4
    assert made.reserved_bytes >= made.peak_bytes or device.type == "cpu"


def test_the_doctor_finds_nothing_broken():
    assert not [(one.area, one.name, one.words) for one in examine().broken]


def test_the_card_is_named_and_its_memory_is_known(cuda: torch.device):
    found = detect("cuda")
    assert found.device == "cuda"
    assert device_name("cuda") == torch.cuda.get_device_name()
    assert abs(found.memory_bytes - torch.cuda.mem_get_info()[1]) < 0.02 * found.memory_bytes


def test_a_calibration_measures_every_rate(tmp_path: Path, cuda: torch.device):
    """In a process of its own, as a context is measured. Beside tests that come and go it is refused."""
    words = [sys.executable, "-m", "memtrain", "calibrate", "--json"]
    environment = os.environ | {"MEMTRAIN_CALIBRATION": str(tmp_path)}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        assert "the card is shared" in ended.stderr
        return
    found = json.loads(ended.stdout)
    rates = ("half_matmul_per_s", "single_matmul_per_s", "bytes_per_s", "host_bytes_per_s")
    assert min(found[name] for name in rates) > 0
    assert 0 < found["beside_bytes"] < 4 * 2**30
    assert set(found["scratch"]) >= {"attention", "attention backward", "cross entropy"}
