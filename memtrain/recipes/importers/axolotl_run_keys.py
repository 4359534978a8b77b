"""Keys of Axolotl's configuration about steps, preferences, rollouts, the run and its devices."""

from __future__ import annotations

from memtrain.recipes.importers.tool import ToolRule, TrlKey
from memtrain.recipes.trl.rules import Automatic, ReadTogether, RecipeKey, Unmapped

_UPLOAD = Unmapped("nothing is uploaded; `hf upload` takes the run's final/ folder")
_TRACKER = Unmapped("the trackers are tensorboard, wandb, mlflow and trackio")
_SHOWN = Automatic("metrics.jsonl has every step")
_EVAL_EXTRA = Unmapped("metrics of generated text in evaluation")
_LR = Unmapped("learning rates of single modules, and other schedules")
_EXOTIC = Unmapped("methods that memtrain does not have")
_COMPILE = Unmapped("a model compiled as a whole; `model.compile: on` compiles its layers")
_SPLIT = Unmapped("`cluster.engine` and `cluster.context_parallel` divide a run")
_DDP = Automatic("gradients are exchanged by memtrain's own fixed-order sum")
_ASYNC = Unmapped("rollouts are never generated ahead of the optimizer steps")

TRAINING: dict[str, ToolRule] = {
    "micro_batch_size": TrlKey("per_device_train_batch_size"),
    "batch_size": Unmapped("micro_batch_size x gradient_accumulation_steps say it"),
    "gradient_accumulation_steps": TrlKey("gradient_accumulation_steps"),
    "eval_batch_size": TrlKey("per_device_eval_batch_size"),
    "auto_find_batch_size": TrlKey("auto_find_batch_size"),
    "num_epochs": TrlKey("num_train_epochs"),
    "max_steps": TrlKey("max_steps"),
    "learning_rate": ReadTogether(),
    "lr_scheduler": TrlKey("lr_scheduler_type"),
    "lr_scheduler_kwargs": TrlKey("lr_scheduler_kwargs"),
    "cosine_min_lr_ratio": ReadTogether(),
    "warmup_steps": TrlKey("warmup_steps"),
    "warmup_ratio": TrlKey("warmup_ratio"),
    "optimizer": TrlKey("optim"),
    "optim_args": TrlKey("optim_args"),
    "optim_target_modules": TrlKey("optim_target_modules"),
    "weight_decay": TrlKey("weight_decay"),
    "adam_beta1": TrlKey("adam_beta1"),
    "adam_beta2": TrlKey("adam_beta2"),
    "adam_epsilon": TrlKey("adam_epsilon"),
    "max_grad_norm": TrlKey("max_grad_norm"),
    "neftune_noise_alpha": TrlKey("neftune_noise_alpha"),
    "noisy_embedding_alpha": TrlKey("neftune_noise_alpha"),
    "seed": TrlKey("seed"),
    "gradient_checkpointing": ReadTogether(),
    "gradient_checkpointing_kwargs": Automatic("the plan chooses how"),
    "selective_checkpointing": Unmapped("layers are checkpointed whole, every one or every n-th"),
    "activation_offloading": ReadTogether(),
    "layer_offloading": Unmapped("frozen layers kept on the host"),
    "tiled_mlp": ReadTogether(),
    **dict.fromkeys(
        ("tiled_mlp_*", "gc_steps", "gc_collect_steps", "torch_empty_cache_steps"),
        Automatic("the plan decides it"),
    ),
    **dict.fromkeys(
        ("adam_beta3", "adam_epsilon2", "cosine_constant_lr_ratio", "lr_div_factor", "lr_groups"), _LR
    ),
    **dict.fromkeys(("lr_quadratic_warmup", "embedding_lr", "embedding_lr_scale", "torchdistx_path"), _LR),
    **dict.fromkeys(("qgalore_*", "dion_*"), _EXOTIC),
    **dict.fromkeys(("torch_compile*", "deepcompile"), _COMPILE),
    **dict.fromkeys(("use_eaft", "eaft_*", "trainer_cls", "process_reward_model", "ebft"), _EXOTIC),
}
"""Keys about steps, the optimizer and memory."""

PREFERENCES: dict[str, ToolRule] = {
    "rl": ReadTogether(),
    "rl_beta": TrlKey("beta"),
    "dpo_beta": TrlKey("beta"),
    "dpo_loss_type": TrlKey("loss_type"),
    "dpo_loss_weights": TrlKey("loss_weights"),
    "dpo_label_smoothing": TrlKey("label_smoothing"),
    "dpo_use_weighting": TrlKey("use_weighting"),
    "dpo_use_liger_kernel": TrlKey("use_liger_kernel"),
    "precompute_ref_log_probs": TrlKey("precompute_ref_log_probs"),
    "kto_desirable_weight": TrlKey("desirable_weight"),
    "kto_undesirable_weight": TrlKey("undesirable_weight"),
    "reward_model": ReadTogether(),
    "center_rewards_coefficient": TrlKey("center_rewards_coefficient"),
    "simpo_gamma": RecipeKey("dpo.simpo_gamma"),
    **dict.fromkeys(
        ("orpo_alpha", "cpo_alpha", "rpo_alpha"), Unmapped("the weight of that loss is fixed here")
    ),
    **dict.fromkeys(
        ("dpo_norm_loss", "dpo_generate_during_eval", "dpo_use_logits_to_keep"),
        Automatic("log-probs are sums, of answers alone"),
    ),
}
"""Keys of the preference methods."""

ONLINE: dict[str, ToolRule] = {
    "trl": ReadTogether(),
    "vllm": ReadTogether(),
    **{
        f"trl.{name}": TrlKey(name)
        for name in (
            "beta",
            "max_completion_length",
            "use_vllm",
            "vllm_mode",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "reward_funcs",
            "reward_weights",
            "generation_batch_size",
            "num_generations",
            "log_completions",
            "num_completions_to_print",
            "importance_sampling_level",
            "sync_ref_model",
            "ref_model_mixup_alpha",
            "ref_model_sync_steps",
            "scale_rewards",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "generation_kwargs",
            "chat_template_kwargs",
            "num_iterations",
            "epsilon",
            "epsilon_high",
            "loss_type",
            "mask_truncated_completions",
            "multi_objective_aggregation",
            "vllm_enable_sleep_mode",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_cap",
            "off_policy_mask_threshold",
            "use_bias_correction_kl",
            "use_liger_loss",
        )
    },
    "trl.vllm_guided_decoding_regex": TrlKey("vllm_structured_outputs_regex"),
    "trl.rollout_func": Unmapped("your own rollout function"),
    "trl.reward_num_workers": Automatic("rewards run in separate processes"),
    "trl.skip_zero_advantage_batches": Automatic("groups without a signal are left out of the passes"),
    "trl.*": _ASYNC,
    "vllm.gpu_memory_utilization": TrlKey("vllm_gpu_memory_utilization"),
    "vllm.tensor_parallel_size": TrlKey("vllm_tensor_parallel_size"),
    "vllm.max_model_len": TrlKey("vllm_max_model_length"),
    "vllm.enforce_eager": RecipeKey("generate.vllm.eager"),
    "vllm.*": Automatic("the sampler's other arguments follow from the run"),
}
"""Keys of GRPO."""

RUN: dict[str, ToolRule] = {
    "output_dir": TrlKey("output_dir"),
    **{
        name: TrlKey(name)
        for name in (
            "eval_strategy",
            "evaluation_strategy",
            "eval_steps",
            "save_strategy",
            "save_steps",
            "save_total_limit",
            "save_only_model",
            "load_best_model_at_end",
            "metric_for_best_model",
            "greater_is_better",
            "logging_steps",
            "resume_from_checkpoint",
        )
    },
    **dict.fromkeys(("evals_per_epoch", "saves_per_epoch"), ReadTogether()),
    **dict.fromkeys(
        ("use_wandb", "wandb_project", "use_mlflow", "use_tensorboard", "use_trackio"), ReadTogether()
    ),
    "trackio_project_name": TrlKey("project"),
    **dict.fromkeys(
        (
            "wandb_entity",
            "wandb_watch",
            "wandb_name",
            "wandb_run_id",
            "wandb_mode",
            "wandb_log_model",
            "mlflow_*",
            "hf_mlflow_log_artifacts",
            "trackio_*",
        ),
        Automatic("trackers read their own environment variables; runs have the run folder's name"),
    ),
    **dict.fromkeys(
        ("use_comet", "comet_*", "use_otel_metrics", "otel_*", "swanlab_*", "use_swanlab"), _TRACKER
    ),
    **dict.fromkeys(("hub_*",), _UPLOAD),
    **dict.fromkeys(("include_tokens_per_second", "include_tkps", "profiler_*", "save_first_step"), _SHOWN),
    **dict.fromkeys(
        ("auto_resume_from_checkpoints", "dynamic_checkpoint"),
        Automatic("a run continues by itself; signals save"),
    ),
    "early_stopping_patience": RecipeKey("eval.early_stopping.patience"),
    **dict.fromkeys(
        ("loss_watchdog_*",),
        Unmapped("a run always ends when the loss is not finite"),
    ),
    **dict.fromkeys(
        (
            "do_causal_lm_eval",
            "eval_causal_lm_metrics",
            "do_bench_eval",
            "bench_*",
            "eval_table_size",
            "eval_max_new_tokens",
            "generate_samples",
            "num_generation_samples",
            "generation_*",
        ),
        _EVAL_EXTRA,
    ),
    **dict.fromkeys(("gradio_*", "axolotl_config_path"), Automatic("the run has no use for it")),
}
"""Keys about evaluation, saving and metrics."""

DEVICES: dict[str, ToolRule] = {
    **dict.fromkeys(
        (
            "deepspeed",
            "fsdp",
            "fsdp_config",
            "fsdp_version",
            "context_parallel_size",
            "sequence_parallel_degree",
        ),
        ReadTogether(),
    ),
    **dict.fromkeys(
        (
            "fsdp_final_state_dict_type",
            "device",
            "device_map",
            "world_size",
            "local_rank",
            "ddp",
            "max_memory",
        ),
        Automatic("the launcher and the plan say it"),
    ),
    **dict.fromkeys(("ddp_*",), _DDP),
    "gpu_memory_limit": RecipeKey("memory.budget"),
    "accelerator_config": TrlKey("accelerator_config"),
    **dict.fromkeys(
        ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size", "heads_k_stride", "ring_attn_func"),
        _SPLIT,
    ),
    **dict.fromkeys(
        ("use_ray", "ray_*", "resources_per_worker"), Unmapped("Ray: `memtrain slurm` submits to a cluster")
    ),
}
"""Keys about devices."""
