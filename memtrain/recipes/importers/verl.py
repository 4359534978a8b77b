"""verl: PPO, GRPO and RLOO of its PPO trainer, and its SFT trainers, on FSDP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.tool import Tool, ToolReading, no_counterpart
from memtrain.recipes.peers.table import table
from memtrain.recipes.reading.load import read_mapping
from memtrain.recipes.reading.yaml_tree import plain

_AR = "actor_rollout_ref"
METHODS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus_baseline": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
"""`algorithm.adv_estimator` and the method."""

_AGGREGATION = {
    "token-mean": "dapo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""Estimators of the KL term; with a `+` their gradient is that of k2."""

NEWER_DEFAULTS: Mapping[str, object] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
}
"""Of verl.trainer.sft_trainer, where they are not those of fsdp_sft_trainer. Source: optim/fsdp.yaml."""


def read(reading: ToolReading) -> None:
    """The method, batches, precision, engine, rows, sampler and reward.

    Raises: RecipeError for an estimator that has no counterpart, and for a number that is none.
    """
    is_online = any(key.startswith((f"{_AR}.", "algorithm.")) for key in reading.config)
    name = str(reading.get("config_name", "")).removesuffix(".yaml")
    if "megatron" in name or any(".megatron." in key for key in reading.config):
        reading.notes.append("Megatron's engine divides tensors and layers; here FSDP2 divides the weights")
    if name and name not in OWN_FILES and not file_of(reading.config):
        reading.lose("config_name", "the file is not here: what it sets is not read; run this where it is")
    _devices(reading, is_online=is_online)
    if is_online:
        _online(reading)
    else:
        reading.method = "sft"
        _sft(reading)
    _model(reading, is_online=is_online)
    _rows(reading)
    _run(reading)


def _whole(reading: ToolReading, key: str, default: int, least: int = 1) -> int:
    """A whole number of at least `least`.

    Raises: RecipeError where it is none.
    """
    value = reading.get(key, default)
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise RecipeError(
            f"{key}: {value} is not a whole number of {least} or more", key, "write the number in its place"
        )
    return number


def _default(reading: ToolReading, key: str, value: object) -> None:
    """Set a key of TRL that nobody wrote."""
    if key not in reading.trl:
        reading.trl[key] = value
        reading.assumed.add(key)


def _devices(reading: ToolReading, *, is_online: bool) -> None:
    number = _whole(reading, "trainer.n_gpus_per_node", 8 if is_online else 1)
    nodes = _whole(reading, "trainer.nnodes", 1)
    if reading.processes == 1:
        reading.processes = number * nodes
    if is_online or reading.processes > 1:
        written = "trainer.n_gpus_per_node" in reading.config or "trainer.nnodes" in reading.config
        comment = "n_gpus_per_node x nnodes" if written or not is_online else "verl's default"
        reading.set_recipe("cluster.processes", reading.processes, comment)
    trained = "engine" if any(map(_of_engine, reading.config)) else "model.fsdp_config"
    actor = f"{_AR}.actor.fsdp_config" if is_online else trained
    if reading.processes > 1:
        reading.set_recipe("cluster.engine", "fsdp2", "verl's FSDP")
    away = any(
        reading.on(f"{actor}.{name}")
        for name in ("param_offload", "offload_policy", "cpu_offload", "offload_params")
    )
    if away and reading.processes > 1:
        reading.set_recipe("cluster.cpu_offload", "parameters")
    elif away or reading.on(f"{actor}.optimizer_offload"):
        reading.set_recipe("memory.optimizer_offload", "on")
        if reading.processes > 1:
            reading.direct.pop("memory.optimizer_offload")
            reading.set_recipe("cluster.cpu_offload", "parameters", "verl waits with the optimizer alone")
    size = "ulysses_sequence_parallel_size"
    widths = (reading.get(key, 1) for key in (f"{_AR}.actor.{size}", f"{actor}.{size}", size))
    width = max(one for one in widths if isinstance(one, int))
    if width > reading.processes:
        reading.notes.append(f"{size}: {width} devices share a row; `--processes` says how many there are")
    elif width > 1:
        reading.set_recipe("cluster.context_parallel", width)
        reading.set_recipe("cluster.context_parallel_mode", "ulysses")


def _of_engine(key: str) -> bool:
    """Whether a key is of the engine of the newer trainer of fine-tuning."""
    return key == "engine" or key.startswith("engine.")


def _online(reading: ToolReading) -> None:
    asked = str(reading.get("algorithm.adv_estimator", "gae"))
    if asked not in METHODS:
        raise no_counterpart("algorithm.adv_estimator", asked, METHODS)
    reading.method = METHODS[asked]
    if asked == "reinforce_plus_plus_baseline":
        reading.set_trl("scale_rewards", "batch", "algorithm.adv_estimator")
    _batches(reading)
    prompt = _whole(reading, "data.max_prompt_length", 512)
    written = _whole(reading, "data.max_response_length", 512)
    comment = "max_prompt_length + max_response_length"
    reading.set_recipe("length.max_length", prompt + written, comment)
    if reading.on("data.filter_overlong_prompts"):
        reading.set_trl("truncation_mode", "drop", "data.filter_overlong_prompts")
    if reading.get(f"{_AR}.rollout.name", "vllm") == "vllm":
        reading.set_trl("use_vllm", True, f"{_AR}.rollout.name")
        eager = f"{_AR}.rollout.enforce_eager"
        if not reading.on(eager):
            reading.set_recipe(
                "generate.vllm.eager", False, "" if eager in reading.config else "verl's default"
            )
        if reading.get(f"{_AR}.rollout.free_cache_engine", True):
            reading.set_trl("vllm_enable_sleep_mode", True)
    elif reading.get(f"{_AR}.rollout.name") != "hf":
        reading.lose(f"{_AR}.rollout.name", "the samplers are native, transformers and vLLM")
    _correction(reading)
    _reference(reading)
    _loss(reading)
    if reading.method == "ppo":
        _critic(reading)
    _rewards(reading)


def _batches(reading: ToolReading) -> None:
    """Steps of `ppo_mini_batch_size` prompts, each with its group; a rollout is `train_batch_size` prompts.

    verl counts its steps in rollouts, memtrain in updates of the optimizer.
    """
    group = _whole(reading, f"{_AR}.rollout.n", 1)
    prompts = _whole(reading, "data.train_batch_size", 1024)
    mini = min(prompts, _whole(reading, f"{_AR}.actor.ppo_mini_batch_size", 256))
    epochs = _whole(reading, f"{_AR}.actor.ppo_epochs", 1)
    step = mini * group
    reading.set_recipe("train.batch_size", step, f"{mini} prompts x {group} completions")
    updates = -(-prompts // mini)
    if updates > 1:
        reading.set_recipe(f"{reading.method}.steps_per_rollout", updates)
    if reading.method == "ppo":
        reading.set_recipe("ppo.updates_per_rollout", epochs)
    # A device's rows are what the run was, and the plan's to choose.
    reading.set_trl("per_device_train_batch_size", group)
    micro_batch = reading.get(f"{_AR}.actor.ppo_micro_batch_size_per_gpu")
    whole = reading.get(f"{_AR}.actor.ppo_micro_batch_size")
    if micro_batch is None and isinstance(whole, int):
        micro_batch = max(1, whole // reading.processes)
    rows = min(micro_batch, step) if isinstance(micro_batch, int) and micro_batch > 0 else 1
    reading.computed["train.micro_batch_size"] = rows
    if reading.on(f"{_AR}.actor.use_dynamic_bsz"):
        tokens = _whole(reading, f"{_AR}.actor.ppo_max_token_len_per_gpu", 16384)
        reading.computed |= {"train.micro_tokens": tokens, "length.padding_free": True}
    for key in ("max_steps", "warmup_steps"):
        if isinstance(reading.trl.get(key), int) and reading.trl[key] > 0:
            reading.trl[key] *= updates * epochs


def _correction(reading: ToolReading) -> None:
    if reading.get("algorithm.rollout_correction.rollout_is"):
        reading.set_trl(
            "vllm_importance_sampling_correction", True, "algorithm.rollout_correction.rollout_is"
        )
        threshold = reading.get("algorithm.rollout_correction.rollout_is_threshold", 2.0)
        reading.set_trl("vllm_importance_sampling_clip_max", threshold)


def _reference(reading: ToolReading) -> None:
    """The KL term: in the reward of RLOO and PPO, in the loss of GRPO."""
    method = reading.method
    in_reward, in_loss = reading.on("algorithm.use_kl_in_reward"), reading.on(f"{_AR}.actor.use_kl_loss")
    asked, other = (in_loss, in_reward) if method == "grpo" else (in_reward, in_loss)
    key = f"{_AR}.actor.kl_loss_coef" if method == "grpo" else "algorithm.kl_ctrl.kl_coef"
    reading.set_trl("beta", reading.get(key, 0.001) if asked else 0.0, key)
    if other and method == "grpo":
        reading.lose("algorithm.use_kl_in_reward", "the KL term of grpo is in the loss (`grpo.beta`)")
    elif other:
        reading.lose(
            f"{_AR}.actor.use_kl_loss", f"the KL term of {method} is in the reward (`{method}.beta`)"
        )
    if method == "ppo" and asked and reading.get("algorithm.kl_ctrl.type") == "adaptive":
        reading.set_recipe("ppo.kl_target", reading.get("algorithm.kl_ctrl.target_kl", 0.1))
        reading.set_recipe("ppo.kl_horizon", reading.get("algorithm.kl_ctrl.horizon", 10_000))
    if method != "grpo" or not asked:
        return
    kind = str(reading.get(f"{_AR}.actor.kl_loss_type", "low_var_kl"))
    ours = "k2" if kind.endswith("+") else _ESTIMATORS.get(kind)
    if ours in (None, "k1"):
        reading.lose(
            f"{_AR}.actor.kl_loss_type",
            "`grpo.kl` is k1 (with unbiased_kl), k2 or k3: k3 is taken in its place",
        )
    elif ours != "k3":
        reading.set_recipe("grpo.kl", ours)


def _loss(reading: ToolReading) -> None:
    """The loss by its mode, bounds and mean. Source: verl, trainer/ppo/core_algos.py."""
    actor, method = f"{_AR}.actor", reading.method
    mode = str(reading.get(f"{actor}.policy_loss.loss_mode", "vanilla"))
    mean = str(reading.get(f"{actor}.loss_agg_mode", "token-mean"))
    clip = reading.get(f"{actor}.clip_ratio", 0.2)
    low, high = (reading.get(f"{actor}.clip_ratio_{side}", clip) for side in ("low", "high"))
    for key in ("epsilon", "epsilon_high"):
        reading.trl.pop(key, None)
    if entropy := reading.get(f"{actor}.entropy_coeff", 0):
        reading.trl.pop("entropy_coef", None)
        if method == "rloo":
            reading.lose(f"{actor}.entropy_coeff", "rloo has no entropy term")
        else:
            reading.set_recipe(f"{method}.entropy_coef", entropy)
    if method == "grpo" and mode == "cispo":
        reading.set_recipe("grpo.loss", "cispo")
        reading.set_recipe("grpo.cispo_max_weight", 1 + _bound(reading, "clip_ratio_high", high, 1e6))
        if low < 1:
            reading.lose(f"{actor}.clip_ratio_low", "the weights of cispo have no lower bound")
        return
    if method == "grpo" and mode == "sapo":
        reading.set_recipe("grpo.loss", "sapo")
        for side, default in (("pos", 1.0), ("neg", 1.05)):
            reading.set_recipe(f"grpo.sapo_temperature_{side}", reading.get(f"{actor}.tau_{side}", default))
        return
    reading.set_recipe(f"{method}.clip_low", _bound(reading, "clip_ratio_low", low, 1))
    if high != low:
        reading.set_recipe(f"{method}.clip_high", _bound(reading, "clip_ratio_high", high, 1e6))
    is_gspo = method == "grpo" and mode == "gspo"
    if is_gspo:
        reading.set_recipe("grpo.level", "sequence")
    elif mode != "vanilla":
        reading.lose(f"{actor}.policy_loss.loss_mode", f"a loss of verl's own: {method} is taken as it is")
    if method != "grpo":
        if mean != "token-mean" or method == "rloo":
            reading.notes.append(_mean_words(method, mean))
        return
    if not is_gspo:
        reading.set_recipe("grpo.delta", reading.get(f"{actor}.clip_ratio_c", 3.0), "clip_ratio_c")
    if is_gspo or mean in _AGGREGATION:
        reading.set_recipe("grpo.loss", "grpo" if is_gspo else _AGGREGATION[mean], mean)
    else:
        raise RecipeError(
            f"{actor}.loss_agg_mode: {mean} is none of verl's",
            f"{actor}.loss_agg_mode",
            f"give one of {', '.join(_AGGREGATION)}",
        )


def _mean_words(method: str, mean: str) -> str:
    if method == "rloo":
        return "verl clips the ratio of each token; `rloo` clips that of a completion"
    return f"loss_agg_mode: {mean}: ppo takes the mean over tokens"


def _bound(reading: ToolReading, name: str, value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise RecipeError(
            f"{_AR}.actor.{name}: {value} is out of range for this loss",
            f"{_AR}.actor.{name}",
            f"give a number from 0 to {most:g}; wider bounds are those of policy_loss.loss_mode: cispo",
        )
    return float(value)


def _critic(reading: ToolReading) -> None:
    """PPO's value model, a model of its own. Source: trainer/config/critic/critic.yaml, ppo_trainer.yaml."""
    reading.set_recipe("ppo.value", "own", "verl's critic")
    reading.set_recipe("ppo.value_clip", reading.get("critic.cliprange_value", 0.5))
    reading.set_recipe("ppo.gamma", reading.get("algorithm.gamma", 1.0))
    reading.set_recipe("ppo.gae_lambda", reading.get("algorithm.lam", 1.0))
    policy, value = (reading.get(key) for key in (f"{_AR}.model.path", "critic.model.path"))
    rate, other = reading.get(f"{_AR}.actor.optim.lr", 1e-6), reading.get("critic.optim.lr", 1e-5)
    if value is not None and value != policy:
        reading.lose("critic.model.path", "the value model begins as a copy of the policy")
    if other != rate:
        reading.notes.append(
            f"critic.optim.lr: {other} there; here one rate, that of the policy, is for both"
        )
    if reading.get("trainer.critic_warmup", 0):
        reading.lose("trainer.critic_warmup", "value and policy are trained from the first step on")


def _rewards(reading: ToolReading) -> None:
    path, name = (
        reading.get("custom_reward_function.path"),
        reading.get("custom_reward_function.name", "compute_score"),
    )
    judge = reading.get("reward_model.model.path") if reading.on("reward_model.enable") else None
    if path:
        reading.set_recipe("rewards.functions", [{"function": f"{path}:{name}"}])
        reading.notes.append(
            f"{name}: verl calls it with data_source, solution_str and ground_truth; here a function gets "
            "completion and columns of the row by name (docs/online.md)"
        )
    elif judge:
        reading.set_recipe("rewards.functions", [{"model": {"path": str(judge)}}])
    else:
        reading.set_recipe("rewards.functions", [{"function": "exact_answer"}])
        reading.notes.append(
            "verl scores by the rows' data_source; exact_answer compares with the column `answer`"
        )


def _sft(reading: ToolReading) -> None:
    """Fine-tuning by either of its trainers: the newer one has its model in `model.path`."""
    is_newer = "model.path" in reading.config or any(map(_of_engine, reading.config))
    for key, value in NEWER_DEFAULTS.items() if is_newer else ():
        _default(reading, key, value)
    if is_newer and reading.get("model.path"):
        reading.set_trl("model_name_or_path", reading.config["model.path"], "model.path")
    if not is_newer and "optim.betas" not in reading.config:
        reading.set_recipe("optim.betas", [0.9, 0.95], "verl's default")
    rows = _whole(reading, "data.train_batch_size", 256)
    reading.set_recipe("train.batch_size", rows)
    whole = reading.get("data.micro_batch_size") or 4
    micro_batch = reading.get("data.micro_batch_size_per_gpu") or whole
    share = max(1, rows // reading.processes)
    reading.computed["train.micro_batch_size"] = (
        min(micro_batch, share) if isinstance(micro_batch, int) else 1
    )
    reading.set_trl("per_device_train_batch_size", 1)
    if is_newer and reading.get("data.use_dynamic_bsz", True):
        tokens = _whole(reading, "data.max_token_len_per_gpu", 8192)
        reading.computed |= {"train.micro_tokens": tokens, "length.padding_free": True}
    # Source: verl, utils/dataset: of messages the assistant's are in the loss; a string prompt is a
    # user's turn for the chat template.
    reading.set_trl("assistant_only_loss", True)
    if is_newer or reading.on("data.multiturn.enable"):
        for key in ("messages", "tools"):
            named = reading.get(f"data.{key}_key") or reading.get(f"data.multiturn.{key}_key")
            if named and named != key:
                reading.set_recipe(f"data.columns.{key}", named)
        for key in ("prompt", "completion"):
            reading.direct.pop(f"data.columns.{key}", None)
        return
    _nested(reading)
    if reading.get("data.response_key"):
        reading.set_recipe("data.strings_are", "turns", "verl writes prompts by the chat template")


def _nested(reading: ToolReading) -> None:
    """Columns inside of a column, which are to be columns of their own."""
    for part, ours, default in (("prompt", "prompt", "question"), ("response", "completion", "answer")):
        key = f"data.{part}_dict_keys"
        inner = reading.get(key)
        if not inner:
            continue
        names = [str(one) for one in cast(list[object], inner if isinstance(inner, list) else [inner])]
        outer = reading.get(f"data.{part}_key", default)
        reading.set_recipe(f"data.columns.{ours}", names[-1])
        path = ".".join([str(outer), *names])
        reading.lose(key, f"verl reads {path}: write it into the rows as a column {names[-1]}")


def _model(reading: ToolReading, *, is_online: bool) -> None:
    above = f"{_AR}.model" if is_online else "model"
    rank = reading.get(f"{above}.lora_rank", 0)
    if isinstance(rank, int) and rank > 0:
        reading.set_trl("use_peft", True, f"{above}.lora_rank")
        reading.set_trl("lora_r", rank, f"{above}.lora_rank")
        reading.set_trl(
            "lora_target_modules",
            reading.get(f"{above}.target_modules", "all-linear"),
            f"{above}.target_modules",
        )
        reading.set_trl("dtype", "bfloat16")
    else:
        for key in ("lora_alpha", "lora_r"):
            reading.trl.pop(key, None)
    if trained := reading.get(f"{above}.lora_adapter_path"):
        reading.set_trl("use_peft", True, f"{above}.lora_adapter_path")
        reading.go_on_from(f"{above}.lora_adapter_path", str(trained))
    dtype = str(
        reading.get(
            f"{_AR}.actor.fsdp_config.model_dtype" if is_online else "model.fsdp_config.model_dtype",
            reading.get("engine.model_dtype", "fp32"),
        )
    )
    if dtype.startswith("bf"):
        reading.set_trl("dtype", "bfloat16")
        reading.set_recipe("optim.master_weights", False, "model_dtype")
    if reading.on(f"{_AR}.model.use_fused_kernels") or reading.on(f"{_AR}.actor.use_fused_kernels"):
        reading.computed["memory.loss"] = "chunked"
    if reading.get(f"{_AR}.model.use_remove_padding", reading.get("use_remove_padding", is_online)):
        reading.computed["length.padding_free"] = True
    rate = reading.get(f"{_AR}.actor.optim.lr", reading.get("optim.lr"))
    if rate is not None:
        reading.set_trl("learning_rate", _rate(rate), "optim.lr")
    betas = reading.get(f"{_AR}.actor.optim.betas", reading.get("optim.betas"))
    if isinstance(betas, list):
        reading.set_recipe("optim.betas", cast(list[object], betas))


def _rate(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise RecipeError(f"optim.lr: {value} is not a number", "optim.lr", "write the number") from None


def _rows(reading: ToolReading) -> None:
    for key, ours in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        files = reading.get(key)
        listed = cast(list[Any], files) if isinstance(files, list) else [files] if files else []
        if listed:
            reading.set_recipe(ours, [{"source": str(one)} for one in listed])
    if reading.get("data.truncation") == "middle":
        reading.lose(
            "data.truncation", "rows are cut at their start or end, or left out (`length.truncation`)"
        )
    elif reading.get("data.truncation", "error") == "error" and "truncation_mode" not in reading.trl:
        reading.notes.append(
            "data.truncation: error ends verl's run at a longer row; here it is cut, and counted "
            "(length.truncation: drop leaves such rows out)"
        )


def _run(reading: ToolReading) -> None:
    """When it saves and evaluates: verl counts rollouts, memtrain updates of the optimizer."""
    updates = 1
    for key in (f"{reading.method}.steps_per_rollout", "ppo.updates_per_rollout"):
        updates *= cast(int, reading.direct.get(key, (1, ""))[0])
    if reading.method in ("grpo", "rloo"):
        updates *= cast(int, reading.trl.get("num_iterations", 1))
    for key, ours in (("trainer.save_freq", "save"), ("trainer.test_freq", "eval")):
        every = reading.get(key, -1)
        if isinstance(every, int) and every > 0:
            reading.set_trl(f"{ours}_strategy", "steps", key)
            reading.set_trl(f"{ours}_steps", every * updates, key)
        elif ours == "save":
            reading.set_trl("save_strategy", "epoch", key)
    loggers = reading.get("trainer.logger")
    names = [str(one) for one in cast(list[object], loggers)] if isinstance(loggers, list) else []
    kept = [name for name in names if name in ("wandb", "mlflow", "tensorboard")]
    if kept:
        reading.set_trl("report_to", kept, "trainer.logger")


OWN_FILES = (
    "ppo_trainer",
    "ppo_megatron_trainer",
    "sft_trainer",
    "sft_trainer_engine",
    "generation",
    "evaluation",
)
"""Configurations that come with verl, whose values are the defaults."""


def file_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the file that `--config-path` and `--config-name` name, where it is here."""
    name = str(config.get("config_name", "")).removesuffix(".yaml")
    path = Path(str(config.get("config_path", "."))).expanduser() / f"{name}.yaml"
    if not name or name in OWN_FILES or not path.is_file():
        return {}
    read = cast(dict[str, Any], plain(read_mapping(path)))
    return {key: value for key, value in read.items() if key not in ("defaults", "hydra")}


def resolved(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the values with their `${a.b}` in place, keys whose value names one that is not there)."""
    made: dict[str, Any] = {}
    open_ones: dict[str, str] = {}
    for key, value in config.items():
        seen: set[str] = set()
        while isinstance(value, str) and (found := re.search(r"\$\{([\w.]+)\}", value)):
            name = found[1]
            if name in seen or name not in config or len(value) > LONGEST:
                break
            seen.add(name)
            value = config[name] if found[0] == value else value.replace(found[0], str(config[name]))
        if isinstance(value, str) and "${" in value:
            open_ones[key] = value
        else:
            made[key] = value
    return made, open_ones


LONGEST = 4096
"""Characters of a value with others in it. Taste."""

VERL = Tool(table("verl"), read)
