"""The `cluster.slurm:` section: time limits in all of SLURM's forms, and words that a script can hold."""

import pytest
from pydantic import ValidationError

from memtrain.recipes.sections.slurm import Slurm, seconds_of


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("30", 1800),
        ("2:30", 150),
        ("2:00:00", 7200),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:05", 131405),
        ("UNLIMITED", None),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(written: str, seconds: int | None):
    assert seconds_of(written) == seconds


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"time": "2h"}, "'2h' is not a time limit; write H:M:S"),
        ({"time": "0:01:00", "signal_lead_s": 60}, "leaves nothing of the time limit 0:01:00"),
        ({"partition": "a b"}, "is not one word"),
        ({"lines": ["exclusive"]}, "is not an option of sbatch"),
        ({"setup": ["a\nb"]}, "is several lines"),
    ],
)
def test_what_no_script_can_hold_is_refused(keys: dict[str, object], said: str):
    with pytest.raises(ValidationError, match=said):
        Slurm.model_validate(keys)


def test_one_word_is_a_list_of_one():
    assert Slurm.model_validate({"setup": "module load cuda"}).setup == ("module load cuda",)
