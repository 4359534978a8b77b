"""Captures on a GPU: what a graph draws is what its pass draws, and what a launch takes the host."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from memtrain.memory.hardware.calibration import VARIABLE, launches_of
from memtrain.trainers.model.offload.checkpointing import recompute
from memtrain.trainers.runtime.cuda_graphs import CudaGraphs
from memtrain.trainers.runtime.launch_time import measure_launches

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_computed_again", [False, True])
def test_a_replay_drops_what_the_pass_drops(cuda: torch.device, is_computed_again: bool):
    """Forward and backward of layers with dropout, from the generator's state then, which goes on behind."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)).to(cuda)
        x, loss = torch.randn(32, 64, device=cuda), torch.zeros((), device=cuda)

        def layer(one: nn.Module, y: Tensor) -> Tensor:
            return dropout(one(dropout(y, 0.4)), 0.3)

        def run() -> None:
            y = x
            for one in layers:
                y = recompute(lambda z, one=one: layer(one, z), y) if is_computed_again else layer(one, y)
            total = y.square().sum()
            total.backward()
            loss.copy_(total.detach())

        def found() -> list[Tensor]:
            torch.cuda.synchronize()
            return [loss.clone(), *(one.grad.clone() for one in layers.parameters())]

        run()
        graphs, replay = CudaGraphs(stream), None
        for seed in (1, 2, 3):
            x.copy_(torch.randn(32, 64, device=cuda))
            layers.zero_grad(set_to_none=False)
            torch.cuda.manual_seed(seed)
            if replay is None:
                assert graphs.rehearse(run) == ""
            else:
                run()
            expected, after = found(), torch.cuda.get_rng_state(cuda)
            layers.zero_grad(set_to_none=False)
            torch.cuda.manual_seed(seed)
            replay = replay or graphs.record(run)
            replay()
            for mine, theirs in zip(found(), expected, strict=True):
                assert torch.equal(mine, theirs)
            assert torch.equal(torch.cuda.get_rng_state(cuda), after)


def test_a_run_measures_and_keeps_its_launches(cuda: torch.device, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    found = measure_launches(cuda)
    assert found is not None
    assert 1e-6 < found < 1e-3
    assert launches_of(torch.cuda.get_device_name(cuda)).launch_s == found
