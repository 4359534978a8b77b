"""A scorer has the form of the logits that the settings say, when it is made and when they change."""

from collections.abc import Callable
from typing import Any

from memtrain.memory.plan.settings import Settings
from memtrain.trainers.model.heads.build import configure_loss, scorer_of


def test_every_form_of_the_settings_reaches_the_rule(
    tiny_model: Callable[..., Any], make_settings: Callable[..., Settings]
):
    settings = make_settings(loss="chunked", loss_kernel="triton", loss_tile_bytes=4096)
    scorer: Any = scorer_of(tiny_model(num_hidden_layers=1), "lm", settings)
    assert (scorer.form.is_chunked, scorer.form.is_liger) == (True, False)
    rule = scorer.form.rule(0.5)
    assert (rule.tile_bytes, rule.kernel, rule.temperature) == (4096, "triton", 0.5)
    configure_loss(scorer, settings.model_copy(update={"loss": "full", "loss_kernel": "torch"}))
    assert (scorer.form.is_chunked, scorer.form.kernel) == (False, "torch")
