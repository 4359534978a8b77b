"""Inputs of the planner beside the recipe, and the price of settings under them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from memtrain.memory.estimate.auxiliary_models import RewardShape, with_beside
from memtrain.memory.estimate.host_memory import host_bytes, host_shortage
from memtrain.memory.estimate.host_phases import Owners, highest, host_phases
from memtrain.memory.estimate.kept import kept_bytes
from memtrain.memory.estimate.peaks import estimate, evaluation_moment, phase_peak
from memtrain.memory.estimate.static import needed
from memtrain.memory.estimate.step_time import step_time
from memtrain.memory.estimate.teachers import TeacherShape, teacher_load
from memtrain.memory.estimate.workload import Workload
from memtrain.memory.hardware.devices import Hardware
from memtrain.memory.hardware.packages import installed
from memtrain.memory.hardware.peak_history import EMPTY, History, kind_of_run
from memtrain.memory.model_shape.layer_record import Treatment
from memtrain.memory.model_shape.shape import ModelShape
from memtrain.memory.plan.heaviest_batch import ForeignStep, HeadOutput, HeaviestBatch, MixedRows
from memtrain.memory.plan.length_profile import LengthProfile
from memtrain.memory.plan.plan import PhasePeak, Prediction
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.methods.distill import Distill

MARGIN_SHARE = 0.02
MARGIN_BYTES = 256 * 2**20
"""Part of the budget that a plan leaves for unseen memory: no false "fits" is the aim."""

CPU_SHARE = 0.8
"""Share of a machine's free memory that a CPU run takes as its budget; others need some. Taste."""

MeasureLayers = Callable[[Settings, frozenset[Treatment]], ModelShape]
"""The shape with the record of its layers, under settings and with treatments."""

CountSteps = Callable[[int | None, int | None, float], int]
"""Optimizer steps of (rows of a step, tokens of a step, epochs)."""


@dataclass(frozen=True, slots=True)
class PlannerInputs:
    """The resolver's inputs beside the recipe."""

    hardware: Hardware
    shape: ModelShape
    config: Mapping[str, object]
    """The model's configuration, as in config.json."""
    profile: LengthProfile
    count_steps: CountSteps
    method: str
    unshared: tuple[LengthProfile, CountSteps] | None = None
    """The same where a prompt is computed for each of its answers; None where rows have no answers."""
    held_out: tuple[LengthProfile | None, LengthProfile | None] = (None, None)
    """The rows of all evaluation sets; the same with a prompt for each answer. None where there are none."""
    presumed: frozenset[str] = frozenset()
    """Packages that the run's machine, another than this, is taken to have."""
    mixes_answers: bool = False
    """Whether prompts are read once more with the answers of others."""
    mixed: Callable[[Settings], MixedRows] | None = None
    """The heaviest micro-batch of an evaluation that reads them so."""
    is_guessed: bool = False
    """The data was not read: every sequence is taken to be as long as it may be."""
    written_prompt: int = 0
    """Tokens of the longest prompt of `eval.samples` and `eval.metrics`."""
    num_written: int = 1
    """Prompts of the one of these that has most."""
    learns_entropy: bool = False
    """The loss of an online method has the entropy in it."""
    rewards: tuple[RewardShape, ...] = ()
    """Reward models that judge completions."""
    taught: Distill | None = None
    """The section of a method with a teacher."""
    teacher: TeacherShape | None = None
    """A teacher of its own beside the model."""
    history: History = EMPTY
    """Peaks of runs that ended on this machine."""
    at_length: Callable[[int], PlannerInputs] | None = None
    """The same facts with another `length.max_length`; None where rows cannot be laid out again."""
    foreign: ForeignStep | None = None
    """The step of another tool, whose run is planned as it was."""
    measure_layers: MeasureLayers | None = None
    """The shape with the record of its layers, where these are measured; None: they never are."""

    def with_prompts_apart(self) -> PlannerInputs:
        """The same inputs, with a prompt for each answer."""
        assert self.unshared is not None, "These rows have no answers that could share a prompt."
        profile, count_steps = self.unshared
        return replace(self, profile=profile, count_steps=count_steps)

    def with_measured_layers(self, choices: Iterable[Settings]) -> PlannerInputs:
        """The same inputs, layers that no arithmetic is known of measured under settings that differ in
        treatments and steps alone; of another tool's step, under its kernels and PEFT's own products."""
        if self.measure_layers is None:
            return self
        every = tuple(choices)
        slices: frozenset[Treatment] = frozenset({"slices"} if any(one.slice_tokens for one in every) else ())
        away: frozenset[Treatment] = frozenset(
            {"travelling"} if any(one.offload == "all" for one in every) else ()
        )
        settings = every[0]
        if self.foreign is not None:
            adapter = settings.adapter
            if adapter is not None:
                # Memtrain's kernel takes no scale that is no power of two.
                adapter = adapter.model_copy(update={"alpha": 3.0 * adapter.r, "rslora": False})
            settings = settings.model_copy(update={"kernels": "transformers", "adapter": adapter})
        return replace(self, shape=self.measure_layers(settings, slices | away))

    def has(self, package: str) -> bool:
        """Whether the run can import a package."""
        return package in self.presumed or bool(installed(package))

    @property
    def longest_piece(self) -> int:
        """Tokens of the longest piece of all rows, held-out ones too: none that the run reads is longer."""
        return max(self.profile.longest_piece, self.longest_held_out)

    @property
    def longest_held_out(self) -> int:
        """The same of held-out rows; 0 where there are none."""
        profile = self.held_out[0]
        return 0 if profile is None else profile.longest_piece

    def rows_of(self, settings: Settings) -> LengthProfile:
        """The profile of the sequences under some settings."""
        if self.unshared is None or settings.shared_prompts:
            return self.profile
        return self.unshared[0]


@dataclass(frozen=True, slots=True)
class Priced:
    """Settings with the memory and the time predicted for them."""

    settings: Settings
    prediction: Prediction
    need_bytes: int
    """Of the device, at the highest peak: with the allocator, the context and the margin."""
    step_s: float
    """Of one optimizer step of one process."""
    token_s: float
    """Seconds for each token that a process learns from."""
    host_share: float = 0.0
    """Share of the step for which a GPU waits for the host's launches."""


def price(settings: Settings, facts: PlannerInputs) -> Priced:
    """Cost of settings in memory and in time, by arithmetic."""
    prediction = predict(settings, facts)
    typical, num_micro_batches = typical_micro_batch(settings, facts)
    found = step_time(settings, facts.shape, typical, facts.hardware, num_micro_batches=num_micro_batches)
    tokens = max(1, typical.tokens * num_micro_batches) / settings.context_parallel
    need, seconds = need_of(prediction, settings), found.seconds
    return Priced(settings, prediction, need, seconds, seconds / tokens, found.waits_s / seconds)


def predict(settings: Settings, facts: PlannerInputs, batch: HeaviestBatch | None = None) -> Prediction:
    """The peaks of every phase for a micro-batch; of itself the heaviest of the data."""
    batch = batch or heaviest(settings, facts)
    load = Workload(settings, facts.shape, batch)
    # Recordings accumulate in gradients that live as long as they do.
    accumulates = settings.step_graphs or may_accumulate(settings, facts)
    estimated = estimate(settings, facts.shape, batch, accumulates=accumulates)
    made = with_beside(estimated, load, kept_bytes(load), facts.rewards, accumulates=accumulates)
    made = _with_held_out(made, settings, facts)
    if not facts.history.ratios:
        return made
    kind = kind_of_run(settings, facts.shape, facts.method)
    return made.model_copy(update={"correction_bytes": facts.history.correction(kind, made.peak.num_bytes)})


def _with_held_out(made: Prediction, settings: Settings, facts: PlannerInputs) -> Prediction:
    """The prediction with the evaluation of held-out rows as they are, heavier or lighter than training's."""
    shared, apart = facts.held_out
    if shared is None or METHODS[facts.method].is_online:
        return made
    unshared = None if apart is None else (apart, facts.count_steps)
    batch = heaviest(settings, replace(facts, profile=shared, unshared=unshared))
    if facts.mixed is not None:
        batch = batch._replace(mixed=facts.mixed(settings))
    own = pass_alone("evaluation", settings, facts, batch)
    phases = tuple(own if phase.phase == own.phase else phase for phase in made.phases)
    return made.model_copy(update={"phases": phases})


def pass_alone(phase: str, settings: Settings, facts: PlannerInputs, batch: HeaviestBatch) -> PhasePeak:
    """The peak of a phase of passes without gradients, with the models beside the policy."""
    load = Workload(settings, facts.shape, batch)
    moment = phase_peak(phase, evaluation_moment(load))
    alone = Prediction(phases=(moment,), method="arithmetic", budget_bytes=None)
    # No layer keeps activations.
    return with_beside(alone, load, 0, facts.rewards).phases[0]


def may_accumulate(settings: Settings, facts: PlannerInputs) -> bool:
    """Whether a step of one process may have several micro-batches, so that gradients wait from one to the
    next; not where its rows are one micro-batch however long they are."""
    if settings.batch_size is None:
        return True
    profile = facts.rows_of(settings)
    rows = -(-settings.batch_size // settings.num_replicas)
    if METHODS[facts.method].is_online:
        if settings.num_replicas > 1 or profile.groups is None:
            # Groups are dealt to processes whole: one of them may get two micro-batches.
            return True
        rows = profile.groups.most_rows(settings.batch_size)
    longest = profile.longest[0] if profile.longest else 1
    is_over = settings.micro_tokens is not None and rows * longest > settings.micro_tokens
    return rows > settings.micro_batch_size or is_over


def need_of(prediction: Prediction, settings: Settings) -> int:
    """Bytes of the device that must be there: the peak, the device's own bytes, and the margin."""
    return round(needed(prediction.corrected_bytes, settings) * (1 + MARGIN_SHARE)) + MARGIN_BYTES


def heaviest(settings: Settings, facts: PlannerInputs, num_steps: int = 1) -> HeaviestBatch:
    """The heaviest micro-batch of the data under some settings, out of the rows of so many steps."""
    profile = facts.rows_of(settings)
    most_rows, most_tokens = settings.micro_batch_size, settings.micro_tokens
    if profile.groups is not None and settings.batch_size is not None:
        most_rows = min(most_rows, profile.groups.most_rows(num_steps * settings.batch_size))
    if METHODS[facts.method].in_pairs:
        # A pair is not divided, whatever the limits: two completions of the longest prompt at least.
        most_rows = max(2, most_rows // 2 * 2)
        most_tokens = None if most_tokens is None else max(most_tokens, profile.heaviest(2, None)[1])
    sequences, tokens = profile.heaviest(most_rows, most_tokens)
    rows = sequences * profile.rows_per_sequence
    longest = profile.longest[0] if profile.longest else 1
    if profile.rows_per_sequence > 1:
        longest = profile.longest_piece
    scored = 0 if METHODS[facts.method].head == "score" else profile.most_scored(sequences, tokens)
    asks = head_output_of(facts.method, settings, learns_entropy=facts.learns_entropy)
    batch = HeaviestBatch(rows, tokens, scored, longest, asks, facts.foreign)
    if settings.padding_free:
        batch = batch._replace(segments=profile.most_segments(most_rows, most_tokens))
    if facts.mixes_answers:
        batch = batch._replace(mixed=_mixed_at_most(batch, profile))
    return _taught(settings, facts, batch)


def _mixed_at_most(batch: HeaviestBatch, profile: LengthProfile) -> MixedRows:
    """A bound on prompts with the answers of others, which steps mix by chance."""
    most_answer = profile.most_scored(1, batch.longest)
    tokens = batch.tokens + min(batch.scored_tokens, batch.rows * most_answer) - batch.rows
    tokens, scored = max(batch.tokens, tokens), profile.most_scored(batch.rows, tokens)
    return MixedRows(batch.rows, tokens, batch.longest + most_answer - 1, scored)


def head_output_of(
    method: str, settings: Settings | None = None, *, learns_entropy: bool = False
) -> HeadOutput:
    """Outputs that the loss of a method needs from the LM head."""
    if METHODS[method].has_teacher:
        return HeadOutput.TOP_K if settings is not None and settings.teacher == "file" else HeadOutput.TEACHER
    if METHODS[method].num_answers or METHODS[method].in_pairs:
        return HeadOutput.LOGPS
    if METHODS[method].is_online:
        return HeadOutput.ENTROPIES if learns_entropy else HeadOutput.STATISTICS
    return HeadOutput.NLL


def typical_micro_batch(settings: Settings, facts: PlannerInputs) -> tuple[HeaviestBatch, int]:
    """(a micro-batch of mean sequences, how many make a step of one process)."""
    profile = facts.rows_of(settings)
    mean = max(profile.mean_tokens, 1.0)
    rows = settings.micro_batch_size
    if settings.micro_tokens is not None:
        rows = max(1, min(rows, int(settings.micro_tokens / mean)))
    step_rows = settings.batch_size or max(1, int((settings.batch_tokens or 0) / mean))
    own_rows = max(1, -(-step_rows // settings.num_replicas))
    num_micro_batches = max(1, -(-own_rows // rows))
    # The last micro-batch of a step may be smaller: all are taken to share the step's rows equally.
    tokens = max(1, round(own_rows * mean / num_micro_batches))
    longest = profile.longest[0] if profile.longest else 1
    rows = max(1, -(-own_rows // num_micro_batches))
    attended = profile.attended_tokens
    batch = HeaviestBatch(rows, tokens, tokens, min(longest, max(round(mean), 1)), attended_tokens=attended)
    return _taught(settings, facts, batch), num_micro_batches


def _taught(settings: Settings, facts: PlannerInputs, batch: HeaviestBatch) -> HeaviestBatch:
    """The micro-batch with what a teacher adds to it."""
    return batch._replace(teacher=teacher_load(settings, facts.shape, facts.taught, facts.teacher, batch))


def budget_of(recipe: Recipe, hardware: Hardware) -> int:
    """Bytes of one device that the run may use: never more than a GPU has, of which the driver keeps some."""
    if recipe.memory.budget != "auto":
        most = hardware.memory_bytes if hardware.device == "cuda" else recipe.memory.budget
        return min(recipe.memory.budget, most)
    return int(hardware.free_bytes * (CPU_SHARE if hardware.device == "cpu" else 1.0))


def host_need(priced: Priced, facts: PlannerInputs) -> dict[str, int]:
    """Bytes of the node's memory by owner, in the phase that needs the most."""
    return dict(highest(phases_on_host(priced, facts))[1])


def phases_on_host(priced: Priced, facts: PlannerInputs) -> dict[str, Owners]:
    """Bytes of the node's memory by owner, in each phase."""
    settings, num_rows = priced.settings, facts.profile.report.num_rows
    in_steps = host_bytes(settings, facts.shape, heaviest(settings, facts), num_rows, priced.prediction)
    return host_phases(settings, facts.shape, in_steps, num_rows)


def fits_host(priced: Priced, facts: PlannerInputs) -> bool:
    """Whether the node's memory holds everything that waits there."""
    return host_shortage(host_need(priced, facts), facts.hardware) is None
