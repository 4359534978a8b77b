"""Generation in a plan: the sampler, completions at a time, and the memory of keys and values."""

from __future__ import annotations

from collections.abc import Callable

from memtrain.memory.estimate.auxiliary_models import reward_scoring_bytes
from memtrain.memory.estimate.peaks import phase_peak
from memtrain.memory.estimate.pricing import PlannerInputs, heaviest, pass_alone
from memtrain.memory.generation.cuda_graphs import decide_graphs
from memtrain.memory.generation.decode_bytes import fetched_words, generation_bytes, resting_peak
from memtrain.memory.generation.gather_weights import decide_gathering, gather_bytes, refuse_gathering
from memtrain.memory.generation.native import not_native
from memtrain.memory.generation.samples import with_samples
from memtrain.memory.generation.vllm import (
    longest_prompt,
    longest_read,
    own_engine,
    weights_bucket,
    with_engine,
)
from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.plan import PhasePeak, Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.memory.rules.ledger import DecisionLog
from memtrain.memory.rules.router_replay import refuse_other_sampler
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.generate import Generate
from memtrain.recipes.sections.methods.online_base import WithMismatch

PASS_FACTORS = (4, 2, 1)
"""Factors by which micro-batches without gradients may be larger; beyond, they are hardly faster. Taste."""

MOST_ROWS = 512
"""Completions that are written at a time at most, unless the recipe says more: more is hardly faster."""


def with_generation(
    ledger: DecisionLog,
    settings: Settings,
    prediction: Prediction,
    facts: PlannerInputs,
    budget: int | None = None,
) -> tuple[Settings, Prediction]:
    """Settings and prediction with who writes the completions, and the peak while they are written.

    Of methods that write none, with the peak of the samples and metrics that the recipe asks for.
    """
    recipe = ledger.asked.recipe
    if not recipe.writes_completions:
        return with_samples(ledger, settings, prediction, facts, budget)
    settings = settings.model_copy(update={"sampler": _decide_sampler(ledger, settings, facts)})
    settings = settings.model_copy(update={"cuda_graphs": decide_graphs(ledger, settings)})
    _refuse(ledger, settings)
    resting = resting_peak(prediction)
    if settings.sampler in ("vllm", "vllm_server"):
        return _with_vllm(ledger, settings, prediction, facts, resting)
    room = prediction.peak.num_bytes - resting.num_bytes
    # Held-out prompts are written to once each: no completion shares its prompt's keys.
    held_out, alone = num_held_out(recipe, facts), recipe.generation.model_copy(update={"num_generations": 1})
    prompt, longest = longest_prompt(facts, alone), longest_held_out_prompt(facts, alone)
    generate = recipe.generation
    if recipe.rewards is not None and recipe.rewards.environment is not None:
        # Later turns read a conversation each, as long as a prompt with its completion.
        prompt, longest, generate = prompt + alone.max_tokens, longest + alone.max_tokens, alone

    def moment(rows: int) -> dict[str, int]:
        return generation_bytes(settings, facts.shape, generate, prompt, rows)

    def judged(rows: int) -> dict[str, int]:
        return generation_bytes(settings, facts.shape, alone, longest, min(rows, held_out))

    def fits(rows: int) -> bool:
        # On a CPU the rows decide how sums are rounded, and stay those of the rollouts.
        highest = sum(judged(rows).values()) if held_out and settings.device == "cuda" else 0
        return max(sum(moment(rows).values()), highest) <= room

    rows = _decide_rows(ledger, recipe, settings, fits, fetched_words(settings, facts.shape))
    owners = {one.owner: one.num_bytes for one in resting.owners}
    if shards_weights(settings):
        found = gather_bytes(settings, facts, rows=rows, tokens=recipe.generation.max_tokens)
        without = resting.num_bytes + sum(moment(rows).values())
        gathers = decide_gathering(ledger, settings, found, without, budget)
        owners["gathered weights"] = found.whole if gathers else found.streamed
        settings = settings.model_copy(update={"gather_weights": gathers})
    phases = [one for one in prediction.phases if not held_out or one.phase != "evaluation"]
    phases += [phase_peak("evaluation", owners | judged(rows))] if held_out else []
    phases.append(phase_peak("generation", owners | moment(rows)))
    phases += _judging(settings, facts, alone, owners)
    factor, passes = _decide_passes(settings, facts, prediction.peak.num_bytes, recipe)
    if recipe.online is not None and recipe.online.needs.passes:
        phases.append(passes)
    settings = settings.model_copy(update={"rollout_rows": rows, "pass_factor": factor})
    return settings, prediction.model_copy(update={"phases": tuple(phases)})


def _refuse(ledger: DecisionLog, settings: Settings) -> None:
    refuse_other_sampler(ledger, settings)
    _decide_correction(ledger)
    refuse_gathering(ledger, settings)
    ledger.raise_refusals()


def num_held_out(recipe: Recipe, facts: PlannerInputs) -> int:
    """Held-out prompts, as many as can be known: a file that was not read is taken to fill every row. None
    where held-out rows are scored as they are."""
    if recipe.online is None:
        return 0
    if (profile := facts.held_out[0]) is not None:
        return profile.report.num_sequences // recipe.generation.num_generations
    if recipe.data.eval:
        return MOST_ROWS
    share = recipe.data.eval_fraction
    return max(1, round(facts.profile.report.num_rows * share / (1 - share))) if share else 0


def longest_held_out_prompt(facts: PlannerInputs, generate: Generate) -> int:
    """Tokens of the longest held-out prompt; where they were not read, of the longest of training."""
    longest = facts.longest_held_out or facts.profile.longest_piece
    return max(1, longest - generate.max_tokens)


def _decide_passes(
    settings: Settings, facts: PlannerInputs, peak: int, recipe: Recipe
) -> tuple[int, PhasePeak]:
    """(factor of micro-batches without gradients over micro-batches with, their peak).

    As large as need no more than the update: no activations are kept.
    """
    num_steps = 1 if recipe.online is None else recipe.online.steps_per_rollout
    priced = [(factor, _pass_peak(settings, facts, factor, num_steps)) for factor in PASS_FACTORS]
    return next((one for one in priced if one[1].num_bytes <= peak), priced[-1])


def _pass_peak(settings: Settings, facts: PlannerInputs, factor: int, num_steps: int) -> PhasePeak:
    rows = factor * settings.micro_batch_size
    tokens = None if settings.micro_tokens is None else factor * settings.micro_tokens
    larger = settings.model_copy(update={"micro_batch_size": rows, "micro_tokens": tokens})
    return pass_alone("log-probs", settings, facts, heaviest(larger, facts, num_steps))


def _with_vllm(
    ledger: DecisionLog, settings: Settings, prediction: Prediction, facts: PlannerInputs, resting: PhasePeak
) -> tuple[Settings, Prediction]:
    """Completions of another process: this one holds its resting bytes and a bucket of weights."""
    recipe = ledger.asked.recipe
    if settings.sampler == "vllm":
        settings = with_engine(ledger, settings, facts, resting.num_bytes)
    else:
        rows = _decide_rows(ledger, recipe, settings, lambda rows: True)
        settings = settings.model_copy(update={"rollout_rows": rows})
    owners = {one.owner: one.num_bytes for one in resting.owners}
    on_the_way = {"weights on their way": weights_bucket(recipe, settings)}
    phases = [*prediction.phases, phase_peak("generation", owners | on_the_way)]
    phases += _judging(settings, facts, recipe.generation, owners)
    if recipe.online is not None and recipe.online.needs.passes:
        phases.append(_pass_peak(settings, facts, settings.pass_factor, recipe.online.steps_per_rollout))
    return settings, prediction.model_copy(update={"phases": tuple(phases)})


def _judging(
    settings: Settings, facts: PlannerInputs, generate: Generate, resting: dict[str, int]
) -> list[PhasePeak]:
    """The peak while reward models read the longest prompt with its completion; none without such models."""
    if not facts.rewards:
        return []
    reading = reward_scoring_bytes(
        settings, facts.rewards, longest_read(facts, generate) + generate.max_tokens
    )
    return [phase_peak("rewards", resting | {"activations": reading})]


def _decide_correction(ledger: DecisionLog) -> None:
    """Tell how the sampler's probabilities are corrected for; nothing of methods that do not weigh them."""
    recipe = ledger.asked.recipe
    section = recipe.online
    if isinstance(section, WithMismatch):
        mode, why = section.correction(recipe.generation)
        ledger.decide("importance_correction", mode, why, f"{recipe.method}.importance_correction")


def _decide_sampler(ledger: DecisionLog, settings: Settings, facts: PlannerInputs) -> str:
    wanted, path = ledger.asked.recipe.generation.backend, "generate.backend"
    if wanted == "vllm":
        is_own = own_engine(ledger.asked.recipe) is not None
        name = "vllm" if is_own else "vllm_server"
        words = (
            "in a separate process" if is_own else "a server, which receives a checkpoint before each rollout"
        )
        ledger.decide("sampler", name, words, path)
        return name
    generate = ledger.asked.recipe.generation
    longest = longest_read(facts, generate) + generate.max_tokens
    why = not_native(settings.attention, facts.config, longest)
    if wanted == "native" and why:
        ledger.refuse(
            "the native sampler computes a prompt once for all its completions, which is not possible here: "
            f"{why}",
            path,
            "set generate.backend: transformers",
        )
        ledger.raise_refusals()
    if wanted == "transformers" or why:
        ledger.decide("sampler", "transformers", why or "", path)
        return "transformers"
    ledger.decide("sampler", "native", "the trained module; each prompt is computed once for its group", path)
    return "native"


def _decide_rows(
    ledger: DecisionLog,
    recipe: Recipe,
    settings: Settings,
    fits: Callable[[int], bool],
    fetched: str = "",
) -> int:
    """Completions that are written at a time: as many as need no more than the update, a group at least."""
    section, generate = recipe.online, recipe.generation
    steps = 1 if section is None else section.steps_per_rollout
    if generate.rows != "auto":
        ledger.decide("rollout_rows", generate.rows, fetched.removeprefix("; "), "generate.rows")
        return generate.rows
    in_step = -(-(settings.batch_size or generate.num_generations) // settings.num_processes)
    rows = wanted = min(MOST_ROWS, in_step * steps)
    while rows > generate.num_generations and not fits(rows):
        rows = max(generate.num_generations, rows // 2)
    words = "all of a rollout" if rows == wanted else "more would need more memory than the update"
    ledger.decide("rollout_rows", rows, f"completions at a time; {words}{fetched}", "generate.rows")
    return rows
