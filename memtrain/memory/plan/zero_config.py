"""DeepSpeed's configuration for a plan: every key that decides memory is written out."""

from __future__ import annotations

from memtrain.memory.plan.settings import Settings

CONFIG_FILE = "deepspeed.json"


def stage_of(settings: Settings) -> int:
    """1: states are in parts; 2: gradients too; 3: weights too."""
    return int(settings.engine.removeprefix("zero"))


SUMS_IN_FLOAT32: dict[str, object] = {
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}
"""Gradients of half-precision weights, over micro-batches and over ranks."""


def zero_config(settings: Settings, max_grad_norm: float | None) -> dict[str, object]:
    """The configuration that the worker gives DeepSpeed; the launch layer writes it beside the plan."""
    is_cuda, bucket = settings.device == "cuda", settings.zero_bucket
    waiting = {"device": "cpu", "pin_memory": is_cuda}
    zero: dict[str, object] = {
        "stage": stage_of(settings),
        "overlap_comm": is_cuda,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "round_robin_gradients": False,
        "reduce_bucket_size": bucket,
        # Even, as DeepSpeed wants it.
        "allgather_bucket_size": bucket + bucket % 2,
    }
    if settings.shard_offload != "none":
        zero["offload_optimizer"] = waiting
    if stage_of(settings) == 3:
        zero |= {
            "stage3_max_live_parameters": bucket,
            "stage3_max_reuse_distance": 0,
            # A weight fetched ahead that no pass comes for (after an evaluation) could not be gathered to be
            # saved: "Cannot partition a param in flight" (deepspeed 0.19.8).
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
        }
        if settings.shard_offload == "parameters":
            zero["offload_param"] = waiting
    return {
        # The loop counts rows, passes and steps itself, and says which pass is the last of a step.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm or 0.0,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        **({} if settings.dtype == "float32" else SUMS_IN_FLOAT32),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # torch's own AdamW: DeepSpeed's would be compiled on the node first.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
    }
