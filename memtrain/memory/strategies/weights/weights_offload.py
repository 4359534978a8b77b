"""Weights offloading: the layers' weights live in host memory, and visit the device for their layer's turn.

When: the weights, or their gradients and states, are what does not fit. Saves: all layers but two buffers; of
a model that is trained whole also gradients, moments, float32 copies, the embedding and the head, as the host
steps them; of an adapter that goes along (`all`) its weights, gradients and moments. Costs: each layer
crosses the bus in the forward pass and again in the backward pass, and its gradients once: hidden behind long
micro-batches; host memory; the step at the speed of the host's memory.
Exact: bytes are copied, a layer is recomputed as under checkpointing; on a GPU the host's AdamW rounds apart.
Refused: with several processes but under an adapter and DDP (each has its own copy), with vLLM as the
sampler, with 8-bit weights, and without layers that keep only their input.

Source: Rajbhandari et al. 2021, arXiv:2104.07857 (ZeRO-Infinity, section 5); layer by layer from one block as
in MegaTrain, arXiv:2604.05091; bit for bit by tests/equal/test_weights_offload_is_exact.py.
"""

from __future__ import annotations

from memtrain.memory.plan.optimizers import OPTIMIZERS
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.compiled_layers import IN_PARTS
from memtrain.memory.rules.weights_offload import EACH_ITS_OWN, goes_with_others, is_asked, refusal_of
from memtrain.memory.strategies.base import ON_A_GPU, Conflict, Strategy, StrategyContext, Updates, on_off


def changes(settings: Settings, case: StrategyContext) -> tuple[Updates, ...]:
    """All layers; tried where each keeps its input alone, unless the recipe asks for it."""
    passes_layers = settings.checkpoint_every == 1 or settings.slice_tokens > 0
    if not passes_layers and not is_asked(case.asked):
        return ()
    frozen, everything = {"weights_offload": True}, {"weights_offload": True, "adapters_offload": True}
    if settings.adapter is None:
        return (frozen,)
    asked = case.recipe.memory.weights_offload
    if asked == "all":
        return (everything,)
    return (frozen,) if asked == "on" else (frozen, everything)


def refusal(case: StrategyContext) -> str | None:
    """A CPU has no other memory: there it only shows that nothing changes."""
    if case.facts.hardware.device == "cpu" and not is_asked(case.asked):
        return "on a CPU the weights are in host memory already"
    return refusal_of(case.recipe, case.facts.config)


def _steps_elsewhere(settings: Settings) -> bool:
    return not _is_frozen(settings) and not OPTIMIZERS[settings.optimizer].steps_on_host


def _is_frozen(settings: Settings) -> bool:
    return settings.adapter is not None and not settings.adapters_offload


def _divides_weights(settings: Settings) -> bool:
    if settings.num_processes == 1:
        return False
    return not goes_with_others(settings.engine, _is_frozen(settings), settings.context_parallel > 1)


STRATEGY = Strategy(
    name="weights_offload",
    axis="weights",
    summary="layer weights are kept in CPU memory, and copied to the device when their layer runs",
    saves="the weights of all layers but two; where they are trained, their gradients and states too",
    costs="each layer crosses the bus twice a micro-batch; host memory; the optimizer steps on CPU",
    measured=ON_A_GPU,
    is_exact=True,
    recovery="weights",
    evidence="weights that travel",
    is_used=lambda settings: settings.weights_offload,
    wish=lambda recipe: on_off(
        {"all": "on"}.get(recipe.memory.weights_offload, recipe.memory.weights_offload)
    ),
    use_keys=lambda recipe: {"memory.weights_offload": "on"},
    never_keys=lambda recipe: {"memory.weights_offload": "off"},
    changes=changes,
    without={"weights_offload": False, "adapters_offload": False},
    refusal=refusal,
    conflicts=(
        Conflict(
            "layers without checkpointing",
            "a layer's weights leave the device after its pass: only its input is kept, and it is recomputed",
            when=lambda settings: settings.checkpoint_every != 1 and not settings.slice_tokens,
        ),
        Conflict(
            "full_offloading",
            "kept activations would keep the layer's weights on the device; only its input can be offloaded",
        ),
        Conflict("compiled layers", IN_PARTS, when=lambda settings: settings.compiled),
        Conflict("several processes but under an adapter and DDP", EACH_ITS_OWN, when=_divides_weights),
        Conflict(
            "8-bit weights",
            "they keep their own copies on the device",
            when=lambda settings: settings.quantize == "8bit",
        ),
        Conflict(
            "optimizers without CPU kernels",
            "the host steps the weights",
            when=_steps_elsewhere,
        ),
        Conflict(
            "optimizer_offload of weights stepped there",
            "the states are on the host with their weights",
            when=lambda settings: settings.optimizer_offload and not _is_frozen(settings),
        ),
        Conflict(
            "compressed_moments of weights stepped there",
            "moments wait on the host, where 8 bits save no device memory",
            when=lambda settings: settings.compressed_moments and not _is_frozen(settings),
        ),
        Conflict(
            "float16 weights stepped there",
            "gradients on two devices are not unscaled together",
            when=lambda settings: settings.dtype == "float16" and not _is_frozen(settings),
        ),
        Conflict(
            "a load-balance loss of routers",
            "routers run in a separate pass, which would fetch all weights once more",
            when=lambda settings: settings.router_aux_loss_coef > 0,
        ),
        Conflict(
            "a reference that follows the policy",
            "it is written between two steps, while its layers may be on their way",
            when=lambda settings: settings.reference == "synced",
        ),
    ),
)
