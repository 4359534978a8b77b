"""What the tests on a GPU share; without CUDA they are skipped, or rehearsed on the CPU where asked.

`MEMTRAIN_GPU_STAND_IN=1` runs those that need no CUDA call of their own on the CPU: the tests themselves are
tried so, and nothing of a GPU.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from first_light.stages.engines import in_one_form

from memtrain.cli.plan.make_plan import make_plan
from memtrain.memory.plan.plan import Plan
from memtrain.recipes.reading.load import load_recipe
from memtrain.trainers.build.bare_steps import Stepper
from memtrain.trainers.build.components import Built, build
from memtrain.trainers.build.engine import make_accelerator
from memtrain.trainers.tools.verify.fixed_rollout import Rollouts, online_source

# Matrix products in one order; read when a process makes its first.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
STAND_IN = os.environ.get("MEMTRAIN_GPU_STAND_IN") == "1"
MODEL = (
    "{model_type: qwen3, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 3,"
    " num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, tie_word_embeddings: false}"
)
RECIPE = """
method: {method}
model: {{config: {model}, tokenizer: builtin:tiny, dtype: {dtype}}}
data: {{train: {{source: builtin:arithmetic, limit: 40}}, cache_dir: {cache}}}
length: {{max_length: 160}}
optim: {{lr: 1e-3}}
train: {{batch_size: 8, max_steps: 4}}
memory: {{oom_recovery: "off"}}
cluster: {{device: {device}, processes: 1, threads: 1}}
"""
ONLINE = """
rewards: {functions: [{function: length}]}
generate: {num_generations: 4, max_tokens: 12}
"""


@pytest.fixture(autouse=True)
def _needs_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that calls CUDA itself asks for `cuda`; the others run on a stand-in too."""
    if not torch.cuda.is_available() and not (STAND_IN and "cuda" not in request.fixturenames):
        pytest.skip("needs a CUDA device")
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)
    torch.use_deterministic_algorithms(False)
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.fixture
def device() -> torch.device:
    """The GPU, or what stands in for it."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The GPU: for a test that has no meaning elsewhere."""
    return device


@dataclass(frozen=True)
class Stepped:
    """Some steps of a plan."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    built: Built


@pytest.fixture
def plan_of(tmp_path: Path, device: torch.device) -> Callable[..., Plan]:
    """Factory of plans on this device: `plan_of("dpo", "length.shared_prompts=false", dtype="float32")`."""

    def make(method: str, *overrides: str, dtype: str = "bfloat16") -> Plan:
        path = tmp_path / f"{method}.yaml"
        given = {"model": MODEL, "cache": tmp_path / "cache", "device": device.type, "dtype": dtype}
        text = RECIPE.format(method=method, **given)
        path.write_text(text + (ONLINE if method in ("grpo", "rloo", "online_dpo", "ppo") else ""))
        return make_plan(load_recipe(str(path), list(overrides)), run_dir=str(tmp_path / "run")).plan

    return make


@pytest.fixture
def steps_of() -> Callable[..., Stepped]:
    """Makes the first steps of a plan with kernels whose sums do not depend on the order of threads."""

    def steps(plan: Plan, count: int) -> tuple[list[float], Built]:
        make_accelerator(plan.settings)
        built = build(plan)
        stepper = Stepper(plan, built, online_source(plan, built, Rollouts()))
        return [stepper.step(number).loss for number in range(count)], built

    def make(plan: Plan, count: int = 3) -> Stepped:
        (losses, built), _ = in_one_form(lambda: steps(plan, count))
        weights = {name: one.detach().cpu().clone() for name, one in built.trained.items()}
        return Stepped(losses, weights, built)

    return make
