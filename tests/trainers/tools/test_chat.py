"""An answer that stops at the limit of its tokens is known from one that the model ended."""

from types import SimpleNamespace

import pytest
import torch

from memtrain.errors import LaunchError
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.tools import chat


@pytest.mark.parametrize(("ends", "is_cut"), [(False, True), (True, False)])
def test_an_answer_that_is_full_is_cut_unless_its_last_token_ends_it(
    monkeypatch: pytest.MonkeyPatch, ends: bool, is_cut: bool
):
    tokenizer = load_tokenizer("builtin:tiny")

    def generate(ids: torch.Tensor, *, max_new_tokens: int, **_: object) -> torch.Tensor:
        new = [65] * (max_new_tokens - 1) + [tokenizer.eos_token_id if ends else 65]
        return torch.cat([ids, torch.tensor([new])], 1)

    model = SimpleNamespace(
        device="cpu",
        generate=generate,
        generation_config=SimpleNamespace(eos_token_id=[tokenizer.eos_token_id]),
    )
    monkeypatch.setattr(chat, "load_trained", lambda *_: model)
    trained: object = SimpleNamespace(folder="builtin:tiny")
    talk = chat.Chat(trained)  # pyright: ignore[reportArgumentType]
    talk.answer("Hello", lambda _: None, max_tokens=4, temperature=0)
    assert talk.is_cut is is_cut


def talk_of(monkeypatch: pytest.MonkeyPatch, generate: object) -> chat.Chat:
    """A chat whose model writes by a function."""
    model = SimpleNamespace(
        device="cpu", generate=generate, generation_config=SimpleNamespace(eos_token_id=[0])
    )
    monkeypatch.setattr(chat, "load_trained", lambda *_: model)
    trained: object = SimpleNamespace(folder="builtin:tiny")
    return chat.Chat(trained, "Be kind.")  # pyright: ignore[reportArgumentType]


def test_an_answer_that_ctrl_c_stops_stays_in_the_turns(monkeypatch: pytest.MonkeyPatch):
    def generate(ids: torch.Tensor, *, streamer: chat._Written, **_: object) -> torch.Tensor:
        streamer.on_finalized_text("half an ")
        raise KeyboardInterrupt

    talk, written = talk_of(monkeypatch, generate), list[str]()
    with pytest.raises(KeyboardInterrupt):
        talk.answer("Hello", written.append, max_tokens=4, temperature=0)
    assert written == ["half an "]
    assert [one["content"] for one in talk.messages] == ["Be kind.", "Hello", "half an"]
    talk.reset()
    assert [one["role"] for one in talk.messages] == ["system"]


def test_a_template_that_refuses_a_system_prompt_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch):
    talk = talk_of(monkeypatch, None)
    talk.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    with pytest.raises(LaunchError, match="refuses these turns: no system role") as error:
        talk.answer("Hello", print, max_tokens=4, temperature=0)
    assert error.value.faults[0].fix == "chat without --system"
    assert len(talk.messages) == 1
