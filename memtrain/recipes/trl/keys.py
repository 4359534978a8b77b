"""Every key of TRL 1.16's configurations (SFT, DPO, KTO, reward, GRPO, RLOO, model, data), with its rule."""

from __future__ import annotations

from memtrain.recipes.trl.rules import Decided, Gone, Rule, To, Together

_ON: dict[object, object] = {True: "on", False: "off"}
_UPLOAD = Gone("nothing is uploaded; `hf upload` takes the run's final/ folder")
_COMPILE = Gone("models are not compiled")
_LOADER = Decided("rows are read from memory-mapped files; there are no loader processes to set")
_DDP = Decided("gradients are exchanged by memtrain's own fixed-order sum")
_TELLING = Decided("metrics.jsonl has every step, on every kind of screen")
_COMPLETIONS = Decided("completions are kept in completions.jsonl; `generate.show` says how many")
_ENTROPY = Gone("an entropy weight that adapts itself; `grpo.entropy_coef` is a constant")
_AGENT = Gone("completions that call tools")
_BATCHING = Gone("transformers' continuous batching; the native sampler refills rows by itself")

MODEL: dict[str, Rule] = {
    "model_name_or_path": To("model.path"),
    "model_revision": To("model.revision", values={"main": None}),
    "dtype": Together(),
    "torch_dtype": Together(),
    "bf16": Together(),
    "fp16": Together(),
    "attn_implementation": To(
        "model.attention",
        values={
            "flash_attention_2": "flash",
            "flash_attention_3": "flash",
            "kernels-community/flash-attn2": "flash",
            "kernels-community/flash-attn3": "flash",
            "kernels-community/vllm-flash-attn3": "flash",
            "flex_attention": "flex",
            "sdpa": None,
            "eager": "transformers",
        },
    ),
    "model_init_kwargs": Together(),
    "trust_remote_code": Gone("code from a hub is never run"),
    "router_aux_loss_coef": To("train.router_aux_loss_coef"),
    "chat_template_path": To("model.chat_template"),
    "use_liger_kernel": To("model.liger", values=_ON),
    "liger_kernel_config": Gone("single Liger kernels; `model.liger` is for all of them"),
    "cast_lm_head_to_fp32": Decided("log-probs are accumulated in float32 in any case"),
    "use_peft": Together(),
    "lora_r": Together(),
    "lora_alpha": Together(),
    "lora_dropout": Together(),
    "lora_target_modules": Together(),
    "lora_modules_to_save": Together(),
    "use_rslora": Together(),
    "use_dora": Together(),
    "lora_task_type": Decided("follows from the method"),
    "lora_target_parameters": Gone("adapters on parameters that are no modules, such as fused experts"),
    "load_in_8bit": Together(),
    "load_in_4bit": Together(),
    "bnb_4bit_quant_type": Gone("4-bit weights are always NF4", (None, "nf4")),
    "use_bnb_nested_quant": Decided("the scales of 4-bit weights are always quantized too"),
    "bnb_4bit_quant_storage": Gone("4-bit weights are kept as bytes", (None, "uint8")),
    "use_cache": Decided("keys and values are kept in sampling only"),
    "disable_dropout": Together(),
}
"""Keys about the model and its adapter."""

DATA: dict[str, Rule] = {
    "datasets": Together(),
    "dataset_name": Together(),
    "dataset_config": Together(),
    "dataset_train_split": Together(),
    "dataset_test_split": Together(),
    "dataset_streaming": To("data.streaming"),
    "streaming": To("data.streaming"),
    "test_split_size": To("data.eval_fraction"),
    "dataset_text_field": To("data.columns.text", values={"text": None}),
    "dataset_kwargs": Gone("data is always prepared the same way; rows of token ids are taken as they are"),
    "dataset_num_proc": To("data.processes"),
    "completion_only_loss": To("data.completion_only_loss"),
    "assistant_only_loss": To("data.assistant_only_loss"),
    "eos_token": Gone("another end token: set it in the tokenizer that `model.tokenizer` names"),
    "pad_token": Decided("padding is neither attended to nor in the loss, whatever its token is"),
    "shuffle_dataset": Decided("rows are shuffled again in every epoch, before packing too"),
    "remove_unused_columns": Decided("columns that nothing reads are not kept"),
    "chat_template_kwargs": To("data.chat_template_kwargs"),
    "max_length": To("length.max_length"),
    "truncation_mode": To("length.truncation", {"sft": "keep_start", "dpo": "keep_start"}),
    "packing": Together(),
    "packing_strategy": Together(),
    "eval_packing": Decided(
        "held-out rows are laid out as those of training; their losses do not depend on it"
    ),
    "padding_free": To("length.padding_free"),
    "pad_to_multiple_of": To("length.pad_to_multiple_of", values={"auto": None}),
    "train_sampling_strategy": Together(),
    "length_column_name": Decided("lengths are counted when rows are tokenized"),
    "label_names": Decided("the tokens in the loss follow from the rows' format"),
}
"""Keys about rows and their lengths."""

TRAINING: dict[str, Rule] = {
    "output_dir": To("run_dir"),
    "per_device_train_batch_size": Together(),
    "gradient_accumulation_steps": Together(),
    "per_device_eval_batch_size": Decided("the plan chooses it"),
    "auto_find_batch_size": Decided("the plan finds it before the run; see also `memory.oom_recovery`"),
    "num_train_epochs": Together(),
    "max_steps": Together(),
    "learning_rate": To("optim.lr", {"*": 1e-6, "sft": 2e-5, "reward": 1e-4}),
    "lr_scheduler_type": Together(),
    "lr_scheduler_kwargs": Together(),
    "warmup_steps": Together(),
    "warmup_ratio": Together(),
    "optim": Together(),
    "optim_args": Gone("arguments of the optimizer beyond `optim.betas`, `optim.eps` and `optim.momentum`"),
    "optim_target_modules": Gone("optimizers that need named modules (GaLore, APOLLO)"),
    "weight_decay": To("optim.weight_decay"),
    "adam_beta1": Together(),
    "adam_beta2": Together(),
    "adam_epsilon": To("optim.eps"),
    "max_grad_norm": To("optim.max_grad_norm", values={0: None}),
    "neftune_noise_alpha": To("optim.neftune_alpha"),
    "label_smoothing_factor": Together(),
    "average_tokens_across_devices": Gone(
        "averages of a single device: the loss is the mean over the loss tokens of the whole step",
        (None, True),
    ),
    "seed": To("train.seed", 42),
    "data_seed": Gone("a seed of the data alone; `train.seed` is for everything"),
    "full_determinism": Decided("the same recipe gives the same run"),
    "gradient_checkpointing": To("memory.activation_checkpointing", values=_ON),
    "gradient_checkpointing_kwargs": Decided("the plan chooses how"),
    "activation_checkpointing": To("memory.activation_checkpointing", values=_ON),
    "activation_checkpointing_kwargs": Decided("the plan chooses how"),
    "activation_offloading": To("memory.activation_offloading", values=_ON),
    "torch_empty_cache_steps": Decided("`memory.expandable_segments` keeps memory from fragmenting"),
    "tf32": Gone("TensorFloat-32 is left as torch has it"),
    "bf16_full_eval": Decided("held-out rows are computed as those of training"),
    "fp16_full_eval": Decided("held-out rows are computed as those of training"),
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
}
"""Keys about steps, the optimizer and memory."""

RUN: dict[str, Rule] = {
    "do_train": Decided("the command gives it"),
    "do_eval": Decided("held-out rows are evaluated where there are any"),
    "do_predict": Decided("the command gives it"),
    "eval_strategy": Together(),
    "eval_steps": Together(),
    "eval_on_start": To("eval.at_start"),
    "eval_delay": Gone("evaluation that begins later", (None, 0, 0.0)),
    "eval_accumulation_steps": Decided("no logits are kept in evaluation"),
    "eval_do_concat_batches": Decided("no logits are kept in evaluation"),
    "eval_use_gather_object": Decided("no logits are kept in evaluation"),
    "batch_eval_metrics": Decided("no logits are kept in evaluation"),
    "prediction_loss_only": Decided("no logits are kept in evaluation"),
    "include_for_metrics": Gone("metrics of your own", (None, [])),
    "include_num_input_tokens_seen": Decided("tokens are counted in every step"),
    "save_strategy": Together(),
    "save_steps": Together(),
    "save_total_limit": Together(),
    "save_only_model": Gone("checkpoints always hold what a run needs to continue"),
    "save_on_each_node": Gone("the run folder is one folder that all nodes see"),
    "load_best_model_at_end": To("save.keep_best"),
    "metric_for_best_model": Gone(
        "the best checkpoint is the one of the lowest loss", (None, "loss", "eval_loss")
    ),
    "greater_is_better": Decided("the best checkpoint is the one of the lowest loss"),
    "resume_from_checkpoint": Decided(
        "a run continues from its run folder by itself; `--no-resume` starts over"
    ),
    "restore_callback_states_from_checkpoint": Decided("everything is restored"),
    "ignore_data_skip": Gone("continuing with rows that were trained on before"),
    "enable_jit_checkpoint": Decided("SIGTERM always saves"),
    "logging_steps": To("log.every_steps"),
    "logging_strategy": _TELLING,
    "logging_first_step": _TELLING,
    "logging_nan_inf_filter": Decided("a loss that is not finite is reported, not hidden"),
    "log_level": _TELLING,
    "log_level_replica": _TELLING,
    "log_on_each_node": _TELLING,
    "disable_tqdm": _TELLING,
    "skip_memory_metrics": Decided("memory is always measured; `memory.measure_peaks`"),
    "report_to": Together(),
    "run_name": Decided("trackers get the run folder's name"),
    "project": To("log.project", values={"huggingface": None}),
    "trackio_space_id": _UPLOAD,
    "trackio_bucket_id": _UPLOAD,
    "trackio_static_space_id": _UPLOAD,
    "push_to_hub": _UPLOAD,
    **dict.fromkeys(
        ("hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_token"), _UPLOAD
    ),
    "hub_strategy": Decided("nothing is uploaded"),
    "debug": Gone("transformers' debug modes", (None, "")),
    "env": Gone("environment variables: set them before the command, or in `cluster.slurm.setup`"),
}
"""Keys about evaluation, saving and telling."""

DEVICES: dict[str, Rule] = {
    "use_cpu": Together(),
    "accelerate_config": Together(),
    "deepspeed": Gone("a DeepSpeed file: `cluster.engine: zero1`, `zero2` or `zero3` says the same"),
    "fsdp": Gone("`cluster.engine: fsdp2` says the same", (None, False, "", [])),
    "fsdp_config": Gone("`cluster.engine: fsdp2` says the same"),
    "num_processes": Together(),
    "parallelism_config": Gone("`cluster.context_parallel` divides long rows"),
    "accelerator_config": Gone("settings of accelerate's data loader"),
    "ddp_backend": Gone("NCCL on CUDA, gloo on CPUs"),
    "ddp_timeout": Decided("a rank that fails ends all ranks"),
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
    "local_rank": Decided("set by the launcher"),
}
"""Keys about devices and processes."""

PREFERENCES: dict[str, Rule] = {
    "loss_type": Together(),
    "loss_weights": To("dpo.loss_weights"),
    "beta": To("{method}.beta"),
    "label_smoothing": To("dpo.label_smoothing"),
    "f_divergence_type": To("dpo.divergence"),
    "f_alpha_divergence_coef": To("dpo.divergence_alpha"),
    "discopop_tau": To("dpo.discopop_tau"),
    "ld_alpha": To("dpo.ld_alpha"),
    "use_weighting": To("dpo.use_weighting"),
    "desirable_weight": To("kto.desirable_weight"),
    "undesirable_weight": To("kto.undesirable_weight"),
    "center_rewards_coefficient": To("reward.center_rewards_coefficient", values={None: 0.0}),
    "precompute_ref_log_probs": To("{method}.reference", values={True: "precomputed", False: None}),
    "precompute_ref_batch_size": Decided("the plan chooses it"),
    "sync_ref_model": To("{method}.reference", values={True: "synced", False: None}),
    "ref_model_mixup_alpha": To("{method}.reference_mixup"),
    "ref_model_sync_steps": To("{method}.reference_sync_steps"),
}
"""Keys of DPO, KTO and reward models, some of GRPO's and RLOO's too."""

ONLINE: dict[str, Rule] = {
    "reward_funcs": Together(),
    "reward_model_name_or_path": Together(),
    "reward_weights": Together(),
    "num_generations": To("generate.num_generations", {"grpo": 8, "rloo": 2}),
    "num_generations_eval": Gone("held-out prompts get one completion each", (None, 1)),
    "max_completion_length": To("generate.max_tokens", {"grpo": 512, "rloo": 512}),
    "generation_batch_size": Together(),
    "steps_per_generation": Together(),
    "temperature": To("generate.temperature"),
    "top_p": To("generate.top_p"),
    "top_k": To("generate.top_k", values={0: None}),
    "min_p": To("generate.min_p", values={None: 0.0}),
    "repetition_penalty": To("generate.repetition_penalty"),
    "generation_kwargs": Gone("other arguments of `generate`; the keys of `generate:` are all there is"),
    "cache_implementation": Decided("the sampler keeps its own cache"),
    "use_transformers_continuous_batching": _BATCHING,
    "transformers_continuous_batching_config": _BATCHING,
    "use_transformers_paged": _BATCHING,
    "num_iterations": To("{method}.updates_per_rollout"),
    "epsilon": To("{method}.clip_low"),
    "epsilon_high": To("{method}.clip_high"),
    "delta": To("grpo.delta"),
    "importance_sampling_level": To("grpo.level"),
    "multi_objective_aggregation": To(
        "grpo.combine_rewards",
        values={"sum_then_normalize": "sum_then_normalise", "normalize_then_sum": "normalise_then_sum"},
    ),
    "scale_rewards": To("grpo.scale_rewards", values={True: "group", False: "none"}),
    "mask_truncated_completions": To("{method}.mask_truncated"),
    **{f"sapo_temperature_{side}": To(f"grpo.sapo_temperature_{side}") for side in ("pos", "neg")},
    **{
        f"vespo_{name}_{side}": To(f"grpo.vespo_{name}_{side}")
        for name in ("k", "lambda")
        for side in ("pos", "neg")
    },
    "top_entropy_quantile": To("grpo.top_entropy_fraction"),
    "entropy_coef": To("grpo.entropy_coef"),
    "use_adaptive_entropy": _ENTROPY,
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        Decided("belongs to `use_adaptive_entropy`"),
    ),
    "off_policy_mask_threshold": To("grpo.off_policy_limit"),
    "use_bias_correction_kl": Together(),
    "normalize_advantages": To("rloo.normalise_advantages"),
    "reward_clip_range": To("rloo.reward_clip"),
    "max_tool_calling_iterations": _AGENT,
    "log_completions": _COMPLETIONS,
    "num_completions_to_print": To("generate.show"),
    "log_unique_prompts": _COMPLETIONS,
    "log_multimodal": Decided("rows are text"),
    "log_completions_hub_repo": _UPLOAD,
}
"""Keys of GRPO and RLOO."""

VLLM: dict[str, Rule] = {
    "use_vllm": Together(),
    "vllm_mode": Together(),
    "ds3_gather_for_generation": Together(),
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
        Together(),
    ),
}
"""Keys of sampling by vLLM."""

OLD: dict[str, Rule] = {
    "max_seq_length": To("length.max_length"),
    "max_prompt_length": Together(),
    "evaluation_strategy": Together(),
    "group_by_length": To("length.group_by_length"),
    "use_liger": To("model.liger", values=_ON),
    "use_liger_loss": Decided("the loss is made in chunks, without whole logits"),
    "no_cuda": To("cluster.device", values={True: "cpu", False: None}),
    "overwrite_output_dir": Decided(
        "a run continues from its run folder by itself; `--no-resume` starts over"
    ),
}
"""Keys of earlier versions."""

KEYS: dict[str, Rule] = OLD | MODEL | DATA | TRAINING | RUN | DEVICES | PREFERENCES | ONLINE | VLLM
"""Every key by its name."""
