"""Loss scaling: the same numbers, nothing moved by an overflow, and a run that goes on as it was."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from memtrain.errors import Diverged
from memtrain.trainers.optim import loss_scaling
from memtrain.trainers.optim.loss_scaling import LossScaling
from memtrain.trainers.optim.master_weights import MasterWeights
from memtrain.trainers.optim.step import DistributedStep, update
from memtrain.trainers.protocols.position import TrainState


class Half(nn.Module):
    """A float16 weight that a float32 loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float16))

    def loss(self, factor: float) -> torch.Tensor:
        return (self.weight.float() * factor).sum()


def stepped(model: Half, state: TrainState, factor: float) -> float:
    """One step of gradient descent by 1; the norm that is reported."""
    optimizer = MasterWeights(
        [{"params": [model.weight], "weight_decay": 0.0}], lambda groups: torch.optim.SGD(groups, lr=1.0), 1.0
    )
    engine = LossScaling(DistributedStep(), state).engine()
    engine.begin(model, 1)
    engine.backward(model.loss(factor))
    return float(update(optimizer, [model.weight], lr=1.0, max_grad_norm=None, engine=engine))


def test_a_gradient_that_float16_would_lose_moves_the_weight():
    """2^-26 is a quarter of the smallest number of float16: by itself it is 0."""
    norm = stepped(Half(), TrainState(), 2.0**-26)
    assert norm == pytest.approx(2.0**-26 * 2**0.5)


def test_the_scale_changes_no_bit_of_what_is_trained_on():
    models = [Half(), Half()]
    norms = [
        stepped(model, TrainState(loss_scale=scale), 0.375)
        for model, scale in zip(models, (1.0, 2.0**12), strict=True)
    ]
    assert norms[0] == norms[1]
    assert torch.equal(models[0].weight, models[1].weight)
    assert models[0].weight.tolist() == [0.625, 1.625]


def test_an_overflow_moves_nothing_and_halves_the_scale():
    model, state = Half(), TrainState(loss_scale=2.0**15, scaled_steps=7)
    assert stepped(model, state, 100.0) == 0.0, "100 x 2^15 is above 65,504."
    assert model.weight.tolist() == [1.0, 2.0]
    assert (state.loss_scale, state.scaled_steps, state.skipped_steps) == (2.0**14, 0, 1)


def test_the_scale_grows_after_many_good_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss_scaling, "GROWTH_STEPS", 3)
    model, state = Half(), TrainState(loss_scale=8.0)
    for _ in range(4):
        stepped(model, state, 0.1)
    assert (state.loss_scale, state.scaled_steps) == (16.0, 1)


def test_what_overflows_at_every_scale_ends_the_run():
    with pytest.raises(Diverged, match="whatever the loss is scaled by"):
        stepped(Half(), TrainState(loss_scale=1.0), 1e30)


def test_a_rehearsed_step_leaves_the_scale_where_it_was():
    state = TrainState(loss_scale=4.0, scaled_steps=5)
    engine = LossScaling(DistributedStep(), state).engine()
    with engine.dry_step(True):
        state.loss_scale, state.skipped_steps = 1.0, 3
    assert state == TrainState(loss_scale=4.0, scaled_steps=5)


TINY = (
    "{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,"
    " num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8, tie_word_embeddings: true}"
)
RECIPE = """
method: sft
model: {{config: {model}, tokenizer: builtin:tiny, dtype: float16}}
data: {{train: {{source: builtin:arithmetic, limit: 20}}}}
length: {{max_length: 96}}
optim: {{lr: 1e-2}}
train: {{batch_size: 4, max_steps: 4}}
log: {{every_steps: 1}}
save: {{every_steps: 2}}
cluster: {{device: cpu, processes: 1, threads: 1}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [(), ("model.adapter={r: 4}",)])
def test_a_run_in_float16_learns_and_goes_on_bit_for_bit(adapter: tuple[str, ...], tmp_path: Path):
    from memtrain.__main__ import main

    recipe = tmp_path / "half.yaml"
    recipe.write_text(RECIPE.format(model=TINY))

    def run(name: str, *more: str) -> list[dict]:
        words = [f"data.cache_dir={tmp_path}/cache", *adapter, *more]
        assert main(["sft", str(recipe), "--run-dir", str(tmp_path / name), *words]) == 0
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    whole = run("whole")
    run("parts", "train.max_steps=2")
    parts = run("parts", "save.allow_changed_keys=[train.max_steps]")
    losses = [[line["loss"] for line in reported if line["kind"] == "step"] for reported in (whole, parts)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
