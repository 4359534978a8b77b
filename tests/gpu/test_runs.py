"""Whole runs on a GPU through the command line: every method, going on, verification, several GPUs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from memtrain.__main__ import main
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.batches.collate import MicroBatch
from memtrain.trainers.build.components import build
from memtrain.trainers.build.step import BatchesAhead
from memtrain.trainers.online.generation.backend import build_sampler, sampling_of
from memtrain.trainers.online.generation.protocol import Group
from memtrain.trainers.online.vllm.weight_check import furthest

pytestmark = pytest.mark.gpu
METHODS = ("sft", "dpo", "kto", "reward", "grpo", "rloo", "online-dpo", "ppo")
SMOKE = ("train.max_steps=3", "log.every_steps=1", "eval.every_steps=null")


def run(folder: Path, method: str, device: torch.device, *overrides: str) -> list[dict]:
    """The lines of the metrics of a smoke recipe."""
    words = [method, f"smoke/{method}", "--run-dir", str(folder), f"data.cache_dir={folder.parent}/cache"]
    code = main([*words, f"cluster.device={device.type}", *SMOKE, *overrides])
    assert code == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method: str, tmp_path: Path, device: torch.device):
    """With the preflight, which tries the heaviest batch and a save before the first step."""
    reported = run(tmp_path / "run", method, device, "memory.preflight=on")
    losses = [line["loss"] for line in reported if line["kind"] == "step"]
    assert len(losses) == 3
    assert all(torch.isfinite(torch.tensor(losses)))
    if device.type == "cuda":
        assert any(line["reserved"] > 0 for line in reported if line["kind"] == "memory")


def test_the_share_of_a_step_in_which_the_gpu_waited_is_told(tmp_path: Path, device: torch.device):
    """Of one step, once the first ones are over."""
    reported = run(tmp_path / "run", "sft", device, "train.max_steps=6")
    (host,) = (line for line in reported if line["kind"] == "host")
    assert 0 <= host["waited"] < 1
    assert host["seconds"] > 0


def test_micro_batches_wait_in_pinned_memory(plan_of: Callable[..., Plan], cuda: torch.device):
    """Pinned by a thread, and the same numbers on the GPU."""
    feed = build(plan_of("sft")).train
    ahead, sequences = BatchesAhead(is_on=True), np.array([0, 1])
    ahead.begin(feed, sequences)
    made = ahead.take(feed, sequences)
    assert ahead.num_taken == 1
    assert isinstance(made, MicroBatch)
    assert made.input_ids.is_pinned()
    assert torch.equal(made.to(cuda).input_ids.cpu(), feed.micro_batch(sequences).input_ids)


def test_a_run_goes_on_where_it_was(tmp_path: Path, device: torch.device):
    """Attention whose sums have one order, and dropout: the states of the GPU's generator matter."""
    words = ("model.attention=masked", "model.dtype=float32", "save.every_steps=2", "train.max_steps=4")
    words = (*words, "model.adapter={r: 4, dropout: 0.2}")
    whole = run(tmp_path / "whole", "sft", device, *words)
    run(tmp_path / "parts", "sft", device, *words, "train.max_steps=2")
    parts = run(tmp_path / "parts", "sft", device, *words, "save.allow_changed_keys=[train.max_steps]")
    of = [[line["loss"] for line in reported if line["kind"] == "step"] for reported in (whole, parts)]
    assert of[1][-2:] == pytest.approx(of[0][-2:], rel=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_deterministic_run_is_the_same_twice_and_goes_on_to_the_bit(
    method: str, dtype: str, tmp_path: Path, device: torch.device
):
    """With the attention that the plan chooses, whose backward pass adds up in no fixed order by itself."""
    words = ("train.deterministic=true", f"model.dtype={dtype}", "save.every_steps=2", "train.max_steps=4")
    whole, again = tmp_path / "whole", tmp_path / "again"
    losses = [losses_of(run(one, method, device, *words)) for one in (whole, again)]
    assert losses[0] == losses[1]
    expected = weights_of(whole)
    assert weights_of(again) == expected
    # As a run that was killed after its first checkpoint.
    for folder in ("final", "checkpoints/step-000004"):
        shutil.rmtree(again / folder)
    (again / "final.json").unlink()
    assert losses_of(run(again, method, device, *words)) == losses[0]
    assert weights_of(again) == expected


def losses_of(reported: list[dict]) -> list[float]:
    return [line["loss"] for line in reported if line["kind"] == "step"]


def weights_of(folder: Path) -> bytes:
    return (folder / "final/model.safetensors").read_bytes()


def test_a_plan_is_verified_on_this_card(plan_of: Callable[..., Plan], tmp_path: Path, device: torch.device):
    plan_of("sft")
    assert main(["verify", str(tmp_path / "sft.yaml"), "--shrink"]) == 0


def test_the_native_sampler_gives_the_models_own_log_probs(
    plan_of: Callable[..., Plan], device: torch.device
):
    plan = plan_of("grpo", "generate.backend=native", dtype="float32")
    built = build(plan)
    sampler = build_sampler(plan, built, max_rows=4)
    groups = [Group((5, 6, 7, 8), 2, 0), Group((9, 10), 2, 1)]
    samples = sampler.generate(groups, sampling_of(plan, built))
    worst = max(
        furthest(built.model, group, sample)
        for group, of in zip(groups, samples, strict=True)
        for sample in of
    )
    assert worst < 5e-3, "Room for TF32, which is off by default."


def test_a_step_on_the_gpu_is_that_of_the_cpu(plan_of: Callable[..., Plan], cuda: torch.device):
    """Float32 weights made on one device and copied to the other: losses of the first step."""
    from memtrain.trainers.build.bare_steps import Stepper

    words = ("model.attention=masked", "train.micro_batch_size=8")
    plans = [plan_of("sft", *words, f"cluster.device={name}", dtype="float32") for name in ("cuda", "cpu")]
    here, there = (build(plan) for plan in plans)
    copy_weights(here.model, there.model)
    losses = [Stepper(plan, built).step(0).loss for plan, built in zip(plans, (here, there), strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    state = {name: tensor.cpu() for name, tensor in source.state_dict().items()}
    target.load_state_dict(state)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_two_gpus_train_as_one(engine: str, tmp_path: Path, device: torch.device):
    one = run(tmp_path / "one", "sft", device, "cluster.processes=1", "model.dtype=float32")
    two = run(
        tmp_path / "two",
        "sft",
        device,
        "cluster.processes=2",
        f"cluster.engine={engine}",
        "model.dtype=float32",
    )
    losses = [[line["loss"] for line in reported if line["kind"] == "step"] for reported in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
