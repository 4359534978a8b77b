"""Whether a plan may continue a checkpoint: refused where it is another run, reported where sums may round.

Three kinds of difference:
- free: the same numbers, bit for bit (what is logged, kept, evaluated; where activations wait);
- rounding: the same run, but sums are taken in another order (threads, processes, micro-batches, kernels,
  versions): continued, and reported;
- all others: another run, refused with the keys that differ. Those that `save.allow_changed_keys` names are
  said, except those whose saved state would not fit the model or the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue, ValidationError

from memtrain.errors import Fault, ResumeError
from memtrain.memory.plan.plan import Plan
from memtrain.memory.plan.settings import MARKS, Settings
from memtrain.recipes.reading.environment import revealed
from memtrain.recipes.recipe import Recipe
from memtrain.trainers.checkpoints.manifest import CheckpointFacts, data_fingerprint, device_name
from memtrain.trainers.data.store.token_store import META_FILE

FREE_KEYS = (
    "run_dir",
    "log",
    "save",
    "eval",
    "train.loss_watchdog",
    "data.eval",
    "data.cache_dir",
    "data.processes",
    "memory.measure_peaks",
    "generate.vllm",
    "generate.max_logprob_gap",
    "generate.gather_weights",
    "optim.in_backward",
)
"""Recipe keys, or sections, that move no number of the training itself."""

RESOLVED_KEYS = (
    "cluster",
    "length.padding_free",
    "memory",
    "model.attention",
    "model.dtype",
    "model.kernels",
    "model.liger",
    "train.batch_size",
    "train.batch_tokens",
    "train.deterministic",
    "train.epochs",
    "train.max_steps",
    "train.micro_batch_size",
    "train.micro_tokens",
)
"""Recipe keys that the plan resolves (`auto`, or a default): the settings are compared in their place."""

FREE_SETTINGS = tuple(name for name, mark in MARKS.items() if mark.resumed == "bits")
"""Settings that give the same numbers bit for bit."""

ROUNDING_SETTINGS = tuple(name for name, mark in MARKS.items() if mark.resumed == "sums")
"""Settings that only change the order of sums. Source: threads 1 -> 2 differ after two steps; measured on a
2-core CPU with torch 2.13, a tiny Llama, float32."""

RECIPE_SETTINGS = tuple(name for name, mark in MARKS.items() if mark.resumed == "recipe")
"""Settings that repeat a key of the recipe, under that key."""

STATE_KEYS = (
    *("method", "model", "optim.kind", "optim.master_weights"),
    *("optim.copies", "optim.compressed_moments"),
)
"""Keys, or sections, that decide the shapes of the saved state: never waived."""

SETTING_NAMES = {name: mark.resumed for name, mark in MARKS.items() if "." in mark.resumed}
"""Settings that must not differ, by the recipe key that says them. `max_steps` has a rule of its own."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that differs between a checkpoint and a plan."""

    key: str
    saved: JsonValue
    asked: JsonValue
    why: str = ""


def check_resumable(facts: CheckpointFacts, plan: Plan) -> list[str]:
    """Sentences for the user when `plan` continues the checkpoint; empty when every number stays the same.

    Raises: ResumeError with every key that differs and would make it another run.
    """
    other_run = list(_other_run(facts, plan))
    allowed = plan.recipe.save.allow_changed_keys
    waived = [one for one in other_run if is_below(one.key, allowed) and not is_below(one.key, STATE_KEYS)]
    refused = [one for one in other_run if one not in waived]
    if refused:
        raise ResumeError([_fault(one, facts.step) for one in refused])
    notes = [f"another run from here: {sentence(one)}" for one in waived]
    return notes + [
        f"not bit-identical from here, because sums are taken in another order: {sentence(one)}"
        for one in _rounding(facts, plan)
    ]


def _other_run(facts: CheckpointFacts, plan: Plan) -> Iterator[Difference]:
    asked_recipe = plan.recipe.model_dump(mode="json")
    saved_recipe = with_defaults(revealed(facts.recipe, plan.environment, with_digest=True))
    for one in differences(saved_recipe, asked_recipe):
        if not is_below(one.key, FREE_KEYS + RESOLVED_KEYS):
            yield one
    asked = plan.settings.model_dump(mode="json")
    for setting, key in SETTING_NAMES.items():
        if facts.settings.get(setting) != asked[setting]:
            yield Difference(key, facts.settings.get(setting), asked[setting])
    yield from _length_of_run(facts, plan)
    data = data_fingerprint(plan.data)
    if facts.data != data and not _same_rows(facts.data, data, Path(plan.data.train.folder)):
        yield Difference("data.train", facts.data, data, "the rows themselves have changed")


def _same_rows(saved: str, asked: str, store: Path) -> bool:
    """Whether two fingerprints of other names are of the same rows: stores that another version of memtrain
    named otherwise, with the same counts, and the same digests of all their files."""
    name, _, counts = saved.partition(": ")
    if counts != asked.partition(": ")[2] or Path(name).name != name:
        return False
    try:
        sums = [
            json.loads((folder / META_FILE).read_bytes())["sums"] for folder in (store.parent / name, store)
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return sums[0] == sums[1]


def with_defaults(saved: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """A recipe as it was saved, with the keys that are newer than it at their defaults."""
    try:
        return Recipe.model_validate_json(json.dumps(saved)).model_dump(mode="json")
    except ValidationError:
        return saved


def _length_of_run(facts: CheckpointFacts, plan: Plan) -> Iterator[Difference]:
    saved, asked = facts.settings.get("max_steps"), plan.settings.max_steps
    if saved == asked or not isinstance(saved, int):
        return
    optim = plan.recipe.optim
    if asked < facts.step:
        yield Difference("train.max_steps", saved, asked, f"the checkpoint is already at step {facts.step}")
    elif optim.schedule != "constant":
        why = f"the {optim.schedule} schedule of the steps already made was computed for {saved}"
        yield Difference("train.max_steps", saved, asked, why)
    elif optim.warmup_steps is None:
        ratio = 0.03 if optim.warmup_ratio is None else optim.warmup_ratio
        if facts.step < ratio * max(saved, asked) + 1:
            why = f"the warm-up, a fraction of all steps, is not over at step {facts.step}"
            yield Difference("train.max_steps", saved, asked, why)


def _rounding(facts: CheckpointFacts, plan: Plan) -> Iterator[Difference]:
    asked = plan.settings.model_dump(mode="json")
    for setting in ROUNDING_SETTINGS:
        # A checkpoint from before a setting was there is of a run that had its default.
        saved = facts.settings.get(setting, Settings.model_fields[setting].get_default())
        if saved != asked[setting]:
            yield Difference(setting, saved, asked[setting])
    yield from differences(dict(facts.versions), dict(plan.versions), "version of ")
    device = device_name(plan.settings.device)
    if facts.device != device:
        yield Difference("device", facts.device, device)


def differences(
    saved: Mapping[str, JsonValue], asked: Mapping[str, JsonValue], prefix: str = ""
) -> Iterator[Difference]:
    """Every leaf that differs, by dotted key; a section that one side lacks is one leaf."""
    for key in sorted({*saved, *asked}):
        before, after = saved.get(key), asked.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, f"{prefix}{key}.")
        elif before != after:
            yield Difference(prefix + key, before, after)


def is_below(key: str, keys: tuple[str, ...]) -> bool:
    """Whether a dotted key is one of `keys`, or in a section that is."""
    return any(key == one or key.startswith(one + ".") for one in keys)


def sentence(one: Difference) -> str:
    """The key with both values."""
    return f"{one.key} {_shown(one.saved)} -> {_shown(one.asked)}"


def _shown(value: JsonValue) -> str:
    return "null" if value is None else str(value)


def _fault(one: Difference, step: int) -> Fault:
    what = f"{one.key} was {_shown(one.saved)} up to step {step} and is now {_shown(one.asked)}"
    fix = "set it back, or start over: --no-resume, or another run_dir"
    if not is_below(one.key, STATE_KEYS):
        fix += f"; or continue as another run: save.allow_changed_keys=[{one.key}]"
    return Fault(
        f"{what}: {one.why}" if one.why else what,
        where=one.key,
        fix=fix,
    )
