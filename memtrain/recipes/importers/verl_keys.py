"""Keys of verl's PPO and SFT trainers (FSDP), with their rules. Schema: commit b178a3cd of 2026-01-29."""

from __future__ import annotations

from memtrain.recipes.importers.tool import ToolRule, TrlKey
from memtrain.recipes.trl.rules import Automatic, ReadTogether, RecipeKey, Unmapped

_T = ReadTogether()
_CRITIC = Unmapped("a value model: GRPO and RLOO have none")
_JUDGE = Unmapped("a reward model of verl's: name it in `rewards.models`")
_ENGINE = Automatic("the sampler's and the engine's other arguments follow from the run")
_RAY = Automatic("processes are started by memtrain's own launcher")
_OTHER = Unmapped("variants of the loss that memtrain does not have")
_TURNS = Unmapped("completions that call tools")
_DATA = Automatic("data.format decides by the columns; rows are prepared once, in memtrain's own cache")
_AR = "actor_rollout_ref"

KEYS: dict[str, ToolRule] = {
    # the model and its adapter
    f"{_AR}.model.path": TrlKey("model_name_or_path"),
    "model.partial_pretrain": TrlKey("model_name_or_path"),
    f"{_AR}.model.tokenizer_path": RecipeKey("model.tokenizer"),
    f"{_AR}.model.custom_chat_template": Unmapped(
        "your own template: `model.chat_template` names a Jinja file"
    ),
    "data.chat_template": Unmapped("your own template: `model.chat_template` names a Jinja file"),
    "*model.trust_remote_code": TrlKey("trust_remote_code"),
    "data.trust_remote_code": TrlKey("trust_remote_code"),
    f"{_AR}.model.enable_gradient_checkpointing": TrlKey("gradient_checkpointing"),
    "model.enable_gradient_checkpointing": TrlKey("gradient_checkpointing"),
    f"{_AR}.model.enable_activation_offload": TrlKey("activation_offloading"),
    f"{_AR}.model.use_liger": TrlKey("use_liger_kernel"),
    "model.use_liger": TrlKey("use_liger_kernel"),
    **dict.fromkeys(
        (f"{_AR}.model.lora_rank", "model.lora_rank", f"{_AR}.model.target_modules", "model.target_modules"),
        _T,
    ),
    f"{_AR}.model.lora_alpha": TrlKey("lora_alpha"),
    "model.lora_alpha": TrlKey("lora_alpha"),
    f"{_AR}.model.lora_adapter_path": Unmapped(
        "an adapter that is trained on: merge it into its base model first"
    ),
    f"{_AR}.model.exclude_modules": Unmapped("modules left out of an adapter: name the adapted modules"),
    f"{_AR}.model.override_config": Unmapped(
        "changes to the model's configuration: write them into its config.json", (None, {}, [])
    ),
    **dict.fromkeys(
        (f"{_AR}.model.use_remove_padding", f"{_AR}.actor.use_remove_padding", "use_remove_padding"), _T
    ),
    **dict.fromkeys((f"{_AR}.model.use_fused_kernels", f"{_AR}.actor.use_fused_kernels"), _T),
    f"{_AR}.model.tiled_mlp.enabled": Unmapped(
        "layers in slices: memory.streamed_layers goes over whole layers"
    ),
    f"{_AR}.model.mtp.enable": Unmapped("multi-token prediction heads"),
    f"{_AR}.model.*": _ENGINE,
    "model.*": _T,
    # rows
    **dict.fromkeys(("data.train_files", "data.val_files", "data.train_batch_size"), _T),
    **dict.fromkeys(("data.micro_batch_size", "data.micro_batch_size_per_gpu"), _T),
    "data.max_prompt_length": TrlKey("max_prompt_length"),
    "data.max_response_length": TrlKey("max_completion_length"),
    "data.max_length": TrlKey("max_length"),
    "data.truncation": TrlKey(
        "truncation_mode", {"right": "keep_start", "left": "keep_end", "error": None, "middle": None}
    ),
    "data.shuffle": RecipeKey("train.shuffle", values={True: None}),
    "data.prompt_key": RecipeKey("data.columns.prompt", values={"prompt": None}),
    "data.response_key": RecipeKey("data.columns.completion"),
    "data.apply_chat_template_kwargs": TrlKey("chat_template_kwargs"),
    **dict.fromkeys(
        ("data.train_max_samples", "data.val_max_samples"),
        Unmapped("a number of rows: `limit` of each source in data.train", (None, -1)),
    ),
    **dict.fromkeys(
        ("data.custom_cls.*", "data.datagen.*", "data.sampler.*"), Unmapped("your own data class")
    ),
    "data.tool_config_path": _TURNS,
    "data.*": _DATA,
    # steps and optimizer
    f"{_AR}.actor.ppo_mini_batch_size": _T,
    f"{_AR}.actor.ppo_micro_batch_size": _T,
    f"{_AR}.actor.ppo_micro_batch_size_per_gpu": _T,
    f"{_AR}.actor.ppo_epochs": TrlKey("num_iterations"),
    **dict.fromkeys((f"{_AR}.actor.use_dynamic_bsz", f"{_AR}.actor.ppo_max_token_len_per_gpu"), _T),
    **{
        f"{above}.{name}": rule
        for above in (f"{_AR}.actor.optim", "optim")
        for name, rule in (
            ("lr", _T),
            ("lr_scheduler", TrlKey("lr_scheduler_type", {"cosine": "cosine", "wsd": "warmup_stable_decay"})),
            ("lr_scheduler_type", TrlKey("lr_scheduler_type")),
            ("warmup_style", TrlKey("lr_scheduler_type")),
            ("lr_warmup_steps", TrlKey("warmup_steps", {-1: None})),
            ("lr_warmup_steps_ratio", TrlKey("warmup_ratio")),
            ("min_lr_ratio", RecipeKey("optim.min_lr_ratio")),
            ("weight_decay", TrlKey("weight_decay")),
            ("betas", _T),
            ("clip_grad", TrlKey("max_grad_norm")),
            (
                "optimizer",
                Unmapped("the optimizers are adamw, adamw_8bit, adafactor, muon and sgd", (None, "AdamW")),
            ),
            (
                "optimizer_impl",
                Unmapped("the optimizers are torch's and bitsandbytes'", (None, "torch.optim")),
            ),
            ("override_optimizer_config", Unmapped("arguments of the optimizer beyond betas and eps")),
            ("num_cycles", Automatic("a cosine falls once")),
            ("total_training_steps", Automatic("train.max_steps says it")),
        )
    },
    f"{_AR}.actor.grad_clip": TrlKey("max_grad_norm"),
    # what changes the training where it is not as it is by default
    f"{_AR}.actor.router_replay.mode": Unmapped(
        "`grpo.router_replay` is of the sampler's own choices", (None, "disabled")
    ),
    f"{_AR}.rollout.enable_rollout_routing_replay": Unmapped("`grpo.router_replay: true` says the same"),
    f"{_AR}.actor.shuffle": Unmapped("mini-batches are in the order of their prompts"),
    f"{_AR}.actor.loss_scale_factor": Unmapped("another divisor of the loss"),
    f"{_AR}.actor.fsdp_config.fsdp_size": Unmapped("shards lie over all devices", (None, -1)),
    f"{_AR}.actor.fsdp_config.reshard_after_forward": Unmapped(
        "weights are let go after each pass", (None, True)
    ),
    f"{_AR}.actor.fsdp_config.full_determinism": Unmapped(
        "on a GPU the sums of a run that writes completions have no one order", (None, False)
    ),
    f"{_AR}.model.mtp.enable_train": Unmapped("multi-token prediction heads"),
    f"{_AR}.model.external_lib": Unmapped("code of your own"),
    f"{_AR}.rollout.ignore_eos": Unmapped("a completion ends at its end token"),
    f"{_AR}.rollout.do_sample": Unmapped("completions are sampled (`generate.temperature`)", (None, True)),
    f"{_AR}.rollout.quantization": Unmapped("the sampler has the policy's weights"),
    f"{_AR}.rollout.over_sample_rate": Unmapped("every prompt gets as many completions", (None, 0)),
    **{
        f"{_AR}.rollout.{name}_parallel_size": Unmapped(
            "vLLM runs on one device for each process of the run", (None, 1)
        )
        for name in ("data", "expert", "pipeline_model")
    },
    **dict.fromkeys(
        (
            "algorithm.rollout_correction.rollout_is_batch_normalize",
            "algorithm.rollout_correction.rollout_rs",
            "algorithm.rollout_correction.bypass_mode",
        ),
        Unmapped("other corrections: `grpo.importance_correction` names the available ones"),
    ),
    "data.multiturn.enable": _TURNS,
    "data.tokenizer": Unmapped("another tokenizer: `model.tokenizer` names it"),
    "trainer.val_only": Unmapped("nothing would be trained"),
    # the loss
    "algorithm.adv_estimator": _T,
    f"{_AR}.actor.use_kl_loss": _T,
    f"{_AR}.actor.kl_loss_coef": _T,
    f"{_AR}.actor.kl_loss_type": Unmapped("other estimators of the KL term", (None, "low_var_kl", "k3")),
    f"{_AR}.actor.clip_ratio": _T,
    f"{_AR}.actor.clip_ratio_low": TrlKey("epsilon"),
    f"{_AR}.actor.clip_ratio_high": TrlKey("epsilon_high"),
    f"{_AR}.actor.clip_ratio_c": Unmapped(
        "the bound of dual clipping: `grpo.delta` is the one there is", (None, 3.0, 3)
    ),
    f"{_AR}.actor.loss_agg_mode": _T,
    f"{_AR}.actor.entropy_coeff": TrlKey("entropy_coef", {0: None}),
    f"{_AR}.actor.policy_loss.loss_mode": Unmapped(
        "losses of verl's own: `grpo.loss` names the available losses", (None, "vanilla")
    ),
    f"{_AR}.actor.policy_loss.*": Automatic("belongs to a loss that is listed where it is asked for"),
    "algorithm.use_kl_in_reward": Unmapped("a KL term in the reward: `grpo.beta` is one in the loss"),
    "algorithm.norm_adv_by_std_in_grpo": TrlKey("scale_rewards"),
    "algorithm.rollout_correction.rollout_is": TrlKey(
        "vllm_importance_sampling_mode", {"token": "token_truncate", "sequence": "sequence_truncate"}
    ),
    "algorithm.rollout_correction.rollout_is_threshold": Automatic("belongs to rollout_is"),
    "algorithm.use_pf_ppo": _OTHER,
    "algorithm.*": Automatic("belongs to another estimator"),
    # sampling
    f"{_AR}.rollout.name": _T,
    f"{_AR}.rollout.n": TrlKey("num_generations"),
    f"{_AR}.rollout.temperature": TrlKey("temperature"),
    f"{_AR}.rollout.top_p": TrlKey("top_p", {1: 1.0}),
    f"{_AR}.rollout.top_k": TrlKey("top_k", {-1: None}),
    f"{_AR}.rollout.gpu_memory_utilization": TrlKey("vllm_gpu_memory_utilization"),
    f"{_AR}.rollout.free_cache_engine": _T,
    f"{_AR}.rollout.tensor_model_parallel_size": TrlKey("vllm_tensor_parallel_size"),
    f"{_AR}.rollout.enforce_eager": RecipeKey("generate.vllm.eager", values={True: None}),
    f"{_AR}.rollout.val_kwargs.*": Automatic("held-out prompts get one completion each"),
    f"{_AR}.rollout.multi_turn.enable": _TURNS,
    f"{_AR}.rollout.multi_turn.*": Automatic("belongs to multi_turn.enable"),
    f"{_AR}.rollout.log_prob_*": Automatic("the plan chooses it"),
    f"{_AR}.rollout.*": _ENGINE,
    # devices
    **dict.fromkeys(("trainer.n_gpus_per_node", "trainer.nnodes"), _T),
    **dict.fromkeys(
        (
            f"{_AR}.actor.fsdp_config.param_offload",
            f"{_AR}.actor.fsdp_config.optimizer_offload",
            f"{_AR}.actor.fsdp_config.offload_policy",
            f"{_AR}.ref.fsdp_config.param_offload",
        ),
        _T,
    ),
    f"{_AR}.actor.fsdp_config.model_dtype": _T,
    **dict.fromkeys(
        (f"{_AR}.actor.strategy", "model.strategy"), Unmapped("Megatron's engine", (None, "fsdp", "fsdp2"))
    ),
    **dict.fromkeys(
        (
            f"{_AR}.actor.ulysses_sequence_parallel_size",
            f"{_AR}.actor.fsdp_config.ulysses_sequence_parallel_size",
            "ulysses_sequence_parallel_size",
        ),
        _T,
    ),
    f"{_AR}.actor.fsdp_config.*": _ENGINE,
    f"{_AR}.actor.use_prefix_grouper": Automatic("prompts are computed once for their group"),
    f"{_AR}.actor.checkpoint.*": Automatic("checkpoints always hold all state that a run needs to continue"),
    f"{_AR}.actor.profiler.*": Automatic("memory and time are always measured"),
    f"{_AR}.actor.*": _ENGINE,
    f"{_AR}.ref.*": Automatic("the reference follows the policy's settings"),
    f"{_AR}.hybrid_engine": Automatic("sampler and trainer share the devices"),
    f"{_AR}.nccl_timeout": Automatic("a rank that fails ends all ranks"),
    # rewards, run
    **dict.fromkeys(("custom_reward_function.path", "custom_reward_function.name"), _T),
    "reward_model.enable": _JUDGE,
    **dict.fromkeys(
        ("reward_model.*", "reward_manager.*"), Automatic("belongs to the reward, which `rewards:` names")
    ),
    "critic.*": Automatic("GRPO and RLOO have no value model"),
    "trainer.total_epochs": TrlKey("num_train_epochs"),
    "trainer.total_training_steps": TrlKey("max_steps"),
    "trainer.save_freq": _T,
    "trainer.test_freq": _T,
    "trainer.logger": _T,
    "trainer.project_name": TrlKey("project"),
    "trainer.default_local_dir": TrlKey("output_dir"),
    "trainer.seed": TrlKey("seed"),
    "trainer.val_before_train": TrlKey("eval_on_start"),
    **dict.fromkeys(
        ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"), TrlKey("save_total_limit")
    ),
    "trainer.*": _RAY,
    **dict.fromkeys(
        ("ray_kwargs.*", "ray_init.*", "transfer_queue.*", "global_profiler.*", "profiler*", "*.profiler.*"),
        _RAY,
    ),
}
"""Every key by its name; a key with `*` stands for all matching keys, the first that does."""
