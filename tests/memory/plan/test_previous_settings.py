"""Plans and checkpoints that were saved under previous names."""

from memtrain.memory.plan.previous_settings import PREVIOUS_SETTINGS, renewed_recipe, renewed_settings
from memtrain.memory.plan.settings import Settings


def test_every_previous_name_stands_for_a_field_of_today_and_is_none_itself():
    for old, new in PREVIOUS_SETTINGS.items():
        assert old not in Settings.model_fields
        assert new in Settings.model_fields


def test_saved_settings_and_recipes_are_read_with_todays_names():
    assert renewed_settings({"batch_rows": 8, "threads": 2}) == {"batch_size": 8, "threads": 2}
    assert renewed_recipe({"train": {"micro_rows": "auto"}}) == {"train": {"micro_batch_size": "auto"}}
