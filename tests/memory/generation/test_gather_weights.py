"""Weights in shards while completions are written: gathered where that fits, else streamed, and reported."""

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.generation.gather_weights import GatherBytes, decide_gathering
from memtrain.memory.hardware.devices import cpu
from memtrain.memory.plan.units import GIB
from memtrain.memory.rules.ledger import DecisionLog, SourcedRecipe

ONLINE = {
    "method": "grpo",
    "rewards__functions": ["length"],
    "generate__num_generations": 4,
    "train__batch_size": 16,
    "cluster__processes": 2,
}


@pytest.fixture
def known(facts_of, profile_of):
    return facts_of(
        cpu(64 * GIB, 4), profile_of(*[512] * 64), method="grpo", presumed=frozenset({"deepspeed"})
    )


def gathering(made) -> tuple[bool, str, int]:
    reason = next(one.reason for one in made.decisions if one.setting == "gather_weights")
    writing = next(phase for phase in made.prediction.phases if phase.phase == "generation")
    owners = {one.owner: one.num_bytes for one in writing.owners}
    return made.settings.gather_weights, reason, owners["gathered weights"]


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_streamed_weights_need_less_and_take_longer(ask, known, engine: str):
    whole = gathering(ask(known, **ONLINE, cluster__engine=engine, generate__gather_weights="on"))
    streamed = gathering(ask(known, **ONLINE, cluster__engine=engine, generate__gather_weights="off"))
    assert (whole[0], streamed[0]) == (True, False)
    assert streamed[2] < whole[2] / 2
    assert "times as long" in whole[1]
    assert "layer by layer" in streamed[1]


def test_auto_gathers_where_it_fits_and_streams_where_it_does_not(known, recipe_of, make_settings):
    """1 GiB of weights beside 1 GiB of the rest: two fit a budget of 3, and not one of 2."""
    settings = make_settings(num_processes=2, engine="fsdp2", device="cuda")
    found = GatherBytes(whole=GIB, streamed=GIB // 16, slowdown=3.0)
    reasons: list[str] = []
    for budget, gathers in ((4 * GIB, True), (2 * GIB, False)):
        ledger = DecisionLog(
            SourcedRecipe(
                recipe_of({key.replace("__", "."): value for key, value in ONLINE.items()}),
                lambda path: "default",
            )
        )
        assert decide_gathering(ledger, settings, found, GIB, budget) is gathers
        reasons.append(ledger.decisions[0].reason)
    assert reasons[1] == f"{reasons[0]}; gathered it would not fit"
    assert "3.0 times as long" in reasons[0]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"cluster__engine": "ddp"}, "every process holds all weights"),
        ({"cluster__engine": "zero2"}, "every process holds all weights"),
        (
            {"cluster__engine": "ddp", "generate__backend": "vllm", "generate__vllm": {"python": "python"}},
            "vLLM generates with its own copy of the",
        ),
    ],
)
def test_a_way_that_nothing_obeys_is_refused(ask, known, said, words: str):
    with pytest.raises(RecipeError, match=words) as caught:
        ask(known, **ONLINE, **said, generate__gather_weights="off")
    assert all(fault.fix for fault in caught.value.faults)
