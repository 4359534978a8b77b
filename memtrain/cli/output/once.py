"""Sentences that a person reads once on a machine: changed defaults."""

from __future__ import annotations

from memtrain.trainers.data.store.cache import cache_dir

ASSISTANTS_TURNS = (
    "New default: conversations are trained on the assistant's turns; before, on every turn, which "
    "data.assistant_only_loss: false still does. This is said once."
)


def first_time(name: str) -> bool:
    """Whether nobody was told before, as the cache folder remembers; where it cannot be written, it is."""
    mark = cache_dir(None) / "told" / name
    if mark.exists():
        return False
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:
        return True
    return True
