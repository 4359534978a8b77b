"""Plans of tiny recipes, for the tests of exactness."""

from collections.abc import Callable

import pytest

from memtrain.cli.plan.make_plan import make_plan
from memtrain.memory.plan.plan import Plan
from memtrain.recipes.reading.load import load_recipe

MODEL = (
    "{model_type: qwen3, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,"
    " num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: false}"
)
RECIPE = """
method: {method}
model: {{config: {model}, tokenizer: builtin:tiny}}
data: {{train: {{source: builtin:arithmetic, limit: 12}}, cache_dir: {cache}}}
length: {{max_length: 160}}
train: {{batch_size: 6, max_steps: 2}}
cluster: {{device: cpu, threads: 1}}
"""
ONLINE = """
rewards: {functions: [{function: length}]}
generate: {num_generations: 3, max_tokens: 12}
"""


@pytest.fixture(scope="session")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """Factory of plans: `plan_of("dpo", "length.shared_prompts=false")`."""
    tmp_path = tmp_path_factory.mktemp("plans")

    def make(method: str, *overrides: str) -> Plan:
        path = tmp_path / f"{method}.yaml"
        text = RECIPE.format(method=method, model=MODEL, cache=tmp_path / "cache")
        path.write_text(text + (ONLINE if method in ("grpo", "rloo") else ""))
        return make_plan(load_recipe(str(path), list(overrides)), run_dir=str(tmp_path / "run")).plan

    return make
