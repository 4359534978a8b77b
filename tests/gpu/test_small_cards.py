"""Paths of cards without bfloat16 (T4, V100), run on any GPU: float16 with a scaled loss, their attention."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memtrain.memory.plan.plan import Plan

pytestmark = pytest.mark.gpu
EFFICIENT = "model.attention=torch_efficient"


@pytest.mark.parametrize("adapter", [(), ("model.adapter={r: 4}",)], ids=["whole", "adapter"])
def test_float16_trains_as_float32_does(
    adapter: tuple[str, ...], plan_of: Callable[..., Plan], steps_of: Callable, cuda: torch.device
):
    half, wide = (
        steps_of(plan_of("sft", EFFICIENT, *adapter, dtype=dtype), 4) for dtype in ("float16", "float32")
    )
    assert half.losses == pytest.approx(wide.losses, rel=2e-2)
    assert all(torch.isfinite(one).all() for one in half.weights.values())


def test_a_run_in_float16_goes_on_with_its_scale(tmp_path: Path, cuda: torch.device):
    """As `tests/trainers/optim/test_loss_scaling.py` has it on a CPU."""
    from memtrain.__main__ import main

    def run(name: str, *more: str) -> list[float]:
        words = ["sft", "smoke/sft", "--run-dir", str(tmp_path / name), f"data.cache_dir={tmp_path}/cache"]
        words += ["model.dtype=float16", EFFICIENT, "cluster.device=cuda", "log.every_steps=1"]
        assert main([*words, "eval.every_steps=null", "save.every_steps=2", *more]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [one["loss"] for one in map(json.loads, lines) if one["kind"] == "step"]

    whole = run("whole", "train.max_steps=4")
    run("parts", "train.max_steps=2")
    parts = run("parts", "train.max_steps=4", "save.allow_changed_keys=[train.max_steps]")
    assert parts[-2:] == pytest.approx(whole[-2:], rel=1e-3)
