"""Keys of TRL that are read together: batch, steps, schedule, precision, adapter, data, devices, rewards."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, cast, get_args

from memtrain.errors import RecipeError
from memtrain.recipes.peers.hints import renamed_value
from memtrain.recipes.sections.optim import OptimizerKind
from memtrain.recipes.trl.batches import batch
from memtrain.recipes.trl.sampling import ONLINE, sampling
from memtrain.recipes.trl.translation import Translation

_NO_DROPOUT = ("dpo", "kto", "reward", "distill")


def steps(made: Translation) -> None:
    """`max_steps` above 0 wins over the epochs; TRL makes three."""
    most = made.get("max_steps", -1)
    if isinstance(most, int) and most > 0:
        made.set("train.max_steps", most)
    else:
        made.set("train.epochs", made.get("num_train_epochs"), of=["num_train_epochs"])


def schedule(made: Translation) -> None:
    """The schedule and its warm-up; TRL's default is linear without any."""
    key = "lr_scheduler_type"
    kind = made.get(key)
    ours = renamed_value("optim.schedule", kind) or kind
    if ours in ("constant", "linear", "cosine", "wsd"):
        made.set("optim.schedule", ours, of=[key])
    else:
        made.lose(key, "the schedules are constant, linear, cosine and wsd")
    more = dict(cast(Mapping[str, Any], made.get("lr_scheduler_kwargs", {})))
    if "min_lr_rate" in more:
        made.set("optim.min_lr_ratio", more.pop("min_lr_rate"))
    elif "min_lr" in more and isinstance(made.config.get("learning_rate"), float):
        made.set("optim.min_lr_ratio", more.pop("min_lr") / made.config["learning_rate"])
    if more:
        made.lose("lr_scheduler_kwargs", f"of the schedule's arguments: {', '.join(more)}")
    ratio, warmup = made.config.get("warmup_ratio"), made.get("warmup_steps")
    if isinstance(warmup, float) and 0 < warmup < 1:
        ratio = warmup
    if ratio:
        made.set("optim.warmup_ratio", ratio)
    else:
        made.set("optim.warmup_steps", int(warmup), of=["warmup_steps"])


def optimizer(made: Translation) -> None:
    """Kind and betas."""
    kind = str(made.get("optim"))
    name = kind if kind in get_args(OptimizerKind) else renamed_value("optim.kind", kind)
    if name is None:
        made.lose("optim", "the optimizers are adamw, adamw_8bit, paged_adamw, adafactor, muon and sgd")
    elif name != "adamw":
        made.set("optim.kind", name)
    if "adam_beta1" in made.config or "adam_beta2" in made.config:
        made.set("optim.betas", [made.get("adam_beta1"), made.get("adam_beta2")])
    if "label_smoothing_factor" in made.config:
        if made.method == "sft":
            made.set("sft.label_smoothing", made.config["label_smoothing_factor"])
        elif made.config["label_smoothing_factor"]:
            made.lose("label_smoothing_factor", f"not used by {made.method}")


def precision(made: Translation) -> None:
    """TRL holds float32 weights and computes under autocast to bfloat16 by default."""
    more = cast(Mapping[str, Any], made.get("model_init_kwargs", {}))
    asked = [key for key in ("dtype", "torch_dtype") if key in made.config]
    dtype = str(more.get("dtype", made.config[asked[0]] if asked else "float32")).removeprefix("torch.")
    of = ["dtype", "torch_dtype", "model_init_kwargs", "bf16", "fp16"]
    in_float16 = made.config.get("fp16") is True
    if dtype in ("bfloat16", "float16"):
        made.set("model.dtype", dtype)
    elif dtype == "auto":
        made.notes.append(
            "dtype: auto takes the checkpoint's precision; model.dtype: auto takes the device's"
        )
    elif made.config.get("bf16") is False or made.config.get("use_cpu") is True:
        made.set("model.dtype", "float32", of=of)
    elif in_float16:
        made.set("model.dtype", "float16", of=of)
    elif not _quantized(made):
        made.set("model.dtype", "bfloat16", of=of)
        if not _adapted(made):
            made.set("optim.master_weights", True, of=of)
            made.notes.append(
                "TRL holds float32 weights and computes under autocast; the nearest here are bfloat16 "
                "weights with float32 copies in the optimizer (optim.master_weights), which update alike"
            )
        else:
            made.notes.append(
                "TRL holds frozen weights in float32 and multiplies with them in bfloat16; here they are "
                "bfloat16, half the bytes"
            )
    rest = [key for key in more if key not in ("dtype", "attn_implementation", "revision")]
    if "attn_implementation" in more and "attn_implementation" not in made.config:
        made.notes.append(
            "model_init_kwargs.attn_implementation: model.attention: auto takes the fastest that is exact"
        )
    if "revision" in more:
        made.set("model.revision", more["revision"])
    if rest:
        made.lose("model_init_kwargs", f"of the model's arguments: {', '.join(rest)}")


def _quantized(made: Translation) -> bool:
    return bool(made.config.get("load_in_4bit") or made.config.get("load_in_8bit"))


def _adapted(made: Translation) -> bool:
    return bool(made.config.get("use_peft"))


def adapter(made: Translation) -> None:
    """LoRA with TRL's defaults: rank 16, alpha 32, dropout 0.05, and PEFT's own choice of modules."""
    if made.config.get("load_in_4bit"):
        made.set("model.quantize", "4bit")
    elif made.config.get("load_in_8bit"):
        made.set("model.quantize", "8bit")
    names = ("r", "alpha", "dropout", "target_modules", "target_parameters", "modules_to_save")
    if not _adapted(made):
        for key in [f"lora_{name}" for name in names] + ["use_rslora", "use_dora"]:
            if key in made.config:
                made.lose(key, "use_peft is not true: TRL trains every weight and reads it nowhere")
        return
    made.set("model.adapter.r", made.get("lora_r"), of=["lora_r"])
    made.set("model.adapter.alpha", made.get("lora_alpha"), of=["lora_alpha"])
    dropout = made.get("lora_dropout")
    if made.method in _NO_DROPOUT and made.get("disable_dropout", True):
        made.set("model.adapter.dropout", 0.0, comment="TRL's disable_dropout")
    else:
        made.set("model.adapter.dropout", dropout, of=["lora_dropout"])
    _targets(made)
    saved = _without_head(made, "lora_modules_to_save", made.config.get("lora_modules_to_save"))
    if saved:
        made.set("model.adapter.modules_to_save", saved)
    if made.config.get("use_rslora"):
        made.set("model.adapter.rslora", True)
    if made.config.get("use_dora"):
        made.set("model.adapter.kind", "dora")


def _targets(made: Translation) -> None:
    """Modules that get an adapter, and stacked experts beside them."""
    modules, stacks = made.config.get("lora_target_modules"), made.config.get("lora_target_parameters")
    if stacks and modules in ("all-linear", ["all-linear"]):
        made.lose(
            "lora_target_parameters",
            "all-linear stands for all experts here; to adapt these alone, name model.adapter.target_modules "
            "([q_proj, k_proj, v_proj, o_proj]) and write them to model.adapter.target_parameters",
        )
    elif stacks:
        made.set("model.adapter.target_parameters", stacks)
    if modules is None and stacks:
        made.set("model.adapter.target_modules", ["q_proj", "v_proj"], comment="PEFT's choice, often")
    elif modules is None:
        made.notes.append(
            "lora_target_modules is not given: PEFT takes a few modules by architecture (q_proj and v_proj, "
            "often); here it is every linear layer. To train the same, name them in "
            "model.adapter.target_modules"
        )
    else:
        if isinstance(modules, list):
            modules = [str(name).strip(" ,") for name in cast(list[object], modules)]
        made.set("model.adapter.target_modules", _without_head(made, "lora_target_modules", modules))


def _without_head(made: Translation, key: str, names: object) -> object:
    """The modules without the LM head, which is not trained on quantized weights."""
    if not _quantized(made) or not isinstance(names, list) or "lm_head" not in names:
        return names  # pyright: ignore[reportUnknownVariableType]
    made.lose(key, "the LM head is not trained on quantized weights: lm_head is left out")
    return [name for name in cast(list[object], names) if name != "lm_head"]


def data(made: Translation) -> None:
    """The dataset with its splits, or a mixture."""
    mixture = made.config.get("datasets")
    if isinstance(made.config.get("dataset_mixture"), Mapping):
        _mixture(made, cast(Mapping[str, Any], made.config["dataset_mixture"]))
        return
    if mixture:
        sources = [_source(made, cast(Mapping[str, Any], one)) for one in cast(list[object], mixture)]
        if any("weight" in one for one in sources):
            sources = [{"weight": 1.0, **one} for one in sources]
        made.set("data.train", sources)
        return
    name = made.config.get("dataset_name")
    if name is None:
        return
    source: dict[str, object] = {"source": name}
    if made.config.get("dataset_config"):
        source["name"] = made.config["dataset_config"]
    evaluated = made.get(
        "eval_strategy", made.get("evaluation_strategy", "no")
    ) != "no" and not made.config.get("test_split_size")
    held = {**source, "split": made.get("dataset_test_split")}
    split = made.get("dataset_train_split")
    train = source if split == "train" else {**source, "split": split}
    made.set("data.train", name if train == {"source": name} else [train])
    if evaluated:
        made.set("data.eval", [held], of=["dataset_test_split"])


def _mixture(made: Translation, mixture: Mapping[str, Any]) -> None:
    """The mixture of the alignment handbook and open-r1: a share of each dataset's rows, and held-out ones.

    Source: alignment-handbook, src/alignment/data.py (`get_dataset`).
    """
    key, sources = "dataset_mixture", list[dict[str, object]]()
    parts, lost = cast(list[Mapping[str, Any]], mixture.get("datasets", [])), list[str]()
    for one in parts:
        source: dict[str, object] = {"source": one.get("id")}
        for ours, theirs in (("name", "config"), ("split", "split")):
            if one.get(theirs) not in (None, "default", "train"):
                source[ours] = one[theirs]
        sources.append(source)
        if one.get("weight") not in (None, 1):
            lost.append(f"{one['weight']} of the rows of {one.get('id')} (`limit` takes a number of them)")
    if any(one.get("columns") for one in parts):
        made.notes.append(f"{key}: it keeps some columns; data.format and data.columns choose here")
    made.set("data.train", sources)
    held = mixture.get("test_split_size")
    if isinstance(held, float) and 0 < held < 1:
        made.set("data.eval_fraction", held)
    elif held:
        lost.append(f"{held} rows are held out (`data.eval_fraction` is a share of them)")
    if lost:
        made.lose(key, "; ".join(lost))


def _source(made: Translation, one: Mapping[str, Any]) -> dict[str, object]:
    files = one.get("data_files")
    source: dict[str, object] = {"source": files if isinstance(files, str) else one.get("path")}
    for ours in ("name", "split"):
        if one.get(ours) and not (ours == "split" and one[ours] == "train"):
            source[ours] = one[ours]
    if one.get("fraction") is not None:
        source["weight"] = one["fraction"]
        made.notes.append(
            "datasets: a `fraction` was written as a `weight`: a share of the mixture, in place of a share "
            "of the source"
        )
    odd = [key for key in ("data_dir", "columns") if one.get(key)]
    if files is not None and not isinstance(files, str):
        odd.append("data_files")
    if odd:
        made.lose(
            "datasets", f"{', '.join(odd)} of {one.get('path')}: name files, and columns by data.columns"
        )
    return source


def lengths(made: Translation) -> None:
    """Packing, and the order of the rows."""
    if made.config.get("packing") and made.method == "distill":
        made.lose("packing", "TRL's GKD packs no rows")
    elif made.config.get("packing"):
        asked = made.get("packing_strategy")
        packing = renamed_value("length.packing", asked) or asked
        made.set("length.packing", packing)
        if packing == "wrapped":
            made.set("length.cross_document_attention", True, comment="TRL's wrapped rows see each other")
    if made.method in ONLINE:
        made.set("length.max_length", None, comment="TRL cuts no prompt")
    if made.config.get("max_prompt_length") is not None:
        made.set("length.max_prompt", made.config["max_prompt_length"])
    order = made.get("train_sampling_strategy", "sequential" if made.method == "kto" else "random")
    if order == "group_by_length":
        made.set("length.group_by_length", True)
    elif order == "sequential" and made.method != "kto":
        made.set("train.shuffle", False)
    elif order == "sequential":
        made.notes.append(
            "TRL's KTO takes rows in order, for its KL term; here the term is right in any order"
        )


def evaluation(made: Translation) -> None:
    """Interval of evaluations; TRL takes the steps of the logs where none are given."""
    if made.get("eval_strategy", made.get("evaluation_strategy", "no")) == "steps":
        made.set("eval.every_steps", made.get("eval_steps", made.get("logging_steps", 10)), of=["eval_steps"])


def saving(made: Translation) -> None:
    """Every 500 steps, and all of them, where nothing is written."""
    strategy = made.get("save_strategy")
    if strategy == "steps":
        every = made.get("save_steps")
        if isinstance(every, float) and every < 1:
            made.lose("save_steps", "a share of all steps; write their number to save.every_steps")
        else:
            made.set("save.every_steps", int(every), of=["save_steps"])
    elif strategy == "best":
        made.set("save.keep_best", True)
    elif strategy == "no":
        made.lose("save_strategy", "a run always saves at its end, so that it can continue")
    if "save_total_limit" in made.config and made.config["save_total_limit"] is not None:
        made.set("save.keep", made.config["save_total_limit"])
    else:
        made.notes.append("TRL keeps every checkpoint; memtrain the last two (save.keep)")


def _listed(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else [value]


def logging_keys(made: Translation) -> None:
    """Trackers."""
    asked = made.get("report_to", "none")
    names = [str(one) for one in _listed(asked)]
    ours = [name for name in names if name in ("tensorboard", "wandb", "mlflow", "trackio")]
    if ours:
        made.set("log.trackers", ours)
    if any(name not in ours and name != "none" for name in names):
        made.lose("report_to", "the trackers are tensorboard, wandb, mlflow and trackio")


def devices(made: Translation) -> None:
    """CPU, and the engine of accelerate's configurations, by TRL's names of them or the file's."""
    if made.config.get("use_cpu"):
        made.set("cluster.device", "cpu")
    asked = made.config.get("accelerate_config")
    if asked in (None, "single_gpu", "multi_gpu"):
        return
    name = PurePath(str(asked)).stem.lower()
    found = re.search(r"zero[_-]?(?:stage)?[_-]?([123])|(fsdp)", name)
    if found is None:
        if not re.search(r"single_gpu|multi_gpu|ddp", name):
            made.lose(
                "accelerate_config",
                "a file of accelerate's; `cluster.engine` and `cluster.processes` say the same",
            )
        return
    engine = "fsdp2" if found[2] else f"zero{found[1]}"
    made.set("cluster.engine", engine)
    if "offload" in name:
        made.set("cluster.cpu_offload", "optimizer" if engine in ("zero1", "zero2") else "parameters")
    if str(asked) != name:
        made.notes.append(f"accelerate_config: {asked} is not here; its name tells {engine}")


def losses(made: Translation) -> None:
    """The loss, by method."""
    if made.method == "grpo" and made.get("beta", 0.0) and made.get("use_bias_correction_kl"):
        made.set("grpo.unbiased_kl", True, of=["use_bias_correction_kl"])
    if made.trainer in ("orpo", "cpo"):
        _pairs(made)
        return
    kind = made.config.get("loss_type")
    if made.method == "dpo" and made.config.get("rpo_alpha"):
        kinds = _listed(kind or "sigmoid")
        weights = made.config.get("loss_weights") or [1.0] * len(kinds)
        _parts(made, dict(zip(map(str, kinds), weights, strict=False)), made.config["rpo_alpha"])
        return
    if kind is None:
        return
    if made.method == "reward":
        made.lose("loss_type", "reward has no use for it")
    elif made.method == "rloo":
        made.lose("loss_type", "rloo has no use for it")
    elif made.method == "distill":
        if kind not in ("nll", "chunked_nll"):
            made.lose("loss_type", "the loss of distillation is a divergence (`distill.beta`)")
    else:
        made.set(f"{made.method}.loss", "nll" if kind == "chunked_nll" else kind)


_OF_CPO = {"sigmoid": "cpo", "simpo": "simpo"}
"""Losses of TRL's CPO without a reference, which its hinge and IPO have not here."""


def _pairs(made: Translation) -> None:
    """ORPO and CPO: the likelihood of the chosen answers, and the loss of the pairs with its weight.

    Source: TRL 1.16, experimental/orpo/orpo_trainer.py and experimental/cpo/cpo_trainer.py
    (`get_batch_loss_metrics`).

    Raises: RecipeError for a loss of CPO that has no counterpart.
    """
    if made.trainer == "orpo":
        made.used.add("beta")
        _parts(made, {"orpo": made.get("beta", 0.1)}, 1.0)
        made.notes.append(
            "ORPO's likelihood is of prompts and answers there, and of the chosen answers' tokens here"
        )
        return
    kind = str(made.get("loss_type", "sigmoid"))
    if kind not in _OF_CPO:
        raise RecipeError(
            f"loss_type: {kind} of TRL's CPO has no counterpart in memtrain",
            "loss_type",
            f"give one of {', '.join(_OF_CPO)}",
        )
    if made.config.get("alpha"):
        made.lose("alpha", "AlphaPO's form of the rewards")
    made.used.add("alpha")
    made.set("dpo.beta", made.get("beta", 0.1), of=["beta"])
    if kind == "simpo":
        made.set("dpo.simpo_gamma", made.get("simpo_gamma", 0.5), of=["simpo_gamma"])
    _parts(made, {_OF_CPO[kind]: 1.0}, made.get("cpo_alpha", 1.0))


def _parts(made: Translation, parts: Mapping[str, float], likelihood: float) -> None:
    """A sum of losses of pairs, with a part of the likelihood of chosen answers."""
    made.used |= {"loss_type", "loss_weights"}
    summed = {"sft": likelihood, **parts} if likelihood else dict(parts)
    made.set("dpo.loss", [*summed])
    if list(summed.values()) != [1.0]:
        made.set("dpo.loss_weights", [*summed.values()])


def dropout(made: Translation) -> None:
    """TRL switches the model's dropout off for pairs."""
    if made.get("disable_dropout", made.method in _NO_DROPOUT):
        made.notes.append("disable_dropout: models whose configuration has dropout (few have) keep it here")


def rewards(made: Translation) -> None:
    """Reward functions and models; TRL's own functions have near relatives only."""
    if made.method not in ONLINE:
        for key in ("reward_funcs", "reward_model_name_or_path", "reward_weights"):
            if key in made.config:
                made.lose(key, f"not used by {made.method}")
        return
    asked: list[dict[str, object]] = []
    own: list[str] = []
    model = made.config.get("reward_model_name_or_path")
    if model:
        asked.append({"model": {"path": model}})
    for name in map(str, _listed(made.get("reward_funcs", []))):
        near = {"accuracy_reward": "exact_answer", "think_format_reward": "format"}
        if name in near:
            asked.append({"function": near[name]})
            made.lose("reward_funcs", f"{name} is TRL's own: {near[name]} is similar, not the same")
        elif "." in name:
            module, _, function = name.rpartition(".")
            asked.append({"function": f"{module}:{function}"})
        else:
            own.append(name)
    if own:
        made.lose("reward_funcs", f"functions of the tool's own: write them as `my_rewards.py:{own[0]}`")
    weights = made.get("reward_weights", [])
    for one, weight in zip(asked, weights, strict=False):
        one["weight"] = weight
    if asked:
        made.set("rewards.functions", asked)


ALL: tuple[Callable[[Translation], None], ...] = (
    precision,
    adapter,
    data,
    lengths,
    batch,
    steps,
    schedule,
    optimizer,
    evaluation,
    saving,
    logging_keys,
    devices,
    losses,
    dropout,
    rewards,
    sampling,
)
"""Every group."""
