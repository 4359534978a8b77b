"""Settings and batches of the models beside a policy or a student: reward models and teachers."""

from __future__ import annotations

from memtrain.memory.plan.engine_kinds import shards_weights
from memtrain.memory.plan.heaviest_batch import HeaviestBatch
from memtrain.memory.plan.settings import Settings
from memtrain.memory.plan.sizes import READ_TOKENS


def reward_model_settings(
    settings: Settings, dtype: str, *, is_alike: bool, follows_lengths: bool = False
) -> Settings:
    """Settings of a reward model of some precision beside a policy: without an adapter; in FSDP2's shards
    where the policy's weights are in parts.

    `is_alike`: its architecture is the policy's. Rows of others are padded: nobody checked that they can lie
    end to end. `follows_lengths`: what it makes of a prompt depends on how long its answer is.
    """
    own = settings.dtype if dtype == "auto" else dtype
    plain = {"dtype": own, "adapter": None, "quantize": "none", "liger": False}
    plain |= {"kernels": "transformers"}
    in_parts = shards_weights(settings)
    plain |= {"engine": "fsdp2" if in_parts else "ddp", "loads_shards": in_parts}
    form = settings.row_form
    if not is_alike:
        plain["attention"] = "transformers"
        form = form._replace(padding_free=False, shared_prompts=False)
    if follows_lengths:
        by_row = not (is_alike and settings.padding_free)
        form = form._replace(shared_prompts=False, positions_by_row=by_row)
    return settings.model_copy(update=plain | form.updates())


def reward_model_batch(longest: int, max_length: int | None = None) -> HeaviestBatch:
    """The most that a reward model reads at once of answers of `longest` tokens with their prompts."""
    longest = min(longest, max_length or longest)
    count = max(1, READ_TOKENS // longest)
    return HeaviestBatch(count, count * longest, count, longest)


def teacher_settings(settings: Settings, dtype: str) -> Settings:
    """Settings of a teacher of some precision beside its student: rows lie as the student's do."""
    own = settings.dtype if dtype == "auto" else dtype
    plain = {"adapter": None, "quantize": "none", "liger": False, "kernels": "transformers"}
    return settings.model_copy(update=plain | {"dtype": own})
