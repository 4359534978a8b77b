"""Losses of whole runs equal those that TRL's SFTTrainer made of the same weights, rows and settings.

Recorded by `benchmarks/sft_vs_trl.py --record`; TRL is not needed here.
"""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((Path(__file__).parent / "data" / "trl_sft_losses.json").read_text())


@pytest.fixture(scope="module")
def made(warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights and the rows of the recording, made again."""
    spec = importlib.util.spec_from_file_location("sft_vs_trl", ROOT / "benchmarks" / "sft_vs_trl.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    folder = tmp_path_factory.mktemp("made")
    benchmark.save_model(folder / "model", RECORDED["shape"], is_wave=True)
    benchmark.write_rows(benchmark.counting_rows(40), folder / "rows.jsonl", 40)
    return folder


@pytest.mark.parametrize("mode", ["padded", "padding-free", "bfd"])
def test_losses_are_those_of_trl(runs, metrics, made: Path, mode: str):
    """Packed sequences lie in another order here, so that a step of that case takes all of them."""
    case = RECORDED["cases"][mode]
    folder = runs.done(
        "run",
        "model.config=null",
        "model.tokenizer=null",
        f"model.path={made / 'model'}",
        f"data.train={made / 'rows.jsonl'}",
        "data.eval_fraction=0",
        f"length.max_length={case['max_length']}",
        f"length.padding_free={str(mode != 'padded').lower()}",
        f"length.packing={'bfd' if mode == 'bfd' else 'none'}",
        f"optim.lr={case['lr']}",
        "optim.warmup_steps=0",
        f"train.batch_size={case['batch_size']}",
        f"train.micro_batch_size={case['micro_batch_size']}",
        f"train.max_steps={case['steps']}",
        "train.shuffle=false",
    )
    assert metrics(folder, "data")[0]["sequences"] == case["sequences"]
    steps = metrics(folder, "step")
    assert [step["loss"] for step in steps] == pytest.approx(case["losses"], abs=1e-4)
    assert [step["grad_norm"] for step in steps] == pytest.approx(case["grad_norms"], rel=1e-4)
