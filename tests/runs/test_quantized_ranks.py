"""QLoRA of a mixture in shards of FSDP2: trained by two processes, killed, resumed, and merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shared_out import assert_same_curve, final, stop_after
from tiny_mixtures import save_mixture

from memtrain.memory.plan.plan import read_plan
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.tools.merge import merge_run

ADAPTER = (
    "model.adapter={r: 4, target_modules: [q_proj, o_proj], target_parameters: [gate_up_proj, down_proj]}"
)


@pytest.fixture
def asked(tmp_path: Path) -> tuple[str, ...]:
    tokenizer = load_tokenizer("builtin:tiny")
    save_mixture(
        tmp_path / "base",
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(tmp_path / "base")
    path = f"model.path={tmp_path / 'base'}"
    return ("model.config=null", "model.tokenizer=null", path, ADAPTER, "save.every_steps=2", "save.keep=4")


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_two_ranks_train_as_one_and_go_on_to_the_last_bit(
    runs, curve_of, monkeypatch, asked: tuple[str, ...], bits: str
) -> None:
    said = (*asked, f"model.quantize={bits}")
    one = runs.done("one", *said)
    said += ("cluster.engine=fsdp2",)
    ranks = runs.fork_ranks("two", 2, *said)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    two = runs.folder / "two"
    plan = read_plan(two / "plan.json")
    assert plan.settings.loads_shards
    assert_same_curve(curve_of(two), curve_of(one), rel=1e-4)
    stop_after(runs, "run", 2, 4, monkeypatch, *said)
    ranks = runs.fork_ranks("run", 2, *said)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    assert curve_of(runs.folder / "run") == curve_of(two)
    ends = [final(folder) for folder in (two, runs.folder / "run")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    merged = [merge_run(folder, dtype="float32") for folder in (one, two)]
    weights = [load_file(next(done.folder.glob("*.safetensors"))) for done in merged]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=2e-4)
