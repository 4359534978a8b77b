"""A run goes on from a trained adapter: its numbers, its shape, and the reference that it began as."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import MODEL, dies_at, run_in, steps
from transformers import AutoModelForCausalLM

from memtrain.errors import LaunchError
from memtrain.trainers.tools.chat import load_trained
from memtrain.trainers.tools.export import export_run
from memtrain.trainers.tools.merge import merge_run
from memtrain.trainers.tools.trained_model import trained_model

ROWS = MODEL + (
    "data: {{train: {{source: {rows}, limit: 24}}, eval_fraction: 0.2, cache_dir: {cache}}}\n"
    "length: {{max_length: 192}}\n"
    "train: {{batch_size: 4, max_steps: 3}}\n"
    "save: {{every_steps: 1}}\nlog: {{every_steps: 1}}\n"
    "memory: {{measure_peaks: false}}\neval: {{at_start: true, every_steps: 3}}\n"
)


def _held_out(reported: list[dict]) -> list[float]:
    return [line["loss"] for line in reported if line["kind"] == "eval"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """(the folder of runs, the metrics of one in it, `one`, that trained an adapter)."""
    folder = tmp_path_factory.mktemp("continued")
    recipe = ROWS.format(method="sft", rows="builtin:arithmetic", cache=folder / "cache")
    shape = ("model.adapter.r=4", "model.adapter.alpha=12", "model.adapter.rslora=true")
    targets = ("model.adapter.target_modules=[q_proj,down_proj]", "model.adapter.modules_to_save=[lm_head]")
    return folder, run_in(folder, "sft", recipe, (*shape, *targets), "one")


def _going_on(folder: Path, method: str, rows: str, name: str, *words: str) -> list[dict]:
    recipe = ROWS.format(method=method, rows=rows, cache=folder / "cache")
    return run_in(folder, method, recipe, (f"model.adapter.path={folder / 'one'}", *words), name)


def test_the_numbers_and_the_shape_are_the_adapters_own(first: tuple[Path, list[dict]]):
    folder, before = first
    after = _going_on(folder, "sft", "builtin:arithmetic", "two", "train.max_steps=1", "optim.lr=1e-12")
    assert _held_out(after)[0] == _held_out(before)[-1]
    config = json.loads((folder / "two/final/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 12, True)
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    one, two = (load_file(folder / name / "final/adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=1e-10) for name in one)


def test_the_reference_is_the_adapters_start_or_the_model_without_it(first: tuple[Path, list[dict]]):
    folder, _ = first
    rows = "builtin:arithmetic"
    made = {
        kind: steps(_going_on(folder, "dpo", rows, kind, f"dpo.reference={kind}"))
        for kind in ("adapter_start", "copy", "precomputed", "adapter_off")
    }
    assert made["adapter_start"][0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(made["adapter_off"][0]["loss"] - math.log(2)) > 1e-5
    for kind in ("copy", "precomputed"):
        for swapped, kept in zip(made["adapter_start"], made[kind], strict=True):
            assert swapped["loss"] == pytest.approx(kept["loss"], abs=2e-6)
            assert swapped["grad_norm"] == pytest.approx(kept["grad_norm"], rel=1e-4)
    chosen = json.loads((folder / "precomputed/plan.json").read_text())
    assert chosen["settings"]["reference"] == "precomputed"
    with dies_at(2):
        _going_on(folder, "dpo", rows, "killed")
    resumed = steps(_going_on(folder, "dpo", rows, "killed"))
    assert json.loads((folder / "killed/plan.json").read_text())["settings"]["reference"] == "adapter_start"
    of_both = [
        [(one["loss"], one["grad_norm"]) for one in lines] for lines in (resumed, made["adapter_start"])
    ]
    assert of_both[0] == of_both[1]


def test_an_adapter_of_another_model_is_refused_with_its_tensor(first: tuple[Path, list[dict]]):
    folder, _ = first
    for name, words, said in (
        ("wide", "model.config.hidden_size=64", "is 64 wide, and its .* is of 32 x 4"),
        ("short", "model.config.num_hidden_layers=1", r"no place for its .*layers\.1\."),
    ):
        with pytest.raises(LaunchError, match=said) as caught:
            _going_on(folder, "sft", "builtin:arithmetic", name, words)
        assert "model.adapter.path" in caught.value.faults[0].where
        assert not (folder / name / "metrics.jsonl").exists()
    with pytest.raises(LaunchError, match="does not fit the model: it has no .*layers.2.* such tensors"):
        _going_on(folder, "sft", "builtin:arithmetic", "deep", "model.config.num_hidden_layers=3")


def test_an_adapter_on_a_folder_is_used_from_anywhere(
    first: tuple[Path, list[dict]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, _ = first
    monkeypatch.chdir(folder)
    recipe = ROWS.format(method="sft", rows="builtin:arithmetic", cache=folder / "cache")
    run_in(folder, "sft", recipe, ("train.max_steps=1",), "whole")
    named = recipe.replace(
        recipe[recipe.index("  config:") : recipe.index("  tokenizer:")], "  path: whole/final\n"
    )
    run_in(folder, "sft", named, ("train.max_steps=1", "model.adapter={r: 2}"), "relative")
    config = json.loads((folder / "relative/final/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "whole/final")
    monkeypatch.chdir(tmp_path)
    merged = merge_run(folder / "relative/final", tmp_path / "merged")
    assert merged.compared.mean < 1e-5
    assert export_run(folder / "relative", tmp_path / "exported").is_adapter
    alone = tmp_path / "alone"
    shutil.copytree(folder / "relative/final", alone)
    model = load_trained(trained_model(alone), 0)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(ids).logits
        assert torch.allclose(model(ids).logits, whole, atol=1e-5)
    with pytest.raises(LaunchError, match="is an adapter without the run that trained it"):
        merge_run(alone)
