"""Words about the tokens of experts."""

from memtrain.trainers.protocols.events import ExpertsEvent, from_line, to_line
from memtrain.trainers.run_folder.report.expert_rows import expert_words, layers_of

EVENTS = [
    ExpertsEvent(step=2, steps=2, tokens=((4, 0, 2), (3, 3, 0))),
    ExpertsEvent(step=3, steps=1, tokens=((5, 0, 1), (1, 5, 0))),
]


def test_events_of_a_run_are_summed_by_layer():
    """9, 0 and 3 tokens in the first layer, of which the mean is 4."""
    first, second = layers_of(EVENTS)
    assert first == (0, 0, 4.0, 9, 0, 1)
    assert second == (1, 0, 4.0, 8, 1, 1)
    words = expert_words(EVENTS)
    assert words.startswith("2.25 times the mean of its layer (expert 0 of layer 0: 9 tokens, mean 4)")
    assert words.endswith("2 of 6 experts got no token in 3 logged steps")
    assert expert_words([]) == ""


def test_a_line_of_the_metrics_gives_the_event_back():
    assert from_line(to_line(EVENTS[0], 1.0)) == EVENTS[0]
