"""An answer that stops at the limit of its tokens is known from one that the model ended."""

from types import SimpleNamespace

import pytest
import torch

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
