"""Words of other trainers about steps, completions, evaluation, saving and devices, with our key or none."""

NOT_DONE = "remove it: no counterpart here"
CHECKPOINTS = "remove it: checkpoints hold all that a run needs to continue"
PUSH = "remove it: memtrain push RUN NAME uploads a finished run"
ENGINE = "`cluster.engine` (auto, ddp, fsdp2, zero1, zero2 or zero3)"
_IN_METRICS = "remove it: metrics.jsonl has every step"
_AFTERWARDS = "remove it: memtrain chat, serve, merge and export are commands of their own"
_TENSOR_PARALLEL = "`cluster.context_parallel` (weights are sharded by `cluster.engine`)"
_TURNS = "`rewards.environment` (a class with reset and step)"
_WRITTEN = "`generate.show`; completions.jsonl has all"
_CLIP_OF_PPO = "`ppo.clip_low`, and `ppo.clip_high`"
RESUME = "remove it: a run continues from its run folder by itself"

PEER_RUN_WORDS: dict[str, str] = {
    # steps and the optimizer
    "optim_args": "`optim.betas`, `optim.eps` and `optim.momentum`",
    "use_muon": "`optim.kind: muon`",
    "optimizer_in_bwd": "`optim.in_backward`",
    "clip_grad_norm": "`optim.max_grad_norm`",
    "noisy_embedding_alpha": "`optim.neftune_alpha`",
    "cosine_constant_lr_ratio": f"{NOT_DONE}; the schedules are those of `optim.schedule`",
    "max_steps_per_epoch": "`train.max_steps`",
    "total_episodes": "`train.max_steps` (episodes, divided by `train.batch_size`)",
    "average_tokens_across_devices": "remove it: the loss is the mean over the loss tokens of the whole step",
    "use_dft_loss": "`sft.loss: dft`",
    "use_eaft_loss": NOT_DONE,
    "num_output_chunks": "`memory.loss_chunk_size`",
    "use_gradient_checkpointing": "`memory.activation_checkpointing`, and `memory.activation_offloading`",
    "use_unsloth_gc": "`memory.activation_offloading`",
    "disable_gradient_checkpointing": "`memory.activation_checkpointing: off`",
    "enable_activation_checkpointing": "`memory.activation_checkpointing`",
    "ac_mode": "`memory.activation_checkpointing`",
    "enable_activation_offloading": "`memory.activation_offloading`",
    "offload_embedding": "`memory.weights_offload`",
    "unsloth_tiled_mlp": "`memory.streamed_layers` (taken by itself where nothing faster fits)",
    "loss_watchdog_threshold": "remove it: a loss that is not finite ends the run",
    "loss_watchdog_patience": "remove it: a loss that is not finite ends the run",
    # preferences
    **dict.fromkeys(("rpo_alpha", "cpo_alpha"), "`dpo.loss: [sigmoid, sft]`, and `dpo.loss_weights`"),
    "orpo_alpha": f"{NOT_DONE}; the weight of that loss is fixed (`dpo.loss: orpo`)",
    "reference_free": "`dpo.loss` (simpo, orpo and cpo need no reference)",
    "force_use_ref_model": "remove it: the reference is the model before training (`dpo.reference`)",
    "f_divergence_type": "`dpo.divergence`",
    "f_alpha_divergence_coef": "`dpo.divergence_alpha`",
    "ref_model_mixup_alpha": "`dpo.reference_mixup`",
    "ref_model_sync_steps": "`dpo.reference_sync_steps`",
    # completions and rewards
    "num_iterations": "`grpo.updates_per_rollout`",
    "num_ppo_epochs": "`ppo.updates_per_rollout`",
    "generation_batch_size": "`grpo.steps_per_rollout` (optimizer steps of one rollout)",
    "response_length": "`generate.max_tokens`",
    "log_completions": _WRITTEN,
    "num_completions_to_print": _WRITTEN,
    "kl_coef": "`ppo.beta`, or `grpo.beta`",
    "cliprange": _CLIP_OF_PPO,
    "cliprange_value": "`ppo.value_clip`",
    "vf_coef": "`ppo.value_coef`",
    "lam": "`ppo.gae_lambda`",
    "whiten_rewards": "`ppo.normalize_advantages`",
    "missing_eos_penalty": "`ppo.cut_penalty`",
    "ppo_score_norm": NOT_DONE,
    "top_entropy_quantile": "`grpo.top_entropy_fraction`",
    "vllm_importance_sampling_correction": "`grpo.importance_correction`",
    "judge": "`rewards.functions.pairwise` (a function that compares two completions)",
    "reward_model": "`rewards.functions.model`",
    "reward_model_type": "remove it: a reward model is a path (`rewards.functions.model`)",
    "max_tool_calling_iterations": "`rewards.environment.max_turns`",
    **dict.fromkeys(("rollout_func", "environment_factory"), _TURNS),
    "gpu_memory_utilization": "`generate.vllm.memory_share`",
    "vllm_max_model_length": "remove it: it follows from the rows and `generate.max_tokens`",
    "vllm_tensor_parallel_size": "remove it: vLLM runs on one device for each process of the run",
    "max_lora_rank": "remove it: it follows from `model.adapter.r`",
    # evaluation and logs
    **dict.fromkeys(("test_datasets", "dataset_val"), "`data.eval`"),
    "eval_on_each_dataset": "`data.eval: {math: math.jsonl, chat: chat.jsonl}` (each set by its name)",
    "run_val_every_n_steps": "`eval.every_steps`",
    "batch_size_val": "`train.micro_batch_size`",
    "eval_accumulation_steps": "remove it: no logits are kept in evaluation",
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"), "remove it: held-out rows are computed as training rows are"
    ),
    "eval_table_size": "`eval.samples`",
    "eval_max_new_tokens": "`eval.samples.max_tokens`",
    **dict.fromkeys(("predict_with_generate", "do_causal_lm_eval"), "`eval.metrics`"),
    "do_bench_eval": "`eval.lm_eval`",
    **dict.fromkeys(("logging_strategy", "log_every_n_steps"), "`log.every_steps`"),
    **dict.fromkeys(
        (
            "logging_first_step",
            "include_tokens_per_second",
            "include_effective_tokens_per_second",
            "log_level",
            "disable_tqdm",
        ),
        _IN_METRICS,
    ),
    "log_peak_memory_stats": "`memory.measure_peaks` (measured by default)",
    "metric_logger": "`log.trackers`",
    "wandb_name": "`run_dir` (trackers get the folder's name)",
    "use_swanlab": f"{NOT_DONE}; the trackers are those of `log.trackers`",
    "profiler": f"{NOT_DONE}; memtrain bench measures variants of a recipe",
    "debug": "remove it: memtrain show-data shows the rows, and memtrain check the recipe",
    # saving
    "save_only_model": CHECKPOINTS,
    "save_first_step": f"{NOT_DONE}; what would fail at the end is tried before the first step",
    "save_adapter_weights_only": "remove it: an adapter is saved by itself",
    "enable_async_checkpointing": "`save.async_save`",
    **dict.fromkeys(("auto_resume_from_checkpoints", "recipe_checkpoint"), RESUME),
    **dict.fromkeys(("hub_strategy", "hub_private_repo", "wandb_log_model", "push_to_hub_merged"), PUSH),
    **dict.fromkeys(
        (
            "merge_lora",
            "save_method",
            "infer_backend",
            "export_size",
            "export_device",
            "export_legacy_format",
        ),
        _AFTERWARDS,
    ),
    # devices
    "ddp": ENGINE,
    "fsdp_cpu_offload": "`cluster.cpu_offload: parameters`",
    "data_parallel_shard_dim": "`cluster.engine: fsdp2`, and `cluster.processes`",
    "data_parallel_replicate_dim": "`cluster.processes`",
    "tensor_parallel_dim": _TENSOR_PARALLEL,
    "custom_sharded_layers": NOT_DONE,
    "local_rank": "remove it: the launcher sets it",
    "accelerator_config": "remove it: rows come from memory-mapped files",
    "dataloader_drop_last": "remove it: every row is trained on once an epoch",
    "ddp_find_unused_parameters": "remove it: gradients are exchanged by memtrain's own sum",
}
"""A word of another trainer, and the key here in its place or why it is to be removed."""
