"""Names that no file has: the hub is asked once, and the cache is read where it cannot be asked."""

from types import SimpleNamespace

import pytest

from memtrain.errors import DataError
from memtrain.recipes.sections.data import Source
from memtrain.trainers.data.sources.sources import locate


@pytest.fixture
def hub(monkeypatch):
    """Sets the answer of the hub and of `load_dataset`, and counts what each was asked."""
    import datasets
    import huggingface_hub

    asked = []

    def set_answers(info, load):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            huggingface_hub.HfApi, "dataset_info", lambda *_, **named: asked.append(named) or info()
        )
        monkeypatch.setattr(
            datasets, "load_dataset", lambda *_, **__: asked.append(datasets.config.HF_HUB_OFFLINE) or load()
        )
        return asked

    return set_answers


def unreachable():
    raise ConnectionError("no route")


def missing():
    raise ConnectionError("Couldn't reach 'some/dataset' on the Hub (offline)\nmore")


def test_a_hub_that_cannot_be_reached_is_asked_once_and_not_again_for_the_dataset(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = hub(unreachable, missing)
    with pytest.raises(DataError) as error:
        locate(Source(source="some/dataset"), "text")
    assert error.value.text() == (
        "error: 'some/dataset' is not a file or folder here, and as a hub dataset it is not in the "
        "cache: the hub cannot be reached\n"
        "   at: data\n"
        f"  try: check the spelling; a relative path starts at the current folder, {tmp_path}; for a dataset "
        "of the hub connect this machine, or download its files elsewhere and give their path"
    )
    assert asked == [{"revision": None, "timeout": 3.0}, True]


def test_the_cache_is_read_where_the_hub_cannot_be_reached_and_only_then(hub):
    import datasets

    rows = [{"text": "a"}]
    before = datasets.config.HF_HUB_OFFLINE
    for info, is_offline in ((unreachable, True), (lambda: None, before)):
        asked = hub(info, lambda: datasets.Dataset.from_list(rows))
        (stream,) = locate(Source(source="some/dataset"), "text").streams
        assert [row for _, row in stream.read()] == rows
        assert asked[-1] is is_offline
        assert datasets.config.HF_HUB_OFFLINE is before


def test_a_name_that_the_hub_does_not_have_is_reported_with_the_nearest_file(hub, tmp_path, monkeypatch):
    from huggingface_hub.errors import RepositoryNotFoundError

    def none():
        raise RepositoryNotFoundError("no", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "alpaca.json").write_text("[]")
    hub(none, missing)
    with pytest.raises(DataError, match="'alpaca' is not a file or folder here, and the hub has no") as error:
        locate(Source(source="alpaca"), "text")
    assert error.value.faults[0].fix == "did you mean 'alpaca.json'?"


def test_a_fault_of_a_dataset_that_the_hub_has_keeps_its_own_words(hub):
    hub(lambda: None, missing)
    with pytest.raises(DataError, match="from the Hugging Face hub: Couldn't reach 'some/dataset'"):
        locate(Source(source="some/dataset"), "text")
