"""Every key of TRL 1.16's configurations (of its methods, the model, the data), with its rule."""

from __future__ import annotations

from memtrain.recipes.trl.rules import Automatic, ReadTogether, RecipeKey, Rule, Unmapped

_ON: dict[object, object] = {True: "on", False: "off"}
_UPLOAD = Unmapped("nothing is uploaded; `hf upload` takes the run's final/ folder")
_COMPILE = Unmapped("a model compiled as a whole; `model.compile: on` compiles its layers")
_LOADER = Automatic("rows are read from memory-mapped files; there are no loader processes to set")
_DDP = Automatic("gradients are exchanged by memtrain's own fixed-order sum")
_LOGGING = Automatic("metrics.jsonl has every step, on every kind of screen")
_COMPLETIONS = Automatic("completions are kept in completions.jsonl; `generate.show` says how many")
_ENTROPY = Unmapped("an adaptive entropy coefficient; `grpo.entropy_coef` is a constant")
_AGENT = Unmapped("completions that call tools")
_BATCHING = Unmapped("transformers' continuous batching; the native sampler refills rows by itself")

MODEL: dict[str, Rule] = {
    "model_name_or_path": RecipeKey("model.path"),
    "model_revision": RecipeKey("model.revision", values={"main": None}),
    "dtype": ReadTogether(),
    "torch_dtype": ReadTogether(),
    "bf16": ReadTogether(),
    "fp16": ReadTogether(),
    "attn_implementation": RecipeKey(
        "model.attention",
        values={
            # The plan takes the flash kernels that the machine has: all compute the same.
            "flash_attention_2": None,
            "flash_attention_3": None,
            "kernels-community/flash-attn2": None,
            "kernels-community/flash-attn3": None,
            "kernels-community/vllm-flash-attn3": None,
            "sdpa": None,
            "flex_attention": "flex",
            "eager": "transformers",
        },
    ),
    "model_init_kwargs": ReadTogether(),
    "trust_remote_code": Unmapped("code runs only with `model.trust_remote_code`, at a commit"),
    "router_aux_loss_coef": RecipeKey("train.router_aux_loss_coef"),
    "chat_template_path": RecipeKey("model.chat_template"),
    "use_liger_kernel": RecipeKey("model.liger", values=_ON),
    "liger_kernel_config": Unmapped("single Liger kernels; `model.liger` is for all of them"),
    "cast_lm_head_to_fp32": Automatic("log-probs are accumulated in float32 in any case"),
    "use_peft": ReadTogether(),
    "lora_r": ReadTogether(),
    "lora_alpha": ReadTogether(),
    "lora_dropout": ReadTogether(),
    "lora_target_modules": ReadTogether(),
    "lora_modules_to_save": ReadTogether(),
    "use_rslora": ReadTogether(),
    "use_dora": ReadTogether(),
    "lora_task_type": Automatic("follows from the method"),
    "lora_target_parameters": ReadTogether(),
    "load_in_8bit": ReadTogether(),
    "load_in_4bit": ReadTogether(),
    "bnb_4bit_quant_type": Unmapped("4-bit weights are always NF4", (None, "nf4")),
    "use_bnb_nested_quant": Automatic("the scales of 4-bit weights are always quantized too"),
    "bnb_4bit_quant_storage": Unmapped("4-bit weights are kept as bytes", (None, "uint8")),
    "use_cache": Automatic("keys and values are kept in sampling only"),
    "disable_dropout": ReadTogether(),
}
"""Keys about the model and its adapter."""

DATA: dict[str, Rule] = {
    "datasets": ReadTogether(),
    "dataset_name": ReadTogether(),
    "dataset_config": ReadTogether(),
    "dataset_train_split": ReadTogether(),
    "dataset_test_split": ReadTogether(),
    "dataset_streaming": RecipeKey("data.streaming"),
    "streaming": RecipeKey("data.streaming"),
    "test_split_size": RecipeKey("data.eval_fraction"),
    "dataset_text_field": RecipeKey("data.columns.text", values={"text": None}),
    "dataset_kwargs": Unmapped("data is always prepared the same way; rows of token ids are used unchanged"),
    "dataset_num_proc": RecipeKey("data.processes"),
    "completion_only_loss": RecipeKey("data.completion_only_loss"),
    "assistant_only_loss": RecipeKey("data.assistant_only_loss", {"sft": False, "distill": False}),
    "eos_token": Unmapped("another end token: set it in the tokenizer that `model.tokenizer` names"),
    "pad_token": Automatic("padding is neither attended to nor in the loss, whatever its token is"),
    "shuffle_dataset": Automatic("rows are shuffled again in every epoch, before packing too"),
    "remove_unused_columns": Automatic("columns that nothing reads are not kept"),
    "chat_template_kwargs": RecipeKey("data.chat_template_kwargs"),
    "max_length": RecipeKey("length.max_length"),
    "truncation_mode": RecipeKey("length.truncation", {"sft": "keep_start", "dpo": "keep_start"}),
    "packing": ReadTogether(),
    "packing_strategy": ReadTogether(),
    "eval_packing": Automatic(
        "held-out rows are laid out as training rows are; their losses do not depend on it"
    ),
    "padding_free": RecipeKey("length.padding_free"),
    "pad_to_multiple_of": RecipeKey("length.pad_to_multiple_of", values={"auto": None}),
    "train_sampling_strategy": ReadTogether(),
    "length_column_name": Automatic("lengths are counted when rows are tokenized"),
    "label_names": Automatic("the tokens in the loss follow from the rows' format"),
}
"""Keys about rows and their lengths."""

TRAINING: dict[str, Rule] = {
    "output_dir": RecipeKey("run_dir"),
    "per_device_train_batch_size": ReadTogether(),
    "gradient_accumulation_steps": ReadTogether(),
    "per_device_eval_batch_size": Automatic("the plan chooses it"),
    "auto_find_batch_size": Automatic("the plan finds it before the run; see also `memory.oom_recovery`"),
    "num_train_epochs": ReadTogether(),
    "max_steps": ReadTogether(),
    "learning_rate": RecipeKey("optim.lr", {"*": 1e-6, "sft": 2e-5, "reward": 1e-4, "distill": 2e-5}),
    "lr_scheduler_type": ReadTogether(),
    "lr_scheduler_kwargs": ReadTogether(),
    "warmup_steps": ReadTogether(),
    "warmup_ratio": ReadTogether(),
    "optim": ReadTogether(),
    "optim_args": Unmapped(
        "arguments of the optimizer beyond `optim.betas`, `optim.eps` and `optim.momentum`"
    ),
    "optim_target_modules": Unmapped("optimizers that need named modules (GaLore, APOLLO)"),
    "weight_decay": RecipeKey("optim.weight_decay"),
    "adam_beta1": ReadTogether(),
    "adam_beta2": ReadTogether(),
    "adam_epsilon": RecipeKey("optim.eps"),
    "max_grad_norm": RecipeKey("optim.max_grad_norm", values={0: None}),
    "neftune_noise_alpha": RecipeKey("optim.neftune_alpha"),
    "label_smoothing_factor": ReadTogether(),
    "average_tokens_across_devices": Unmapped(
        "per-device averages: the loss is the mean over the loss tokens of the whole step",
        (None, True),
    ),
    "seed": RecipeKey("train.seed", 42),
    "data_seed": Unmapped("a separate data seed; `train.seed` seeds everything"),
    "full_determinism": RecipeKey("train.deterministic"),
    "gradient_checkpointing": RecipeKey("memory.activation_checkpointing", values=_ON),
    "gradient_checkpointing_kwargs": Automatic("the plan chooses how"),
    "activation_checkpointing": RecipeKey("memory.activation_checkpointing", values=_ON),
    "activation_checkpointing_kwargs": Automatic("the plan chooses how"),
    "activation_offloading": RecipeKey("memory.activation_offloading", values=_ON),
    "torch_empty_cache_steps": Automatic("`memory.expandable_segments` keeps memory from fragmenting"),
    "tf32": Unmapped("TensorFloat-32 keeps torch's setting"),
    "bf16_full_eval": Automatic("held-out rows are computed as training rows are"),
    "fp16_full_eval": Automatic("held-out rows are computed as training rows are"),
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
}
"""Keys about steps, the optimizer and memory."""

RUN: dict[str, Rule] = {
    "do_train": Automatic("the command gives it"),
    "do_eval": Automatic("held-out rows are evaluated where there are any"),
    "do_predict": Automatic("the command gives it"),
    "eval_strategy": ReadTogether(),
    "eval_steps": ReadTogether(),
    "eval_on_start": RecipeKey("eval.at_start"),
    "eval_delay": Unmapped("evaluation that begins later", (None, 0, 0.0)),
    "eval_accumulation_steps": Automatic("no logits are kept in evaluation"),
    "eval_do_concat_batches": Automatic("no logits are kept in evaluation"),
    "eval_use_gather_object": Automatic("no logits are kept in evaluation"),
    "batch_eval_metrics": Automatic("no logits are kept in evaluation"),
    "prediction_loss_only": Automatic("no logits are kept in evaluation"),
    "include_for_metrics": Unmapped("your own metrics", (None, [])),
    "include_num_input_tokens_seen": Automatic("tokens are counted in every step"),
    "save_strategy": ReadTogether(),
    "save_steps": ReadTogether(),
    "save_total_limit": ReadTogether(),
    "save_only_model": Unmapped("checkpoints always hold all state that a run needs to continue"),
    "save_on_each_node": Unmapped("the run folder is one folder that all nodes see"),
    "load_best_model_at_end": RecipeKey("save.keep_best"),
    "metric_for_best_model": Unmapped(
        "the best checkpoint is the one of the lowest loss", (None, "loss", "eval_loss")
    ),
    "greater_is_better": Automatic("the best checkpoint is the one of the lowest loss"),
    "resume_from_checkpoint": Automatic(
        "a run continues from its run folder by itself; `--no-resume` starts over"
    ),
    "restore_callback_states_from_checkpoint": Automatic("everything is restored"),
    "ignore_data_skip": Unmapped("continuing with rows that were trained on before"),
    "enable_jit_checkpoint": Automatic("SIGTERM always saves"),
    "logging_steps": RecipeKey("log.every_steps"),
    "logging_strategy": _LOGGING,
    "logging_first_step": _LOGGING,
    "logging_nan_inf_filter": Automatic("a loss that is not finite is reported, not hidden"),
    "log_level": _LOGGING,
    "log_level_replica": _LOGGING,
    "log_on_each_node": _LOGGING,
    "disable_tqdm": _LOGGING,
    "skip_memory_metrics": Automatic("memory is always measured; `memory.measure_peaks`"),
    "report_to": ReadTogether(),
    "run_name": Automatic("trackers get the run folder's name"),
    "project": RecipeKey("log.project", values={"huggingface": None}),
    "trackio_space_id": _UPLOAD,
    "trackio_bucket_id": _UPLOAD,
    "trackio_static_space_id": _UPLOAD,
    "push_to_hub": _UPLOAD,
    **dict.fromkeys(
        ("hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_token"), _UPLOAD
    ),
    "hub_strategy": Automatic("nothing is uploaded"),
    "debug": Unmapped("transformers' debug modes", (None, "")),
    "env": Unmapped("environment variables: set them before the command, or in `cluster.slurm.setup`"),
}
"""Keys about evaluation, saving and telling."""

DEVICES: dict[str, Rule] = {
    "use_cpu": ReadTogether(),
    "accelerate_config": ReadTogether(),
    "deepspeed": ReadTogether(),
    "fsdp": ReadTogether(),
    "fsdp_config": ReadTogether(),
    "num_processes": ReadTogether(),
    "parallelism_config": Unmapped("`cluster.context_parallel` divides long rows"),
    "accelerator_config": Unmapped("settings of accelerate's data loader"),
    "ddp_backend": Unmapped("NCCL on CUDA, gloo on CPUs"),
    "ddp_timeout": Automatic("a rank that fails ends all ranks"),
    **dict.fromkeys(
        ("ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph"), _DDP
    ),
    "ignore_bias_buffers": _DDP,
    **dict.fromkeys(
        (
            "dataloader_drop_last",
            "dataloader_in_order",
            "dataloader_multiprocessing_context",
            "dataloader_num_workers",
            "dataloader_persistent_workers",
            "dataloader_pin_memory",
            "dataloader_prefetch_factor",
        ),
        _LOADER,
    ),
    "local_rank": Automatic("set by the launcher"),
}
"""Keys about devices and processes."""

PREFERENCES: dict[str, Rule] = {
    "loss_type": ReadTogether(),
    "loss_weights": RecipeKey("dpo.loss_weights"),
    "beta": RecipeKey("{method}.beta"),
    "label_smoothing": RecipeKey("dpo.label_smoothing"),
    "f_divergence_type": RecipeKey("dpo.divergence"),
    "f_alpha_divergence_coef": RecipeKey("dpo.divergence_alpha"),
    "discopop_tau": RecipeKey("dpo.discopop_tau"),
    "ld_alpha": RecipeKey("dpo.ld_alpha"),
    "use_weighting": RecipeKey("dpo.use_weighting"),
    "desirable_weight": RecipeKey("kto.desirable_weight"),
    "undesirable_weight": RecipeKey("kto.undesirable_weight"),
    "center_rewards_coefficient": RecipeKey("reward.center_rewards_coefficient", values={None: 0.0}),
    "precompute_ref_log_probs": RecipeKey("{method}.reference", values={True: "precomputed", False: None}),
    "precompute_ref_batch_size": Automatic("the plan chooses it"),
    "sync_ref_model": RecipeKey("{method}.reference", values={True: "synced", False: None}),
    "ref_model_mixup_alpha": RecipeKey("{method}.reference_mixup"),
    "ref_model_sync_steps": RecipeKey("{method}.reference_sync_steps"),
}
"""Keys of DPO, KTO and reward models, some of GRPO's and RLOO's too."""

ONLINE: dict[str, Rule] = {
    "reward_funcs": ReadTogether(),
    "reward_model_name_or_path": ReadTogether(),
    "reward_weights": ReadTogether(),
    "num_generations": RecipeKey("generate.num_generations", {"grpo": 8, "rloo": 2}),
    "num_generations_eval": Unmapped("held-out prompts get one completion each", (None, 1)),
    "max_completion_length": RecipeKey("generate.max_tokens", {"grpo": 512, "rloo": 512}),
    "generation_batch_size": ReadTogether(),
    "steps_per_generation": ReadTogether(),
    "temperature": RecipeKey("generate.temperature", {"distill": 0.9}),
    "top_p": RecipeKey("generate.top_p"),
    "top_k": RecipeKey("generate.top_k", values={0: None}),
    "min_p": RecipeKey("generate.min_p", values={None: 0.0}),
    "repetition_penalty": RecipeKey("generate.repetition_penalty"),
    "generation_kwargs": Unmapped("other arguments of `generate`; the keys of `generate:` are all there is"),
    "cache_implementation": Automatic("the sampler keeps its own cache"),
    "use_transformers_continuous_batching": _BATCHING,
    "transformers_continuous_batching_config": _BATCHING,
    "use_transformers_paged": _BATCHING,
    "num_iterations": RecipeKey("{method}.updates_per_rollout"),
    "epsilon": RecipeKey("{method}.clip_low"),
    "epsilon_high": RecipeKey("{method}.clip_high"),
    "delta": RecipeKey("grpo.delta"),
    "importance_sampling_level": RecipeKey("grpo.level"),
    "multi_objective_aggregation": RecipeKey("grpo.combine_rewards"),
    "scale_rewards": RecipeKey("grpo.scale_rewards", values={True: "group", False: "none"}),
    "mask_truncated_completions": RecipeKey("{method}.mask_truncated"),
    **{f"sapo_temperature_{side}": RecipeKey(f"grpo.sapo_temperature_{side}") for side in ("pos", "neg")},
    **{
        f"vespo_{name}_{side}": RecipeKey(f"grpo.vespo_{name}_{side}")
        for name in ("k", "lambda")
        for side in ("pos", "neg")
    },
    "top_entropy_quantile": RecipeKey("grpo.top_entropy_fraction"),
    "entropy_coef": RecipeKey("grpo.entropy_coef"),
    "use_adaptive_entropy": _ENTROPY,
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        Automatic("belongs to `use_adaptive_entropy`"),
    ),
    "off_policy_mask_threshold": RecipeKey("grpo.off_policy_limit"),
    "use_bias_correction_kl": ReadTogether(),
    "normalize_advantages": RecipeKey("rloo.normalize_advantages"),
    "reward_clip_range": RecipeKey("rloo.reward_clip"),
    "max_tool_calling_iterations": _AGENT,
    "log_completions": _COMPLETIONS,
    "num_completions_to_print": RecipeKey("generate.show"),
    "log_unique_prompts": _COMPLETIONS,
    "log_multimodal": Automatic("rows are text"),
    "log_completions_hub_repo": _UPLOAD,
}
"""Keys of GRPO and RLOO."""

DISTILLATION: dict[str, Rule] = {
    "teacher_model_name_or_path": RecipeKey("distill.teacher"),
    "teacher_model_init_kwargs": ReadTogether(),
    "lmbda": RecipeKey("distill.on_policy_fraction", {"distill": 0.5}),
    "max_new_tokens": RecipeKey("generate.max_tokens", {"distill": 128}),
    "seq_kd": Unmapped("the teacher's own completions: write them once, and train on them by `memtrain sft`"),
}
"""Keys of GKD, which is `memtrain distill`."""

VLLM: dict[str, Rule] = {
    "use_vllm": ReadTogether(),
    "vllm_mode": ReadTogether(),
    "ds3_gather_for_generation": ReadTogether(),
    **dict.fromkeys(
        (
            "vllm_model_impl",
            "vllm_enable_sleep_mode",
            "vllm_structured_outputs_regex",
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_group_port",
            "vllm_gpu_memory_utilization",
            "vllm_max_model_length",
            "vllm_tensor_parallel_size",
            "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
            "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_cap",
        ),
        ReadTogether(),
    ),
}
"""Keys of sampling by vLLM."""

OLD: dict[str, Rule] = {
    "max_seq_length": RecipeKey("length.max_length"),
    "max_prompt_length": ReadTogether(),
    "evaluation_strategy": ReadTogether(),
    "group_by_length": RecipeKey("length.group_by_length"),
    "use_liger": RecipeKey("model.liger", values=_ON),
    "use_liger_loss": Automatic("the loss is made in chunks, without whole logits"),
    "no_cuda": RecipeKey("cluster.device", values={True: "cpu", False: None}),
    "overwrite_output_dir": Automatic(
        "a run continues from its run folder by itself; `--no-resume` starts over"
    ),
}
"""Keys of earlier versions."""

KEYS: dict[str, Rule] = (
    OLD | MODEL | DATA | TRAINING | RUN | DEVICES | PREFERENCES | ONLINE | DISTILLATION | VLLM
)
"""Every key by its name."""
