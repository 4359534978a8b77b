"""Shapes of the table against the numbers of parameters that their owners publish."""

import json
import re

import pytest

from memtrain.cli.plan.model_shape import shape_for
from memtrain.memory.model_shape.known_models import (
    TABLE,
    known_config,
    known_model,
    known_models,
    not_trained,
)
from memtrain.memory.model_shape.shape import has_formula, shape_of
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
    "unsloth/gemma-3-270m": 268_098_176,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
    "NousResearch/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "huggyllama/llama-30b": 32_528_943_616,
    "huggyllama/llama-65b": 65_285_660_672,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "upstage/SOLAR-10.7B-v1.0": 10_731_524_096,
    "01-ai/Yi-6B": 6_061_035_520,
    "01-ai/Yi-34B": 34_388_917_248,
    "deepseek-ai/deepseek-llm-7b-chat": 6_910_365_696,
    "deepseek-ai/deepseek-coder-6.7b-instruct": 6_740_512_768,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "unsloth/mistral-7b-instruct-v0.2-bnb-4bit": 7_241_732_096,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen1.5-0.5B-Chat": 463_987_712,
    "Qwen/Qwen1.5-1.8B": 1_836_828_672,
    "Qwen/Qwen1.5-7B-Chat": 7_721_324_544,
    "Qwen/Qwen1.5-14B": 14_167_290_880,
    "Qwen/Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2-72B": 72_706_203_648,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "google/gemma-2b-it": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b-it": 27_227_128_320,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080,
    "microsoft/phi-4": 14_659_507_200,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_known_shape_has_the_published_number_of_parameters(model: str):
    config = known_config(model)
    assert config is not None
    assert shape_of(config).num_parameters == PUBLISHED[model]


MIXTURES = {
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": 14_315_784_192,
}
"""Mixtures whose modules are counted; of DeepSeek-V3 without the layer that predicts two tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("model", MIXTURES)
def test_a_counted_mixture_has_the_published_number_of_parameters(model: str):
    config = known_config(model)
    assert config is not None
    shape = shape_for(config)
    assert shape.num_parameters == pytest.approx(MIXTURES[model], rel=1e-6)
    assert 0.85 < shape.num_expert_weights / shape.num_parameters < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("moonshotai/Moonlight-16B-A3B-Instruct", 16.0),
        ("Qwen/Qwen2-57B-A14B", 57.4),
        ("zai-org/GLM-4.5-Air", 106.9),
        ("zai-org/GLM-4.6", 352.8),
        ("moonshotai/Kimi-K2-Instruct", 1026.4),
    ],
)
def test_a_counted_mixture_is_as_large_as_it_is_called(model: str, billions: float):
    """GLM's names count the layer that predicts two tokens too."""
    config = known_config(model)
    assert config is not None
    assert shape_for(config).num_parameters / 1e9 == pytest.approx(billions, abs=0.05)


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


NOT_AS_CALLED = {
    "falcon3-1b": 1.669,
    "llama-4-scout-17b-16e": 107.77,
    "llama-4-maverick-17b-128e": 400.71,
    "gemma-4-e2b": 4.797,
    "gemma-4-e4b": 7.632,
    "gemma-3n-e2b": 4.435,
    "gemma-3n-e4b": 6.835,
}
"""Billions of weights of models whose names count those of one pass, or none."""


@pytest.mark.parametrize("counts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_model_is_as_large_as_it_is_called(counts: bool):
    """Against a number typed wrongly (of models of pictures the text part counts); the slow half builds
    families without a formula."""
    seen = 0
    for name in known_models():
        called = re.findall(r"(?:^|-)([\d.]+)([bm])(?=-|$)", name)
        config = known_config(name) or {}
        if has_formula(config) == counts or (not called and name not in NOT_AS_CALLED):
            continue
        billions = shape_for(config).num_parameters / 1e9
        size = max((float(size) / (1 if unit == "b" else 1000) for size, unit in called), default=0)
        if name in NOT_AS_CALLED:
            assert billions == pytest.approx(NOT_AS_CALLED[name], rel=1e-3), name
        else:
            assert 0.75 < billions / size < 1.35, (name, billions)
        seen += 1
    assert seen > 60


def test_every_entry_has_a_source_and_no_name_stands_twice():
    entries = json.loads(TABLE.read_text())["models"]
    assert all(one["source"] and ("like" in one or one["config"]["model_type"]) for one in entries)
    names = [name for one in entries for name in one["names"]]
    assert len(names) == len(set(names)) == len(known_models())
    assert all(name == name.lower() and "/" not in name for name in names)


def test_an_unknown_model_has_no_shape():
    assert known_config("someone/other-7b") is None
    assert "llama-3.1-8b" in known_models()


@pytest.mark.parametrize(
    ("path", "name", "is_by_name"),
    [
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b", False),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b", False),
        ("axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16", "llama-4-scout-17b-16e", False),
        ("unsloth/Mistral-Nemo-Base-2407-bnb-4bit", "mistral-nemo-2407", False),
        ("unsloth/DeepSeek-R1-0528-Qwen3-8B", "qwen3-8b", True),
        ("allenai/Llama-3.1-Tulu-3-8B-SFT", "llama-3.1-8b", True),
        ("allenai/tulu-2-dpo-70b", "llama-2-70b", True),
        ("cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr", "pythia-1b-deduped", True),
        ("me/wordle-grpo-Qwen3-1.7B", "qwen3-1.7b", True),
        ("allenai/truthfulqa-info-judge-llama2-7B", "llama-2-7b", True),
        ("/data/qwen/Qwen1.5-14B-Chat-v3.0", "qwen1.5-14b", True),
        ("/m/Meta-Llama-3.1-8B_ft", "llama-3.1-8b", True),
        ("./Qwen/Qwen2.5-7B/", "qwen2.5-7b", False),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b", False),
    ],
)
def test_a_name_that_says_a_model_and_its_size_is_that_one(path: str, name: str, is_by_name: bool):
    found = known_model(path)
    assert found is not None
    assert (found.name, found.is_by_name) == (name, is_by_name)


@pytest.mark.parametrize(
    "path",
    [
        "tiiuae/Falcon-H1-7B-Base",  # no Falcon-7B
        "google/gemma-4-7b",  # no Gemma 7B, of another generation
        "microsoft/phi-4-small",
        "me/Qwen3-Embedding-8B",
        "me/Qwen3-VL-7B",
        "me/llava-v1.6-mistral-7b",
        "me/Qwen3-8B-and-Llama-3.1-70B",
        "me/Qwen3-9B",
        "/m/gemma-2-27bx",
        "/public/model",
        "hamishivi/qwen2_5_openthoughts2",
    ],
)
def test_a_name_that_may_be_another_model_is_not_guessed(path: str):
    assert known_model(path) is None


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("PaddlePaddle/PaddleOCR-VL", "reads more than text"),
        ("unsloth/whisper-large-v3", "writes sound"),
        ("unsloth/all-MiniLM-L6-v2", "an encoder"),
        ("unsloth/diffusiongemma-26B-A4B-it", "denoises"),
        ("me/novel-7b", None),
    ],
)
def test_a_family_that_is_not_trained_is_said_by_its_name(path: str, why: str | None):
    assert (why is None) == (not_trained(path) is None)
    assert (why or "") in (not_trained(path) or "")
