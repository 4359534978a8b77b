"""DeepSpeed's configuration, written down in full, so that a change is seen."""

from narrow import NARROW

from memtrain.memory.estimate.sharded.zero_buckets import MOST_NUMBERS, bucket_of
from memtrain.memory.model_shape.shape import shape_of
from memtrain.memory.plan.zero_config import zero_config


def test_stage_2_on_a_cpu_shares_out_gradients(make_settings):
    settings = make_settings(num_processes=2, engine="zero2", zero_bucket=801)
    assert zero_config(settings, 1.0) == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "round_robin_gradients": False,
            "reduce_bucket_size": 801,
            "allgather_bucket_size": 802,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
    }


def test_gradients_of_half_precision_are_summed_in_float32(make_settings):
    made = zero_config(make_settings(num_processes=2, engine="zero2", zero_bucket=8, dtype="bfloat16"), 1.0)
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}
    assert made["communication_data_type"] == "fp32"


def test_stage_3_on_cuda_limits_live_weights_and_moves_what_waits(make_settings):
    settings = make_settings(
        num_processes=8,
        device="cuda",
        dtype="bfloat16",
        engine="zero3",
        zero_bucket=800,
        shard_offload="parameters",
    )
    made = zero_config(settings, None)
    assert (made["bf16"], made["gradient_clipping"]) == ({"enabled": True}, 0.0)
    waiting = {"device": "cpu", "pin_memory": True}
    assert made["zero_optimization"] == {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "round_robin_gradients": False,
        "reduce_bucket_size": 800,
        "allgather_bucket_size": 800,
        "offload_optimizer": waiting,
        "offload_param": waiting,
        "stage3_max_live_parameters": 800,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
    }


def test_a_bucket_holds_the_largest_layer_or_embedding_and_no_more_than_the_limit():
    layer = 2 * 8 + 4 * 8 * 8 + 3 * 8 * 16
    assert bucket_of(shape_of(NARROW)) == max(layer, 100 * 8)
    assert bucket_of(shape_of(NARROW | {"vocab_size": 50_000_000})) == MOST_NUMBERS
