"""Which strategy comes next when memory runs out, and what it changes."""

from collections.abc import Callable
from typing import Any

from memtrain.trainers.loop.oom.recover import next_strategy, with_strategy

ALL = ("split", "slices", "checkpointing", "offloading", "loss_tile")


def steps(settings: Any, most: int = 20) -> list[tuple[str, int, int, str]]:
    """Each strategy that is taken in turn: (its name, checkpointing, tokens of a slice, what waits)."""
    taken: list[tuple[str, int, int, str]] = []
    while (name := next_strategy(settings)) is not None and len(taken) < most and name != "loss_tile":
        settings = with_strategy(settings, name)
        taken.append((name, settings.checkpoint_every, settings.slice_tokens, settings.offload))
    return taken


def test_slices_are_halved_before_anything_else(make_settings: Callable[..., Any]):
    settings = make_settings(checkpoint_every=0, slice_tokens=1024, recovery=ALL, loss="chunked")
    assert steps(settings) == [
        ("slices", 0, 512, "none"),
        ("slices", 0, 256, "none"),
        ("offloading", 0, 256, "boundaries"),
    ]


def test_checkpointed_layers_are_streamed_before_their_inputs_wait_on_the_host(
    make_settings: Callable[..., Any],
):
    settings = make_settings(checkpoint_every=0, recovery=ALL, loss="chunked")
    taken = steps(settings)
    assert taken[:2] == [("checkpointing", 1, 0, "none"), ("slices", 0, 4096, "none")]
    assert taken[-1] == ("offloading", 0, 256, "boundaries")


def test_layers_are_not_streamed_where_the_plan_does_not_allow_it(make_settings: Callable[..., Any]):
    rest = ("split", "checkpointing", "offloading", "loss_tile")
    settings = make_settings(checkpoint_every=1, recovery=rest, loss="chunked")
    assert steps(settings) == [("offloading", 1, 0, "boundaries")]


def test_weights_go_to_the_host_last_and_once(make_settings: Callable[..., Any]):
    """When the loss's chunks are as small as they get, and only where each layer keeps its input alone."""
    known: dict[str, Any] = {
        "recovery": ("offloading", "loss_tile", "weights"),
        "loss": "chunked",
        "loss_tile_bytes": 1 << 20,
    }
    settings = make_settings(checkpoint_every=1, offload="boundaries", **known)
    assert next_strategy(settings) == "weights"
    moved = with_strategy(settings, "weights")
    assert moved.weights_offload
    assert next_strategy(moved) is None
    assert next_strategy(make_settings(checkpoint_every=2, offload="boundaries", **known)) is None
