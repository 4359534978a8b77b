"""Keys of an imported recipe that do not go together: which is left out, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from memtrain.recipes.sections.methods.grpo_rloo import KNOBS_OF
from memtrain.recipes.sections.methods.pair_losses import PAIR_LOSSES
from memtrain.recipes.trl.translation import Lost, Translation

_ANSWERS = ("dpo", "kto", "reward")
_ONLINE = ("grpo", "rloo", "ppo")
_CUTS_TOKENS = ("generate.top_k", "generate.top_p", "generate.min_p")


@dataclass(frozen=True, slots=True)
class Clash:
    """Key that is left out where another is given."""

    key: str
    clashes: Callable[[Translation], bool]
    why: str


def _has(made: Translation, key: str) -> bool:
    return made.recipe_keys.get(key, (None, ""))[0] not in (None, False, 0, "none", [])


def _holds_out(made: Translation) -> bool:
    return _has(made, "data.eval") or _has(made, "data.eval_fraction")


def _cuts_tokens(made: Translation) -> bool:
    return any(_has(made, key) and made.recipe_keys[key][0] not in (1, 1.0, 0.0) for key in _CUTS_TOKENS)


CLASHES: tuple[Clash, ...] = (
    Clash(
        "length.group_by_length",
        lambda made: (
            _has(made, "length.packing") or made.method in _ONLINE or _has(made, "length.padding_free")
        ),
        "it saves padding, and these rows have none",
    ),
    Clash(
        "length.packing",
        lambda made: made.method in (*_ANSWERS, *_ONLINE),
        "rows with answers lie end to end anyway",
    ),
    Clash("eval.every_steps", lambda made: not _holds_out(made), "no rows are held out"),
    Clash("eval.per_epoch", lambda made: not _holds_out(made), "no rows are held out"),
    Clash("eval.early_stopping.patience", lambda made: not _holds_out(made), "no rows are held out"),
    Clash("eval.at_start", lambda made: not _holds_out(made), "no rows are held out"),
    Clash("save.keep_best", lambda made: not _holds_out(made), "no rows are held out to compare losses on"),
    Clash("data.eval_fraction", lambda made: _has(made, "data.eval"), "held-out rows are set twice"),
    Clash("length.max_prompt", lambda made: made.method == "sft", "rows are trained on whole"),
    Clash("dpo.simpo_gamma", lambda made: not _loss_reads(made, "simpo_gamma"), "the loss does not read it"),
    Clash("dpo.beta", lambda made: not _loss_reads(made, "beta"), "the loss does not read it"),
    Clash(
        "dpo.label_smoothing",
        lambda made: not _loss_reads(made, "label_smoothing"),
        "the loss does not read it",
    ),
    Clash(
        "memory.optimizer_offload",
        lambda made: _has(made, "cluster.engine"),
        "the engine says where states are",
    ),
    Clash(
        "model.dtype",
        lambda made: (
            made.recipe_keys.get("model.dtype", ("", ""))[0] == "float16" and _has(made, "cluster.engine")
        ),
        "over shards the loss is not scaled, which float16 needs: card and engine choose the precision",
    ),
    Clash(
        "grpo.unbiased_kl",
        lambda made: made.method != "grpo" or not _has(made, "grpo.beta"),
        "there is no KL term",
    ),
)
"""Keys to leave out, in the order in which they are looked for."""


def _loss_reads(made: Translation, knob: str) -> bool:
    if made.method != "dpo":
        return True
    losses = made.recipe_keys.get("dpo.loss", ("sigmoid", ""))[0]
    names = cast(list[object], losses) if isinstance(losses, list) else [losses]
    return any(knob in loss.reads for name, loss in PAIR_LOSSES.items() if name in names)


_OF_THE_ADAPTER = ("r", "alpha", "kind", "rslora", "target_modules", "target_parameters", "modules_to_save")
"""Keys that a trained adapter's own file says."""


def make_consistent(made: Translation) -> None:
    """Leave out conflicting keys, and list written keys among them as lost."""
    if _has(made, "model.adapter.path"):
        for name in _OF_THE_ADAPTER:
            made.recipe_keys.pop(f"model.adapter.{name}", None)
    for clash in CLASHES:
        if clash.key in made.recipe_keys and clash.clashes(made):
            value, comment = made.recipe_keys.pop(clash.key)
            if value not in (None, False, "none") and not comment.endswith("default"):
                made.lost.append(Lost(clash.key, value, clash.why))
    _engine(made)
    _sampling(made)
    _policy_knobs(made)
    _correction(made)
    _references(made)
    if (
        "generate.vllm.eager" in made.recipe_keys
        and made.recipe_keys.get("generate.backend", ("", ""))[0] != "vllm"
    ):
        made.recipe_keys.pop("generate.vllm.eager")
    if "data.train" not in made.recipe_keys:
        made.notes.append("no rows are named: write them into data.train")


def _engine(made: Translation) -> None:
    """The engine that memtrain has for such a run: what DeepSpeed's would round, and vLLM beside shards."""
    engine, comment = made.recipe_keys.get("cluster.engine", ("", ""))
    adapts = any(key.startswith("model.adapter.") for key in made.recipe_keys)
    if str(engine).startswith("zero") and (adapts or made.method in ("reward", "ppo")):
        made.recipe_keys["cluster.engine"] = ("fsdp2", comment)
        if made.recipe_keys.get("cluster.cpu_offload", ("none", ""))[0] == "optimizer":
            made.recipe_keys["cluster.cpu_offload"] = ("parameters", comment)
        made.notes.append(
            f"cluster.engine: {engine} would round an adapter or a head to bfloat16; fsdp2 divides the same"
        )
    elif engine == "zero1":
        made.recipe_keys["cluster.engine"] = ("zero2", comment)
        made.notes.append("cluster.engine: zero2, which adds gradients in float32, in place of zero1")
    if str(engine).startswith("zero") and made.recipe_keys.get("optim.master_weights", ("", ""))[0] is False:
        del made.recipe_keys["optim.master_weights"]
    if engine == "zero3" and _has(made, "generate.backend"):
        for key in [*made.recipe_keys]:
            if key.startswith(("generate.backend", "generate.vllm.")):
                del made.recipe_keys[key]
        made.notes.append(
            "generate.backend: vLLM needs whole weights, and the engine divides them: memtrain's own sampler "
            "writes the completions"
        )


def _sampling(made: Translation) -> None:
    """Keys of sampling of a run that writes nothing: other tools keep them for their inference."""
    if made.method in (*_ONLINE, "distill"):
        return
    for key in [one for one in made.recipe_keys if one.startswith("generate.")]:
        value, comment = made.recipe_keys.pop(key)
        if value is not None and not comment.endswith("default"):
            made.lost.append(Lost(key, value, f"{made.method} writes no completions"))


EPSILON = 0.2
"""TRL's default of `epsilon`, which is `epsilon_high` too where that is not set."""


def _policy_knobs(made: Translation) -> None:
    """Knobs that the loss does not read; `epsilon_high` of CISPO is its highest weight."""
    if made.method != "grpo":
        return
    loss = str(made.recipe_keys.get("grpo.loss", ("dapo", ""))[0])
    if loss == "cispo":
        highest = made.recipe_keys.pop("grpo.clip_high", None)
        if highest is None or highest[0] is None:
            epsilon = made.recipe_keys.get("grpo.clip_low", (EPSILON, ""))[0]
            highest = (epsilon, "epsilon, where epsilon_high is not set; 5.0 is usual for this loss")
        made.recipe_keys.setdefault("grpo.cispo_max_weight", highest)
    for knob, losses in KNOBS_OF.items():
        key = f"grpo.{knob}"
        if key in made.recipe_keys and loss not in losses:
            value, _ = made.recipe_keys.pop(key)
            if value is not None:
                made.lost.append(Lost(key, value, f"the loss {loss} does not read it"))


def _correction(made: Translation) -> None:
    """Probabilities of a sampler with fewer tokens to choose from differ from the trainer's."""
    key = f"{made.method}.importance_correction"
    asked = made.recipe_keys.get(key, (None, ""))[0]
    if asked in (None, "none") or not _cuts_tokens(made):
        return
    for name in (key, f"{key}_min", f"{key}_max"):
        made.recipe_keys.pop(name, None)
    made.recipe_keys[key] = ("none", "top_k, top_p or min_p leave the sampler fewer tokens")
    made.notes.append(
        "the sampler's probabilities are not corrected for: top_k, top_p or min_p leave it fewer tokens than "
        "the trainer has, and the ratios would be wrong"
    )


def _references(made: Translation) -> None:
    """A reference is dropped where beta is 0 and no reference is used."""
    key = f"{made.method}.reference"
    if made.method in _ONLINE and _has(made, key) and not _has(made, f"{made.method}.beta"):
        value, _ = made.recipe_keys.pop(key)
        made.lost.append(Lost(key, value, "beta is 0: no reference is asked"))
