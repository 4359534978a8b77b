"""`memtrain status` in words."""

from pathlib import Path

import pytest

from memtrain.cli.launch.status import held_out_words
from memtrain.trainers.protocols.events import EvalEvent


@pytest.mark.parametrize(
    ("loss", "extra", "said"),
    [
        (1.5, {}, "1.5000 after step 3"),
        (1.5, {"entropy": 0.5}, "1.5000 after step 3"),
        # The loss of an online method's evaluation is minus the reward, so that the lowest is the best.
        (-0.75, {"reward": 0.75}, "reward 0.7500 after step 3"),
        (0.25, {"reward": -0.25, "length": 7.0}, "reward -0.2500 after step 3"),
    ],
)
def test_the_held_out_reward_keeps_its_sign(loss: float, extra: dict[str, float], said: str, tmp_path: Path):
    event = EvalEvent(step=3, loss=loss, tokens=2, extra=extra)
    assert held_out_words(event) == said
