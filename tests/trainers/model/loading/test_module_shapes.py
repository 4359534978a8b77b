"""What is counted in a model that is built without data, and why it could not be."""

import pytest

from memtrain.trainers.model.loading.locate import make_config
from memtrain.trainers.model.loading.module_shapes import counted_shape

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}


@pytest.mark.parametrize("own", [{}, {"auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}}])
def test_a_type_that_transformers_does_not_know_is_planned_with_the_note_that_no_run_can_start(
    own: dict[str, object],
):
    shape = counted_shape({"model_type": "mynewmodel", **SIZES, **own})
    assert shape.counts is None
    assert "no run of it can start here: transformers " in shape.note
    assert "does not know mynewmodel models" in shape.note
    assert ("comes with its own code" in shape.note) is bool(own)
    assert "Error" not in shape.note


def test_a_model_that_reads_pictures_is_told_in_one_sentence():
    """transformers lists the 200 models that it has beside the one that it has not."""
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64, "intermediate_size": 64}
    shape = counted_shape({"model_type": "qwen2_5_vl", **SIZES, "vision_config": vision})
    assert shape.starts_no_run
    assert "qwen2_5_vl models read pictures or sound, and memtrain trains text models" in shape.note
    assert len(shape.note) < 250


def test_layers_are_counted_where_the_configuration_lists_them_alone():
    """Nemotron-H's number of layers is not in what transformers saves: no plan could be made of it."""
    own = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, "head_dim": 16}
    said = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M*-M", **own, **said}
    assert "num_hidden_layers" not in make_config(config).to_dict()
    assert counted_shape(make_config(config).to_dict()).num_layers == 4
