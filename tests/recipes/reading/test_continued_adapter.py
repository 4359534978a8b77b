"""`model.adapter.path`: the shape is the adapter's own, and what differs from it is said at its line."""

import json
from pathlib import Path

import pytest

from memtrain.errors import RecipeError
from memtrain.recipes.reading.load import load_recipe

OWN: dict[str, object] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "Qwen/Qwen3-8B",
    "r": 8,
    "lora_alpha": 24,
    "lora_dropout": 0.05,
    "target_modules": ["v_proj", "q_proj"],
    "rank_pattern": {},
    "bias": "none",
    "use_rslora": True,
}


def _load(folder: Path, own: dict[str, object] | str, *words: str, model: str = "path: Qwen/Qwen3-8B, "):
    place = folder / "run/final"
    place.mkdir(parents=True, exist_ok=True)
    text = own if isinstance(own, str) else json.dumps(own)
    (place / "adapter_config.json").write_text(text)
    path = folder / "r.yaml"
    adapter = "".join(f", {word}" for word in words)
    path.write_text(
        f"method: sft\ndata: {{train: d.jsonl}}\nmodel: {{{model}adapter: {{path: {folder}/run{adapter}}}}}\n"
    )
    return load_recipe(str(path)).recipe.model


def test_the_shape_is_read_from_the_adapter(tmp_path: Path):
    model = _load(tmp_path, OWN)
    assert model.adapter is not None
    assert model.adapter.path == str(tmp_path / "run/final")
    assert (model.adapter.r, model.adapter.alpha, model.adapter.dropout) == (8, 24.0, 0.05)
    assert (model.adapter.target_modules, model.adapter.rslora) == (("q_proj", "v_proj"), True)
    again = _load(tmp_path, OWN, "r: 8", "alpha: 24", "target_modules: [v_proj, q_proj]", "dropout: 0.0")
    assert again.adapter is not None
    assert (again.adapter.r, again.adapter.dropout) == (8, 0.0)


def test_the_base_is_the_adapters_where_none_is_named(tmp_path: Path):
    assert _load(tmp_path, OWN, model="").path == "Qwen/Qwen3-8B"
    copied = OWN | {"base_model_name_or_path": "/models/qwen3-8b/"}
    assert _load(tmp_path, copied).path == "Qwen/Qwen3-8B"
    other = OWN | {"base_model_name_or_path": "unsloth/Qwen3-8B-bnb-4bit"}
    assert _load(tmp_path, other, "base: unsloth/Qwen3-8B-bnb-4bit").path == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({}, ["r: 16"], "model.adapter.r is 16, and the adapter in .* has 8"),
        ({}, ["kind: dora"], "model.adapter.kind is dora"),
        ({}, ["target_modules: all-linear"], "model.adapter.target_modules is all-linear"),
        ({"peft_type": "LOHA"}, [], "it is of the kind LOHA"),
        ({"rank_pattern": {"q_proj": 4}}, [], "it has rank_pattern"),
        ({"layers_to_transform": [1]}, [], "it has layers_to_transform"),
        ({"never_heard_of": True}, [], "it has never_heard_of"),
        ({"init_lora_weights": "pissa_niter_4"}, [], "changing the model's own weights"),
        ({"target_modules": ".*proj"}, [], "named by a pattern"),
        ({"bias": "all"}, [], "it trains biases"),
        ({"r": "eight"}, [], "config has r"),
        ({"lora_alpha": 0}, [], "not positive"),
        ({"base_model_name_or_path": "Qwen/Qwen3-8B-Base"}, [], "was trained on Qwen/Qwen3-8B-Base"),
    ],
)
def test_what_is_not_at_one_with_the_adapter_is_said_at_its_line(
    tmp_path: Path, changes: dict[str, object], words: list[str], said: str
):
    with pytest.raises(RecipeError, match=said) as caught:
        _load(tmp_path, OWN | changes, *words)
    assert "r.yaml:3:" in caught.value.faults[0].where
    assert caught.value.faults[0].fix


@pytest.mark.parametrize("text", ["{", "[]", "", '{"r": NaN}', "[" * 5000])
def test_a_damaged_file_is_a_fault(tmp_path: Path, text: str):
    with pytest.raises(RecipeError, match=r"model\.adapter\.path"):
        _load(tmp_path, text)


def test_what_is_no_adapter_says_where_it_belongs(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text(
        f"method: sft\ndata: {{train: d.jsonl}}\nmodel: {{path: m, adapter: {{path: {tmp_path}/there}}}}\n"
    )
    with pytest.raises(RecipeError, match="there is no adapter_config.json"):
        load_recipe(str(path))
    (tmp_path / "there/final").mkdir(parents=True)
    (tmp_path / "there/final/config.json").write_text("{}")
    with pytest.raises(RecipeError, match="is a whole model, not an adapter"):
        load_recipe(str(path))
    with pytest.raises(RecipeError, match="base has no effect without path"):
        load_recipe(str(path), ["model.adapter.path=null", "model.adapter.base=x"])
