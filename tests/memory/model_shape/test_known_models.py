"""Shapes of the table against the numbers of parameters that their owners publish."""

import pytest

from memtrain.memory.model_shape.known_models import known_config, known_models
from memtrain.memory.model_shape.shape import shape_of
from memtrain.recipes.reading.load import load_recipe
from memtrain.recipes.reading.shipped import shipped_names

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "google/gemma-3-1b-it": 999_885_952,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_known_shape_has_the_published_number_of_parameters(model: str):
    config = known_config(model)
    assert config is not None
    assert shape_of(config).num_parameters == PUBLISHED[model]


def test_the_text_parts_of_larger_gemmas_are_near_their_names():
    """Published totals count the vision tower too (0.4 billion)."""
    for model, billions in (("google/gemma-3-4b-it", 3.88), ("google/gemma-3-12b-it", 11.77)):
        config = known_config(model)
        assert config is not None
        assert shape_of(config).num_parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_every_shipped_recipe_names_a_known_model():
    for name in shipped_names():
        path = load_recipe(name).recipe.model.path
        assert path is not None
        assert path.startswith("builtin:") or known_config(path) is not None, path


def test_an_unknown_model_has_no_shape():
    assert known_config("someone/other-7b") is None
    assert "llama-3.1-8b" in known_models()
