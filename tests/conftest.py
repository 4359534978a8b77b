"""What every test may use: one thread, and tiny random models of the shapes the project promises."""

import gc
import os
import sys
from collections.abc import Callable

import pytest

import memtrain  # noqa: F401  Before torch: it says how torch's threads wait, which is read once.

# isort: split
import torch

torch.set_num_threads(1)
# What this machine has learned of itself is nobody's expected value.
os.environ["MEMTRAIN_CALIBRATION"] = "off"

TinyModel = Callable[..., torch.nn.Module]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sums are in one order in every test, however many threads a run in this process asked for before."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own linear map is back after every test: DeepSpeed's stage 3 leaves one in its place that keeps
    the inputs of frozen maps, by which later traces in the process are up to 9 % higher.

    Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py, `zero3_linear_wrap`.
    """
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)


@pytest.fixture(autouse=True)
def own_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's run leaves the next one no state of this process to put back after a reward's call."""
    if kept := sys.modules.get("memtrain.trainers.online.rewards.surroundings"):
        monkeypatch.setattr(kept, "_kept", None)
        monkeypatch.setattr(kept, "_notes", [])
        monkeypatch.setattr(kept, "_told", set())


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Objects of imports and of tests before are left out of collections: recovery collects at every failure.

    A collection takes a second in a process that has run half of the suite.
    """
    gc.collect()
    gc.freeze()


def _tiny(config_class: type, model_class: type, attention: str, seed: int, config: dict[str, object]):
    shape: dict[str, object] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attn_implementation": attention,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config_class(**(shape | config)))


@pytest.fixture
def tiny_llama() -> TinyModel:
    """Factory of Llama-shaped models, fp32: `tiny_llama(attention="sdpa", seed=0, **config)`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(attention: str = "sdpa", seed: int = 0, **config: object) -> torch.nn.Module:
        return _tiny(LlamaConfig, LlamaForCausalLM, attention, seed, config)

    return make


@pytest.fixture
def tiny_qwen3() -> TinyModel:
    """Factory of Qwen3-shaped models (norms on queries and keys), fp32, as `tiny_llama`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(attention: str = "sdpa", seed: int = 0, **config: object) -> torch.nn.Module:
        return _tiny(Qwen3Config, Qwen3ForCausalLM, attention, seed, config)

    return make


@pytest.fixture(params=["llama", "qwen3"])
def tiny_model(request: pytest.FixtureRequest, tiny_llama: TinyModel, tiny_qwen3: TinyModel) -> TinyModel:
    """Each of the two factories in turn."""
    return {"llama": tiny_llama, "qwen3": tiny_qwen3}[request.param]


@pytest.fixture
def make_settings() -> Callable[..., object]:
    """Factory of Settings: one CPU process, fp32, padding-free, checkpointed; keywords change them."""
    from memtrain.memory.plan.settings import Settings

    plain: dict[str, object] = {
        "device": "cpu",
        "num_processes": 1,
        "threads": 1,
        "dtype": "float32",
        "attention": "torch_cpu",
        "liger": False,
        "adapter": None,
        "quantize": "none",
        "max_length": 64,
        "truncation": "keep_start",
        "packing": "none",
        "cross_document_attention": False,
        "padding_free": True,
        "pad_to_multiple_of": None,
        "group_by_length": False,
        "batch_size": 4,
        "batch_tokens": None,
        "micro_batch_size": 4,
        "micro_tokens": None,
        "max_steps": 2,
        "checkpoint_every": 1,
        "offload": "none",
        "loss": "chunked",
        "loss_tile_bytes": 2**20,
        "optimizer": "adamw",
        "master_weights": False,
        "expandable_segments": True,
    }

    def make(**changes: object) -> Settings:
        return Settings.model_validate(plain | changes)

    return make
