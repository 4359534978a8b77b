"""An answer that stops at the limit of its tokens is known from one that the model ended."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memtrain.cli.commands import chat as command
from memtrain.errors import DataError, LaunchError
from memtrain.trainers.data.tokenize import template_limits
from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer
from memtrain.trainers.tools import chat
from memtrain.trainers.tools.trained_model import TrainedModel


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


def test_an_adapter_stops_at_the_end_of_turns_that_it_learned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Its base knew the end of texts alone, and answers went on to `--max-tokens`."""
    (tmp_path / chat.PLAN_FILE).write_text("")
    settings = SimpleNamespace(model_copy=lambda update: SimpleNamespace(**update), device="cpu")
    recipe = SimpleNamespace(model=None, method="sft", train=SimpleNamespace(seed=0))
    data = SimpleNamespace(turn_end=SimpleNamespace(token_id=7))
    plan = SimpleNamespace(recipe=recipe, settings=settings, data=data)
    base = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=2))
    base.to = lambda device: base
    base.eval = lambda: base
    monkeypatch.setattr(chat, "plan_of_run", lambda run: plan)
    monkeypatch.setattr(chat, "load_model", lambda *_, **__: base)
    monkeypatch.setattr(chat, "load_adapter", lambda model, folder: model)
    trained = TrainedModel(tmp_path, tmp_path / "final", "run", {}, is_adapter=True)
    assert chat.load_trained(trained, 10).generation_config.eos_token_id == [2, 7]


def test_at_a_terminal_a_slash_is_a_command_and_ctrl_c_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`/help` was answered by the model, and Ctrl-C between two answers ended the conversation."""
    typed: list[str | type[BaseException]] = [
        "Hi",
        KeyboardInterrupt,
        "/help",
        "/usr/bin is?",
        "/reset",
        "/quit",
        "no",
    ]

    def give(prompt: str) -> str:
        one = typed.pop(0)
        if isinstance(one, str):
            return one
        raise one

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", give)
    assert list(command._turns()) == ["Hi", "/usr/bin is?", "/reset"]
    assert capsys.readouterr().err.count(command.COMMANDS) == 3


ENDLESS = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "takes more than",
    "{{ 'a' * 70000000 }}": "renders 70,000,000 characters",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "recurses without end",
}


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_end_is_held_to_its_limits_in_a_chat_too(monkeypatch, template):
    if "range" in template:
        monkeypatch.setattr(template_limits, "LIMIT_S", 0.2)
    talk = talk_of(monkeypatch, None)
    talk.tokenizer.chat_template = template
    with pytest.raises(DataError, match=ENDLESS[template]):
        talk.answer("Hello", print, max_tokens=4, temperature=0)
