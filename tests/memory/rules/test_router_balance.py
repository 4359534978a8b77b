"""Weight of the load-balance loss of a mixture: where it comes from, and where it is refused."""

from typing import Any

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.hardware.devices import Hardware

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
ASKS = {"output_router_logits": True}


@pytest.fixture
def resolved(ask: Any, facts_of: Any, profile_of: Any) -> Any:
    """`resolved({"output_router_logits": True}, train__router_aux_loss_coef=0.1)` of a tiny mixture."""

    def make(config: dict[str, Any], **said: Any) -> Any:
        return ask(facts_of(Hardware.named("h100"), profile_of(100, 200), MIXTRAL | config), **said)

    return make


@pytest.mark.parametrize(
    ("config", "said", "weight"),
    [
        ({}, {}, 0.0),
        ({"router_aux_loss_coef": 0.02}, {}, 0.0),
        (ASKS | {"router_aux_loss_coef": 0.02}, {}, 0.02),
        (ASKS | {"router_aux_loss_coef": 0.02}, {"train__router_aux_loss_coef": 0}, 0.0),
        ({}, {"train__router_aux_loss_coef": 0.1}, 0.1),
    ],
)
def test_the_weight_is_the_recipes_or_that_of_a_model_that_asks(
    resolved: Any, config: dict[str, Any], said: dict[str, Any], weight: float
):
    assert resolved(config, **said).settings.router_aux_loss_coef == weight


@pytest.mark.parametrize(
    ("config", "said", "words"),
    [
        (ASKS, {}, "gives no router_aux_loss_coef"),
        ({"model_type": "jamba"}, {"train__router_aux_loss_coef": 0.1}, "its routers are untested"),
        (
            {},
            {"train__router_aux_loss_coef": 0.1, "memory__streamed_layers": "on"},
            "a router that sees slices of a row would count each for itself",
        ),
    ],
)
def test_a_loss_that_cannot_be_computed_is_refused(
    resolved: Any, config: dict[str, Any], said: dict[str, Any], words: str
):
    with pytest.raises(RecipeError, match=words):
        resolved(config, **said)
