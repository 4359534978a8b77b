"""Rows that several processes hold together: what is dealt out, padded and priced, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from memtrain.errors import RecipeError
from memtrain.memory.estimate.activations import attention_kept
from memtrain.memory.estimate.context_parallel import (
    gathered_backward,
    gathered_forward,
    num_gathered_kv,
    score_pairs,
    ulysses_width,
)
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.devices import cpu
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.units import GIB
from memtrain.memory.rules.context_parallel import copies_of_keys, row_multiple
from memtrain.trainers.tools.trace.client import can_trace

ONE: dict[str, Any] = {
    "train__batch_size": 16,
    "train__micro_batch_size": 4,
    "memory__activation_checkpointing": "off",
}
Ask = Callable[..., Any]


@pytest.fixture
def facts(facts_of, profile_of) -> PlannerInputs:
    return facts_of(cpu(64 * GIB, 4), profile_of(*[512] * 64))


def refused(ask: Ask, facts: PlannerInputs, **said: Any) -> tuple[str, str, str]:
    with pytest.raises(RecipeError) as caught:
        ask(facts, **(ONE | {"cluster__context_parallel": 2} | said))
    fault = caught.value.faults[0]
    assert fault.fix
    return fault.what, fault.where, fault.fix


def test_a_cpu_gets_a_process_for_each_slice(ask: Ask, facts: PlannerInputs):
    settings = ask(facts, **ONE, cluster__context_parallel=2).settings
    assert (settings.num_processes, settings.context_parallel, settings.num_replicas) == (2, 2, 1)


def test_rows_are_dealt_to_groups(ask: Ask, facts: PlannerInputs):
    """Sixteen rows on four processes by two: two groups of eight rows, two micro-batches of four."""
    resolved = ask(facts, **ONE, cluster__processes=4, cluster__context_parallel=2)
    line = next(one.reason for one in resolved.decisions if one.setting == "micro_batch")
    assert "16 rows = 2 groups of 2 processes x " in line
    assert "2 accumulation steps" in line
    reported = next(one for one in resolved.decisions if one.setting == "context_parallel")
    assert reported.source == "r.yaml:cluster.context_parallel"
    assert "without" in reported.reason


@pytest.mark.parametrize(
    ("multiple", "size", "expected"),
    [(None, 1, None), (8, 1, 8), (None, 3, 6), (8, 2, 8), (10, 2, 20), (3, 4, 24)],
)
def test_rows_are_padded_to_twice_the_slices_and_to_what_the_recipe_says(
    multiple: int | None, size: int, expected: int | None
):
    assert row_multiple(multiple, size) == expected


def test_activations_shrink_by_the_processes_of_a_row(ask: Ask, facts: PlannerInputs):
    def activations(size: int) -> int:
        resolved = ask(facts, **ONE, cluster__processes=4, cluster__context_parallel=size)
        peak = next(one for one in resolved.prediction.phases if one.phase == "steady step")
        return next(one.num_bytes for one in peak.owners if one.owner == "activations")

    assert activations(2) == pytest.approx(activations(1) / 2, rel=0.01)
    assert activations(4) == pytest.approx(activations(1) / 4, rel=0.01)


def test_what_is_gathered_is_priced(ask: Ask, facts: PlannerInputs):
    """Four rows of 512 by two: two borders, a document at each, 1,024 of 2,048 tokens; 256 numbers wide.
    Keys, values and a kernel's gradients of both in float32, and the sums of these: 24 bytes a number."""
    settings = ask(
        facts, **ONE, cluster__context_parallel=2, length__packing="bfd", length__max_length=512
    ).settings
    load = Workload(settings, facts.shape, HeaviestBatch(4, 2048, 2048, 512))
    assert num_gathered_kv(load) == 1024
    assert gathered_backward(load) == 24 * 1024 * 256
    one_row = Workload(settings, facts.shape, HeaviestBatch(1, 2048, 2048, 2048))
    assert num_gathered_kv(one_row) == 1536, "no other rank looks at the last of four chunks"
    alone = settings.model_copy(update={"context_parallel": 1})
    assert num_gathered_kv(Workload(alone, facts.shape, HeaviestBatch(1, 2048, 2048, 2048))) == 0


@pytest.mark.parametrize(("size", "numbers"), [(2, 1024 + 2 * 256), (4, 1024 + 2 * 256), (8, 1024 + 2 * 512)])
def test_heads_that_are_dealt_out_are_priced(
    ask: Ask, facts_of, profile_of, recipe_of, size: int, numbers: int
):
    """16 heads of 64 and 4 of keys; on eight processes a head of keys is sent to two of them. What leaves is
    laid in order, and arrives; attention keeps its output before it goes back, and the copies of keys."""
    facts = facts_of(cpu(64 * GIB, 8), profile_of(*[512] * 64))
    said = {"cluster__context_parallel": size, "cluster__context_parallel_mode": "ulysses"}
    settings = ask(facts, **ONE, **said).settings
    load = Workload(settings, facts.shape, HeaviestBatch(1, 2048, 2048, 2048))
    assert (ulysses_width(load), num_gathered_kv(load)) == (numbers, 0)
    tokens = 2048 // size
    assert gathered_forward(load) == 2 * 4 * tokens * numbers
    by_keys = Workload(settings.model_copy(update={"context_by": "all_gather"}), facts.shape, load.batch)
    assert attention_kept(load) - attention_kept(by_keys) == 4 * tokens * (numbers - 2 * 256)
    assert can_trace(recipe_of({}), settings) is None


@pytest.mark.parametrize(
    ("heads", "keys", "ranks", "copies"),
    [(16, 4, 2, 1), (16, 4, 4, 1), (16, 4, 8, 2), (16, 4, 16, 4), (16, 4, 3, 0), (24, 6, 4, 0), (9, 3, 9, 3)],
)
def test_heads_of_keys_go_to_the_ranks_of_their_queries(heads: int, keys: int, ranks: int, copies: int):
    assert copies_of_keys(heads, keys, ranks) == copies


def test_heads_that_do_not_come_out_even_are_refused(ask: Ask, facts_of, profile_of):
    facts = facts_of(cpu(64 * GIB, 6), profile_of(*[512] * 64))
    said = {"cluster__context_parallel": 3, "cluster__context_parallel_mode": "ulysses"}
    what, where, fix = refused(ask, facts, **said)
    assert what.endswith("16 heads with 4 of keys cannot be divided evenly over 3 processes")
    assert where == "r.yaml:cluster.context_parallel_mode"
    assert fix == "set it to all_gather, or cluster.context_parallel to one of 2, 4, 8, 16"


def test_padded_rows_take_a_back_end_that_can_be_sliced(ask: Ask, facts: PlannerInputs):
    settings = ask(facts, **ONE, cluster__context_parallel=2, length__padding_free=False).settings
    assert (settings.padding_free, settings.attention) == (False, "torch_cpu")


def test_a_broken_pass_cannot_be_made_again(ask: Ask, facts: PlannerInputs):
    resolved = ask(facts, **ONE, cluster__context_parallel=2)
    assert resolved.settings.recovery == ()
    assert "would hang" in next(one.reason for one in resolved.decisions if one.setting == "oom_recovery")


def test_a_step_in_slices_is_traced(ask: Ask, facts: PlannerInputs, recipe_of):
    settings = ask(facts, **ONE, cluster__context_parallel=2).settings
    assert can_trace(recipe_of({}), settings) is None


def test_processes_that_it_does_not_divide_are_refused(ask: Ask, facts: PlannerInputs):
    what, where, fix = refused(ask, facts, cluster__processes=3)
    assert what == "3 processes cannot be divided into groups of 2"
    assert where == "r.yaml:cluster.context_parallel"
    assert "cluster.processes" in fix


@pytest.mark.parametrize(
    ("said", "words", "where"),
    [
        ({"model__attention": "transformers"}, "log-sum-exp", "model.attention"),
        ({"optim__neftune_alpha": 5.0}, "noise on the embeddings", "optim.neftune_alpha"),
    ],
)
def test_what_slices_cannot_honour_is_refused_with_the_way_out(
    ask: Ask, facts: PlannerInputs, said: dict[str, Any], words: str, where: str
):
    what, place, fix = refused(ask, facts, **said)
    assert words in what
    assert place == f"r.yaml:{where}"
    assert "cluster.context_parallel: 1" in fix


def test_methods_that_write_completions_are_refused(ask: Ask, facts: PlannerInputs):
    said: dict[str, Any] = {"method": "grpo", "rewards__functions": "exact_answer"}
    with pytest.raises(RecipeError) as caught:
        ask(facts, cluster__context_parallel=2, **said)
    assert any("completions of grpo" in fault.what for fault in caught.value.faults)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_follow_the_length_are_refused(
    ask: Ask, facts_of, profile_of, facts: PlannerInputs, kind: str, key: str
):
    """Each slice would see another longest position, and turn its keys by other frequencies."""
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 256}
    config = {**facts.config, "max_position_embeddings": 256, key: rope}
    what, _, _ = refused(ask, facts_of(cpu(64 * GIB, 4), profile_of(*[512] * 64), config))
    assert {"dynamic": "dynamic NTK", "longrope": "LongRoPE"}[kind] in what


def test_plain_and_linear_rotary_positions_are_not(ask: Ask, facts_of, profile_of, facts: PlannerInputs):
    config = {**facts.config, "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}
    assert ask(
        facts_of(cpu(64 * GIB, 4), profile_of(*[512] * 64), config), **ONE, cluster__context_parallel=2
    )


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, "torch_cpu"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0, "sliding_window": 128}, "masked"),
    ],
)
def test_rows_with_rules_of_their_scores_are_shared(
    ask: Ask, facts_of, profile_of, facts: PlannerInputs, model: dict[str, Any], backend: str
):
    config = {**facts.config, **model}
    asked = facts_of(cpu(64 * GIB, 4), profile_of(*[512] * 64), config)
    settings = ask(asked, **ONE, cluster__context_parallel=2).settings
    assert (settings.attention, settings.context_parallel) == (backend, 2)


def test_a_window_of_all_layers_gathers_no_more_than_itself(
    ask: Ask, facts_of, profile_of, facts: PlannerInputs
):
    """Two borders between two ranks' chunks, 128 tokens at each."""
    config = {**facts.config, "model_type": "mistral", "sliding_window": 128}
    asked = facts_of(cpu(64 * GIB, 4), profile_of(*[512] * 64), config)
    settings = ask(asked, **ONE, cluster__context_parallel=2).settings
    assert num_gathered_kv(Workload(settings, asked.shape, HeaviestBatch(1, 2048, 2048, 2048))) == 2 * 128


def test_masked_scores_are_of_spans_where_keys_are_gathered(ask: Ask, facts: PlannerInputs):
    """Two documents of 1,024 by two. Gathered: nothing is kept, and a call has a document's queries and keys.
    By heads: all pairs of the whole row, for half of the heads."""
    said = {"cluster__context_parallel": 2, "model__attention": "masked"}
    batch = HeaviestBatch(2, 2048, 2048, 1024)
    gathered = Workload(ask(facts, **ONE, **said).settings, facts.shape, batch)
    assert score_pairs(gathered) == (0, 1024 * 1024)
    said |= {"cluster__context_parallel_mode": "ulysses"}
    by_heads = Workload(ask(facts, **ONE, **said).settings, facts.shape, batch)
    assert score_pairs(by_heads) == (2048 * 2048 // 2,) * 2
