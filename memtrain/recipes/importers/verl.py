"""verl: GRPO and RLOO of its PPO trainer, and its SFT trainer, on FSDP."""

from __future__ import annotations

from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.tool import Tool, ToolReading
from memtrain.recipes.peers.table import table

_AR = "actor_rollout_ref"
METHODS = {"grpo": "grpo", "grpo_passk": "grpo", "rloo": "rloo", "reinforce_plus_plus_baseline": "grpo"}
"""`algorithm.adv_estimator` and the method."""

_AGGREGATION = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}


def read(reading: ToolReading) -> None:
    """The method, batches, precision, engine, rows, sampler and reward.

    Raises: RecipeError for an estimator that has no counterpart.
    """
    is_online = any(key.startswith((f"{_AR}.", "algorithm.")) for key in reading.config)
    _devices(reading, is_online=is_online)
    if is_online:
        _online(reading)
    else:
        reading.method = "sft"
        _sft_batch(reading)
        # Source: verl, utils/dataset: of messages the assistant's are in the loss; a string prompt is a
        # user's turn for the chat template.
        reading.set_trl("assistant_only_loss", True)
        if reading.get("data.response_key") and not reading.on("data.multiturn.enable"):
            reading.set_recipe("data.strings_are", "turns", "verl writes prompts by the chat template")
    _model(reading, is_online=is_online)
    _rows(reading)
    _run(reading)


def _devices(reading: ToolReading, *, is_online: bool) -> None:
    number = reading.get("trainer.n_gpus_per_node", 8 if is_online else 1)
    nodes = reading.get("trainer.nnodes", 1)
    if reading.processes == 1 and isinstance(number, int) and isinstance(nodes, int):
        reading.processes = number * nodes
    actor = f"{_AR}.actor.fsdp_config" if is_online else "model.fsdp_config"
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
    if width > 1:
        reading.set_recipe("cluster.context_parallel", width)
        reading.set_recipe("cluster.context_parallel_mode", "ulysses")


def _online(reading: ToolReading) -> None:
    asked = str(reading.get("algorithm.adv_estimator", "gae"))
    if asked not in METHODS:
        raise RecipeError(
            f"algorithm.adv_estimator: {asked} has no counterpart in memtrain",
            "algorithm.adv_estimator",
            f"give one of {', '.join(METHODS)}; `method: ppo` is written by hand",
        )
    reading.method = METHODS[asked]
    group = int(reading.get(f"{_AR}.rollout.n", 1))
    prompts = int(reading.get("data.train_batch_size", 1024))
    mini = min(prompts, int(reading.get(f"{_AR}.actor.ppo_mini_batch_size", 256)))
    step = max(1, mini * group // reading.processes)
    micro_batch = reading.get(f"{_AR}.actor.ppo_micro_batch_size_per_gpu")
    whole = reading.get(f"{_AR}.actor.ppo_micro_batch_size")
    micro_batch = micro_batch or (max(1, int(whole) // reading.processes) if whole else None)
    if reading.on(f"{_AR}.actor.use_dynamic_bsz"):
        tokens = int(reading.get(f"{_AR}.actor.ppo_max_token_len_per_gpu", 16384))
        reading.computed |= {"train.micro_tokens": tokens, "length.padding_free": True}
        micro_batch = None
    rows = min(int(micro_batch), step) if micro_batch else 1
    reading.set_trl("per_device_train_batch_size", rows, f"{_AR}.actor.ppo_mini_batch_size")
    reading.set_trl("gradient_accumulation_steps", max(1, step // rows))
    steps = max(1, prompts // mini)
    if steps > 1:
        reading.set_trl("steps_per_generation", max(1, step // rows) * steps, "data.train_batch_size")
    if reading.get(f"{_AR}.rollout.name", "vllm") == "vllm":
        reading.set_trl("use_vllm", True, f"{_AR}.rollout.name")
        reading.trl.setdefault("vllm_gpu_memory_utilization", 0.5)
        if reading.get(f"{_AR}.rollout.free_cache_engine", True):
            reading.set_trl("vllm_enable_sleep_mode", True)
    elif reading.get(f"{_AR}.rollout.name") != "hf":
        reading.lose(f"{_AR}.rollout.name", "the samplers are native, transformers and vLLM")
    _loss(reading)


def _loss(reading: ToolReading) -> None:
    if reading.get("algorithm.rollout_correction.rollout_is"):
        reading.set_trl(
            "vllm_importance_sampling_correction", True, "algorithm.rollout_correction.rollout_is"
        )
        threshold = reading.get("algorithm.rollout_correction.rollout_is_threshold", 2.0)
        reading.set_trl("vllm_importance_sampling_clip_max", threshold)
    reading.set_trl(
        "beta",
        reading.get(f"{_AR}.actor.kl_loss_coef", 0.001) if reading.on(f"{_AR}.actor.use_kl_loss") else 0.0,
        f"{_AR}.actor.kl_loss_coef",
    )
    clip = reading.get(f"{_AR}.actor.clip_ratio")
    if clip is not None:
        reading.trl.setdefault("epsilon", clip)
    mode = reading.get(f"{_AR}.actor.loss_agg_mode", "token-mean")
    if reading.method == "grpo":
        if mode in _AGGREGATION:
            reading.set_trl("loss_type", _AGGREGATION[mode], f"{_AR}.actor.loss_agg_mode")
        else:
            reading.lose(
                f"{_AR}.actor.loss_agg_mode", f"`grpo.loss` sums as {', '.join(_AGGREGATION.values())} do"
            )
    path, name = (
        reading.get("custom_reward_function.path"),
        reading.get("custom_reward_function.name", "compute_score"),
    )
    if path:
        reading.set_recipe("rewards.functions", [{"function": f"{path}:{name}"}])
    else:
        reading.set_recipe("rewards.functions", [{"function": "exact_answer"}])
        reading.notes.append(
            "verl scores by the rows' data_source; exact_answer compares with the column `answer`"
        )


def _sft_batch(reading: ToolReading) -> None:
    reading.trl.setdefault("max_length", 1024)
    rows = int(reading.get("data.train_batch_size", 256))
    micro_batch = int(reading.get("data.micro_batch_size_per_gpu", reading.get("data.micro_batch_size", 4)))
    micro_batch = max(1, min(micro_batch, rows // reading.processes or 1))
    reading.set_trl("per_device_train_batch_size", micro_batch, "data.micro_batch_size_per_gpu")
    reading.set_trl(
        "gradient_accumulation_steps",
        max(1, rows // (micro_batch * reading.processes)),
        "data.train_batch_size",
    )


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
    dtype = str(
        reading.get(
            f"{_AR}.actor.fsdp_config.model_dtype" if is_online else "model.fsdp_config.model_dtype", "fp32"
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
        reading.set_trl("learning_rate", float(rate), "optim.lr")
    betas = reading.get(f"{_AR}.actor.optim.betas", reading.get("optim.betas"))
    if isinstance(betas, list):
        reading.set_recipe("optim.betas", cast(list[object], betas))


def _rows(reading: ToolReading) -> None:
    for key, ours in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        files = reading.get(key)
        listed = cast(list[Any], files) if isinstance(files, list) else [files] if files else []
        if listed:
            reading.set_recipe(ours, [{"source": str(one)} for one in listed])


def _run(reading: ToolReading) -> None:
    for key, ours in (("trainer.save_freq", "save"), ("trainer.test_freq", "eval")):
        every = reading.get(key, -1)
        if isinstance(every, int) and every > 0:
            reading.set_trl(f"{ours}_strategy", "steps", key)
            reading.set_trl(f"{ours}_steps", every, key)
        elif ours == "save":
            reading.set_trl("save_strategy", "epoch", key)
    loggers = reading.get("trainer.logger")
    names = [str(one) for one in cast(list[object], loggers)] if isinstance(loggers, list) else []
    kept = [name for name in names if name in ("wandb", "mlflow", "tensorboard")]
    if kept:
        reading.set_trl("report_to", kept, "trainer.logger")


VERL = Tool(table("verl"), read)
