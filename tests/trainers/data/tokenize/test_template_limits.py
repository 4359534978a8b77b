"""A chat template is a stranger's program: its time, memory and text end, and its faults are reported."""

import resource
import signal
import threading
import time

import pytest

from memtrain.errors import DataError
from memtrain.recipes.formats.fields import BadRow
from memtrain.trainers.data.tokenize import template_limits
from memtrain.trainers.data.tokenize.render import Rendering, conversation

CHAT = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"})


def rendered(template: str) -> str:
    return conversation(CHAT, (), Rendering(template, {}, None, False, False))[0]


def state() -> tuple[object, ...]:
    return (
        resource.getrlimit(resource.RLIMIT_AS),
        signal.getsignal(signal.SIGPROF),
        signal.getitimer(signal.ITIMER_PROF),
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
            "{% endfor %}{% endfor %}",
            "takes more than 0.2 s",
        ),
        (
            "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x ** 9 %}{% endfor %}",
            "takes more than 0.2 s",
        ),
        ("{{ 'a' * 10000000000 }}", "takes more than 1 GiB"),
        ("{{ 'a'.center(10000000000) }}", "takes more than 1 GiB"),
        ("{{ '%10000000000d' % 1 }}", "takes more than 1 GiB"),
        ("{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}", "recurses without end"),
        ("{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "nested too deeply"),
        ("{% for m in messages %}", "is not a valid Jinja template"),
        ("{{ 1 | nothing }}", "No filter named 'nothing'"),
    ],
)
def test_a_template_without_end_is_refused_and_the_process_is_as_before(
    template: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(template_limits, "LIMIT_S", 0.2)
    before = state()
    with pytest.raises(DataError) as error:
        rendered(template)
    fault = error.value.faults[0]
    assert said in fault.what
    assert fault.where == "model.chat_template"
    assert "model.chat_template" in fault.fix
    assert state() == before
    assert rendered("{{ messages[0].content }}") == "Hi"


def test_a_text_that_no_conversation_comes_to_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_limits, "LIMIT_LETTERS", 1000)
    assert len(rendered("{{ 'a' * 1000 }}")) == 1000
    with pytest.raises(DataError, match="renders 1,001 characters of one conversation"):
        rendered("{{ 'a' * 1001 }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // 0 }}",
        "{{ messages[9].content }}",
        "{% include '/etc/passwd' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{{ raise_exception('no') }}",
        "{% break %}",
    ],
)
def test_a_template_that_fails_on_a_conversation_makes_it_a_bad_row(template: str):
    with pytest.raises(BadRow, match="the chat template (refuses|fails on) the conversation: .+"):
        rendered(template)


def test_memory_is_limited_in_every_thread():
    caught: list[BaseException] = []

    def work() -> None:
        try:
            rendered("{{ 'a' * 10000000000 }}")
        except DataError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "takes more than 1 GiB" in str(caught[0])


def test_a_refusal_of_another_process_arrives_whole():
    import pickle

    with pytest.raises(DataError) as error:
        rendered("{{ 'a' * 10000000000 }}")
    assert pickle.loads(pickle.dumps(error.value)).faults == error.value.faults


class Slow:
    """Takes its time when it is let go."""

    def __del__(self):
        spend(0.08)


def spend(seconds):
    """Use the processor for so long."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_that_falls_into_a_finalizer_comes_again(monkeypatch):
    """Python prints what a finalizer raises, and goes on: the template had no limit any more."""
    monkeypatch.setattr(template_limits, "LIMIT_S", 0.05)

    def render():
        Slow()
        spend(2.0)

    with pytest.raises(DataError, match="takes more than"):
        template_limits.within_limits(render)
