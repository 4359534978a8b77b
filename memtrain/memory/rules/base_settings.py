"""Settings that do not depend on memory: device, precision, attention, rows and steps, each by a rule."""

from __future__ import annotations

from dataclasses import asdict

from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.model_shape.length_rules import length_rules, reached
from memtrain.memory.plan.row_form import RowForm
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import LARGE_TILE, TILE_BYTES
from memtrain.memory.plan.units import count_of
from memtrain.memory.rules.adapter_targets import refuse_targets
from memtrain.memory.rules.attention import AttentionChoice
from memtrain.memory.rules.batching import Micro, decide_batch, micro_batch_candidates, refuse_uneven_groups
from memtrain.memory.rules.compiled_layers import decide_compile
from memtrain.memory.rules.context_parallel import refuse_attention, refuse_context, sharing_settings
from memtrain.memory.rules.deterministic import decide_deterministic
from memtrain.memory.rules.engines import first_form, refuse_engine
from memtrain.memory.rules.kernels import decide_kernels
from memtrain.memory.rules.ledger import (
    DecisionLog,
    decide_attention,
    decide_device,
    decide_dtype,
    refuse_past_positions,
    refuse_what_cannot_run,
)
from memtrain.memory.rules.precision import precision_settings, refuse_precision
from memtrain.memory.rules.reference_model import decide_reference, decide_shared_prompts, whole_batch
from memtrain.memory.rules.router_balance import decide_router_balance
from memtrain.memory.rules.router_replay import decide_router_replay
from memtrain.memory.rules.row_positions import decide_positions, decide_scaling, one_row_a_time
from memtrain.memory.rules.streamed_layers import refuse_streaming
from memtrain.memory.rules.teacher import decide_teacher
from memtrain.memory.rules.weights_offload import refuse_weights_offload
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.methods.ppo import Ppo


def decide_base(ledger: DecisionLog, facts: PlannerInputs) -> tuple[Settings | None, list[Micro]]:
    """Settings with everything decided that does not depend on memory, and the micro-batches to try.

    None where a refusal was noted without which nothing more can be reported.
    """
    recipe, hardware = ledger.asked.recipe, facts.hardware
    refuse_what_cannot_run(ledger, hardware)
    processes = decide_device(ledger, hardware)
    dtype = decide_dtype(ledger, hardware)
    refuse_targets(ledger, facts.shape)
    refuse_precision(ledger, dtype)
    refuse_engine(ledger, processes, dtype, is_foreign=facts.foreign is not None)
    refuse_context(ledger, processes, facts.config, facts.shape)
    attention = decide_attention(ledger, hardware, dtype, facts.config)
    refuse_past_positions(ledger, facts.shape.num_positions, facts.longest_piece)
    if facts.shape.num_positions is None:
        decide_scaling(ledger, facts.config, facts.longest_piece)
    router_weight = decide_router_balance(ledger, facts)
    replays = decide_router_replay(ledger, facts, balance=router_weight)
    replicas = max(1, processes // recipe.cluster.sharing)
    rows, tokens = batch = decide_batch(ledger, replicas, num_sharing=recipe.cluster.sharing)
    refuse_uneven_groups(ledger, rows)
    if attention is None:
        return None, []
    refuse_attention(ledger, attention)
    refuse_streaming(ledger, attention, facts.config, processes)
    refuse_weights_offload(ledger, facts.config, processes)
    form = _how_rows_lie(ledger, facts, attention)
    if facts.unshared is not None and not form.shared_prompts:
        facts = facts.with_prompts_apart()
    micro_batches = _micro_batches(ledger, facts, batch, replicas=replicas, padding_free=form.padding_free)
    micro_batches = one_row_a_time(ledger, micro_batches) if form.positions_by_row else micro_batches
    max_steps = _max_steps(ledger, facts, rows, tokens)
    passes = max_steps / max(1, facts.count_steps(rows, tokens, 1.0))
    settings = Settings.model_validate(
        _from_recipe(recipe, hardware)
        | precision_settings(recipe, dtype)
        | form.updates()
        | decide_teacher(ledger, facts, attention.backend, dtype=dtype)
        | {
            "device": hardware.device,
            "num_processes": processes,
            "threads": _threads(recipe, hardware, processes),
            "engine": first_form(recipe).engine,
            "attention": str(attention.backend),
            **decide_kernels(ledger, hardware, facts.shape, facts.config),
            "compiled": decide_compile(ledger, facts),
            "deterministic": decide_deterministic(ledger, facts),
            "router_aux_loss_coef": router_weight,
            "router_replay": replays,
            "reference": decide_reference(ledger, passes=passes),
            "batch_size": rows,
            "batch_tokens": tokens,
            "micro_batch_size": micro_batches[0].rows,
            "micro_tokens": micro_batches[0].tokens,
            "max_steps": max_steps,
        }
    )
    return settings, micro_batches


def _micro_batches(
    ledger: DecisionLog,
    facts: PlannerInputs,
    batch: tuple[int | None, int | None],
    *,
    replicas: int,
    padding_free: bool,
) -> list[Micro]:
    """The micro-batches to try, largest first."""
    return whole_batch(ledger, batch, replicas) or micro_batch_candidates(
        ledger,
        facts.profile,
        batch,
        num_replicas=replicas,
        num_sharing=ledger.asked.recipe.cluster.sharing,
        padding_free=padding_free,
        device=facts.hardware.device,
    )


def _how_rows_lie(ledger: DecisionLog, facts: PlannerInputs, attention: AttentionChoice) -> RowForm:
    """Whether rows lie end to end, whether padded ones tell their lengths, whether prompts are shared."""
    padding_free = _padding_free(ledger, can_pack=attention.can_pack)
    rules, longest = length_rules(facts.config), facts.longest_piece
    by_row = decide_positions(ledger, rules, longest, padding_free=padding_free)
    growing = reached(rules, longest, "row")
    shares = decide_shared_prompts(ledger, attention, padding_free=padding_free, growing=growing)
    return RowForm(padding_free, by_row, shares)


def _threads(recipe: Recipe, hardware: Hardware, processes: int) -> int:
    """CPU threads of one process."""
    if recipe.cluster.threads != "auto":
        return recipe.cluster.threads
    return max(1, hardware.num_nodes * hardware.num_cores // processes)


def _from_recipe(recipe: Recipe, hardware: Hardware) -> dict[str, object]:
    """Settings that repeat the recipe; settings of strategies are off until the search chooses."""
    return {
        "value": (recipe.ppo or Ppo()).value if METHODS[recipe.method].has_value else "none",
        "shard_offload": first_form(recipe).offload,
        "background_save": recipe.save.async_save,
        "adapter": recipe.model.adapter,
        "quantize": recipe.model.quantize,
        **asdict(recipe.row_limits),
        **sharing_settings(recipe),
        "group_by_length": recipe.length.group_by_length,
        "loss_tile_bytes": loss_tile(recipe, LARGE_TILE if hardware.device == "cuda" else TILE_BYTES),
        "optimizer": recipe.optim.kind,
        "expandable_segments": recipe.memory.expandable_segments,
        "checkpoint_every": 0,
        "offload": "none",
        "offload_disk": recipe.memory.offload_disk,
        "offload_host_bytes": recipe.memory.offload_host,
        "loss": "full",
    }


def loss_tile(recipe: Recipe, largest: int = TILE_BYTES) -> int:
    """Size of the loss's tiles: as the recipe says, else the largest, which the planner may cut."""
    size = recipe.memory.loss_chunk_size
    return largest if size == "auto" else size


def _padding_free(ledger: DecisionLog, *, can_pack: bool) -> bool:
    length = ledger.asked.recipe.length
    if length.packing != "none" or length.padding_free:
        return can_pack
    return length.padding_free is None and can_pack and not length.group_by_length


def _max_steps(ledger: DecisionLog, facts: PlannerInputs, rows: int | None, tokens: int | None) -> int:
    train = ledger.asked.recipe.train
    if train.max_steps is not None:
        ledger.decide("max_steps", train.max_steps, "", "train.max_steps")
        return train.max_steps
    epochs = train.epochs if train.epochs is not None else 1.0
    words = f"{epochs:g} epoch{'s' if epochs != 1 else ''}"
    steps = max(1, facts.count_steps(rows, tokens, epochs))
    if facts.is_guessed:
        ledger.decide("max_steps", "?", f"{words} of rows that were not read", "train.epochs")
        return steps
    count = facts.profile.report.num_sequences
    ledger.decide("max_steps", steps, f"{words} over {count_of(count, 'sequence')}", "train.epochs")
    return steps
