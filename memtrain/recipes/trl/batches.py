"""The rows of a step from TRL's keys, which count a device's."""

from __future__ import annotations

from memtrain.recipes.trl.sampling import ONLINE
from memtrain.recipes.trl.translation import Translation


def batch(made: Translation) -> None:
    """Rows of a step: a device's rows x accumulation x devices; completions for GRPO and RLOO."""
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    rows, accumulation = made.get(keys[0]), made.get(keys[1])
    if not isinstance(rows, int) or not isinstance(accumulation, int):
        return
    comment = f"{rows} a device x {accumulation} accumulated x {made.processes} processes"
    step = rows * accumulation * made.processes
    if made.method not in ONLINE:
        made.set("train.batch_size", step, comment=comment)
        return
    made.set("train.batch_size", _whole_groups(made, step), comment=comment)
    rollout = made.config.get("generation_batch_size")
    held = made.config.get("steps_per_generation")
    if isinstance(held, int):
        rollout = rows * made.processes * held
    if isinstance(rollout, int) and rollout % step:
        made.lose(
            "steps_per_generation" if held else "generation_batch_size", "no whole number of optimizer steps"
        )
    elif isinstance(rollout, int) and rollout > step:
        made.set(f"{made.method}.steps_per_rollout", rollout // step)


def _whole_groups(made: Translation, step: int) -> int:
    """The completions of a step, up to the next whole number of groups."""
    group = made.get("num_generations")
    if not isinstance(group, int) or group < 1 or step % group == 0:
        return step
    whole = (step // group + 1) * group
    made.notes.append(
        f"train.batch_size: a step of {step} completions is no whole number of groups of {group}, and a step "
        f"of {whole} is taken"
    )
    return whole
