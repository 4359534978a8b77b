"""verl: GRPO and RLOO of its PPO trainer, and its SFT trainer, on FSDP."""

from __future__ import annotations

from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.tool import Said, Tool
from memtrain.recipes.importers.verl_keys import KEYS

_AR = "actor_rollout_ref"
METHODS = {"grpo": "grpo", "grpo_passk": "grpo", "rloo": "rloo", "reinforce_plus_plus_baseline": "grpo"}
"""`algorithm.adv_estimator` and the method."""

_AGGREGATION = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}


def read(said: Said) -> None:
    """The method, batches, precision, engine, rows, sampler and reward.

    Raises: RecipeError for an estimator that has no counterpart.
    """
    is_online = any(key.startswith((f"{_AR}.", "algorithm.")) for key in said.config)
    _devices(said, is_online=is_online)
    if is_online:
        _online(said)
    else:
        said.method = "sft"
        _sft_batch(said)
    _model(said, is_online=is_online)
    _rows(said)
    _run(said)


def _devices(said: Said, *, is_online: bool) -> None:
    number = said.get("trainer.n_gpus_per_node", 8 if is_online else 1)
    nodes = said.get("trainer.nnodes", 1)
    if said.processes == 1 and isinstance(number, int) and isinstance(nodes, int):
        said.processes = number * nodes
    actor = f"{_AR}.actor.fsdp_config" if is_online else "model.fsdp_config"
    if said.processes > 1:
        said.put("cluster.engine", "fsdp2", "verl's FSDP")
    away = any(
        said.on(f"{actor}.{name}")
        for name in ("param_offload", "offload_policy", "cpu_offload", "offload_params")
    )
    if away and said.processes > 1:
        said.put("cluster.cpu_offload", "parameters")
    elif away or said.on(f"{actor}.optimizer_offload"):
        said.put("memory.optimizer_offload", "on")
        if said.processes > 1:
            said.direct.pop("memory.optimizer_offload")
            said.put("cluster.cpu_offload", "parameters", "verl waits with the optimizer alone")
    width = said.get(
        f"{_AR}.actor.ulysses_sequence_parallel_size", said.get("ulysses_sequence_parallel_size", 1)
    )
    if isinstance(width, int) and width > 1:
        said.put("cluster.context_parallel", width)
        said.put("cluster.context_parallel_mode", "ulysses")


def _online(said: Said) -> None:
    asked = str(said.get("algorithm.adv_estimator", "gae"))
    if asked not in METHODS:
        raise RecipeError(
            f"algorithm.adv_estimator: {asked} is not read",
            "algorithm.adv_estimator",
            f"estimators that are read: {', '.join(METHODS)}; `method: ppo` is written by hand",
        )
    said.method = METHODS[asked]
    group = int(said.get(f"{_AR}.rollout.n", 1))
    prompts = int(said.get("data.train_batch_size", 1024))
    mini = min(prompts, int(said.get(f"{_AR}.actor.ppo_mini_batch_size", 256)))
    step = max(1, mini * group // said.processes)
    micro_batch = said.get(f"{_AR}.actor.ppo_micro_batch_size_per_gpu")
    whole = said.get(f"{_AR}.actor.ppo_micro_batch_size")
    micro_batch = micro_batch or (max(1, int(whole) // said.processes) if whole else None)
    if said.on(f"{_AR}.actor.use_dynamic_bsz"):
        tokens = int(said.get(f"{_AR}.actor.ppo_max_token_len_per_gpu", 16384))
        said.computed |= {"train.micro_tokens": tokens, "length.padding_free": True}
        micro_batch = None
    rows = min(int(micro_batch), step) if micro_batch else 1
    said.say("per_device_train_batch_size", rows, f"{_AR}.actor.ppo_mini_batch_size")
    said.say("gradient_accumulation_steps", max(1, step // rows))
    steps = max(1, prompts // mini)
    if steps > 1:
        said.say("steps_per_generation", max(1, step // rows) * steps, "data.train_batch_size")
    if said.get(f"{_AR}.rollout.name", "vllm") == "vllm":
        said.say("use_vllm", True, f"{_AR}.rollout.name")
        said.trl.setdefault("vllm_gpu_memory_utilization", 0.5)
        if said.get(f"{_AR}.rollout.free_cache_engine", True):
            said.say("vllm_enable_sleep_mode", True)
    elif said.get(f"{_AR}.rollout.name") != "hf":
        said.lose(f"{_AR}.rollout.name", "the samplers are native, transformers and vLLM")
    _loss(said)


def _loss(said: Said) -> None:
    if said.get("algorithm.rollout_correction.rollout_is"):
        said.say("vllm_importance_sampling_correction", True, "algorithm.rollout_correction.rollout_is")
        threshold = said.get("algorithm.rollout_correction.rollout_is_threshold", 2.0)
        said.say("vllm_importance_sampling_clip_max", threshold)
    said.say(
        "beta",
        said.get(f"{_AR}.actor.kl_loss_coef", 0.001) if said.on(f"{_AR}.actor.use_kl_loss") else 0.0,
        f"{_AR}.actor.kl_loss_coef",
    )
    clip = said.get(f"{_AR}.actor.clip_ratio")
    if clip is not None:
        said.trl.setdefault("epsilon", clip)
    mode = said.get(f"{_AR}.actor.loss_agg_mode", "token-mean")
    if said.method == "grpo":
        if mode in _AGGREGATION:
            said.say("loss_type", _AGGREGATION[mode], f"{_AR}.actor.loss_agg_mode")
        else:
            said.lose(
                f"{_AR}.actor.loss_agg_mode", f"`grpo.loss` sums as {', '.join(_AGGREGATION.values())} do"
            )
    path, name = (
        said.get("custom_reward_function.path"),
        said.get("custom_reward_function.name", "compute_score"),
    )
    if path:
        said.put("rewards.functions", [{"function": f"{path}:{name}"}])
    else:
        said.put("rewards.functions", [{"function": "exact_answer"}])
        said.notes.append(
            "verl scores by the rows' data_source; exact_answer compares with the column `answer`"
        )


def _sft_batch(said: Said) -> None:
    said.trl.setdefault("max_length", 1024)
    rows = int(said.get("data.train_batch_size", 256))
    micro_batch = int(said.get("data.micro_batch_size_per_gpu", said.get("data.micro_batch_size", 4)))
    micro_batch = max(1, min(micro_batch, rows // said.processes or 1))
    said.say("per_device_train_batch_size", micro_batch, "data.micro_batch_size_per_gpu")
    said.say(
        "gradient_accumulation_steps", max(1, rows // (micro_batch * said.processes)), "data.train_batch_size"
    )


def _model(said: Said, *, is_online: bool) -> None:
    above = f"{_AR}.model" if is_online else "model"
    rank = said.get(f"{above}.lora_rank", 0)
    if isinstance(rank, int) and rank > 0:
        said.say("use_peft", True, f"{above}.lora_rank")
        said.say("lora_r", rank, f"{above}.lora_rank")
        said.say(
            "lora_target_modules",
            said.get(f"{above}.target_modules", "all-linear"),
            f"{above}.target_modules",
        )
        said.say("dtype", "bfloat16")
    else:
        for key in ("lora_alpha", "lora_r"):
            said.trl.pop(key, None)
    dtype = str(
        said.get(
            f"{_AR}.actor.fsdp_config.model_dtype" if is_online else "model.fsdp_config.model_dtype", "fp32"
        )
    )
    if dtype.startswith("bf"):
        said.say("dtype", "bfloat16")
        said.put("optim.master_weights", False, "model_dtype")
    if said.on(f"{_AR}.model.use_fused_kernels") or said.on(f"{_AR}.actor.use_fused_kernels"):
        said.computed["memory.loss"] = "chunked"
    if said.get(f"{_AR}.model.use_remove_padding", said.get("use_remove_padding", is_online)):
        said.computed["length.padding_free"] = True
    rate = said.get(f"{_AR}.actor.optim.lr", said.get("optim.lr"))
    if rate is not None:
        said.say("learning_rate", float(rate), "optim.lr")
    betas = said.get(f"{_AR}.actor.optim.betas", said.get("optim.betas"))
    if isinstance(betas, list):
        said.put("optim.betas", cast(list[object], betas))


def _rows(said: Said) -> None:
    for key, ours in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
        files = said.get(key)
        listed = cast(list[Any], files) if isinstance(files, list) else [files] if files else []
        if listed:
            said.put(ours, [{"source": str(one)} for one in listed])


def _run(said: Said) -> None:
    for key, ours in (("trainer.save_freq", "save"), ("trainer.test_freq", "eval")):
        every = said.get(key, -1)
        if isinstance(every, int) and every > 0:
            said.say(f"{ours}_strategy", "steps", key)
            said.say(f"{ours}_steps", every, key)
        elif ours == "save":
            said.say("save_strategy", "epoch", key)
    loggers = said.get("trainer.logger")
    names = [str(one) for one in cast(list[object], loggers)] if isinstance(loggers, list) else []
    kept = [name for name in names if name in ("wandb", "mlflow", "tensorboard")]
    if kept:
        said.say("report_to", kept, "trainer.logger")


VERL = Tool(
    name="verl",
    title="verl",
    version="b178a3cd of 2026-01-29",
    keys=KEYS,
    read=read,
    defaults={
        "gradient_checkpointing": True,
        "learning_rate": 1e-6,
        "weight_decay": 0.01,
        "lr_scheduler_type": "constant",
        "num_train_epochs": 30,
        "temperature": 1.0,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "max_completion_length": 512,
        "max_prompt_length": 512,
        "num_generations": 1,
        "dtype": "float32",
        "vllm_importance_sampling_correction": False,
        "use_bias_correction_kl": False,
    },
)
"""verl's FSDP trainers."""
