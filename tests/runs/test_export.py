"""`memtrain export`: a model for Hugging Face from any checkpoint, of any engine and layout."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memtrain.__main__ import main

EVERY = ("save.every_steps=3", "save.keep=4")


@pytest.fixture(scope="module")
def shards(shared_runs) -> Path:
    """A run of two ranks, each of which wrote its own shards."""
    ranks = shared_runs.fork_ranks("shards", 2, "cluster.engine=fsdp2", *EVERY)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].said
    return shared_runs.folder / "shards"


def test_shards_become_the_model_that_the_run_ended_with(shards: Path, tmp_path: Path, capsys):
    out = tmp_path / "model"
    assert main(["export", str(shards), "-o", str(out)]) == 0
    assert "after step 6" in capsys.readouterr().out
    expected, found = load_file(shards / "final" / "model.safetensors"), load_file(out / "model.safetensors")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert {path.name for path in out.iterdir()} == {
        path.name for path in (shards / "final").iterdir() if path.name != "README.md"
    }


def test_an_earlier_step_in_half_precision_and_small_files(shards: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "model"
    words = ["--step", "3", "--dtype", "bfloat16", "--max-shard-size", "30KiB"]
    assert main(["export", str(shards), "-o", str(out), *words]) == 0
    assert len(list(out.glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    halves = [
        load_file(shards / "checkpoints" / "step-000003" / f"weights-{rank:05d}-of-00002.safetensors")
        for rank in range(2)
    ]
    name = "model.layers.1.mlp.up_proj.weight"
    expected = torch.cat([half[f"model.{name}"] for half in halves]).bfloat16()
    torch.testing.assert_close(model.state_dict()[name], expected, rtol=0, atol=0)


def test_an_adapter_of_one_process_stays_an_adapter(runs, capsys):
    folder = runs.done("run", "model.adapter={r: 4}", *EVERY)
    assert main(["export", str(folder)]) == 0
    assert "The adapter after step 6" in capsys.readouterr().out
    files = [load_file(folder / place / "adapter_model.safetensors") for place in ("final", "export")]
    torch.testing.assert_close(files[1], files[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "4"], "the run has no checkpoint of step 4"),
        (["--dtype", "int3"], "unknown precision of weights: int3"),
        (["--max-shard-size", "big"], "'big' is not a size"),
    ],
)
def test_what_cannot_be_exported_is_reported(
    shards: Path, tmp_path: Path, capsys, words: list[str], said: str
):
    assert main(["export", str(shards), "-o", str(tmp_path / "model"), *words]) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_a_damaged_checkpoint_is_reported_and_an_earlier_one_taken(shards: Path, tmp_path: Path, capsys):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(shards, run)
    broken = run / "checkpoints" / "step-000006" / "weights-00001-of-00002.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    assert main(["export", str(run), "--step", "6"]) != 0
    assert "is damaged" in capsys.readouterr().err
    assert main(["export", str(run)]) == 0
    assert "after step 3" in capsys.readouterr().out
