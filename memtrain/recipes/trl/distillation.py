"""Keys of TRL's GKD that mean something together: the student's completions, the teacher, the loss tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from memtrain.recipes.trl.translation import Translation

_WRITTEN_BY = ("generate.temperature", "generate.max_tokens")


def distillation(made: Translation) -> None:
    """Keys of GKD that are not its own: of rows, of the teacher and of completions; after all other keys.

    TRL's `beta` is memtrain's: 0 is the forward KL, 1 the reverse KL, between them the generalized
    Jensen-Shannon divergence, whose mixture is beta teacher + (1 - beta) student.
    """
    if made.method != "distill":
        return
    _rows(made)
    _teacher(made)
    if made.recipe_keys.get("distill.on_policy_fraction", (0, ""))[0]:
        made.notes.append(
            "temperature applies to completions only, as in TRL's GKD: distill.temperature, of both "
            "distributions in the loss, is 1"
        )
        made.notes.append(
            "lmbda: TRL draws for each micro-batch whether the student writes its rows; here each optimizer "
            "step is drawn whole (distill.on_policy_fraction)"
        )
        return
    for key in _WRITTEN_BY:
        made.recipe_keys.pop(key, None)
    for key in ("temperature", "max_new_tokens"):
        if key in made.config and key not in made.assumed:
            made.lose(key, "lmbda is 0: the student writes nothing, and TRL's loss is at temperature 1")


def _rows(made: Translation) -> None:
    """Loss tokens are those of the last message, and a row keeps its end."""
    made.set("data.last_turn_only_loss", True, comment="TRL's GKD trains on the last message")
    made.set("length.truncation", "keep_end", comment="TRL's GKD keeps the end of a row")


def _teacher(made: Translation) -> None:
    """Precision and revision of the teacher, of the arguments that it is loaded with."""
    more = dict(cast(Mapping[str, Any], made.get("teacher_model_init_kwargs", {})))
    asked = [str(more.pop(key)) for key in ("dtype", "torch_dtype") if more.get(key) is not None]
    dtype = asked[0].removeprefix("torch.") if asked else "auto"
    if dtype in ("bfloat16", "float32"):
        made.set("distill.teacher_dtype", dtype)
    elif dtype != "auto":
        more["dtype"] = dtype
    if more.get("revision") is not None:
        made.set("distill.teacher_revision", more.pop("revision"))
    rest = [key for key, value in more.items() if value is not None]
    if rest:
        made.lose("teacher_model_init_kwargs", f"of the teacher's arguments: {', '.join(rest)}")
