import os
import resource
import shlex
import subprocess
import sys

import pytest
import typer

from memtrain import __version__
from memtrain.__main__ import main
from memtrain.cli.app import COMMANDS, app
from memtrain.cli.examples import examples_of
from memtrain.recipes.reading.field_types import every_key
from memtrain.recipes.recipe import Recipe

KEYS = frozenset(every_key(Recipe))
HEAVY = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "pydantic",
    "omegaconf",
    "numpy",
    "rich",
    "yaml",
)


def test_help_imports_nothing_heavy_and_is_soon_there():
    """Under 0.3 s of CPU time, the smallest of three starts (the machine may be busy)."""
    code = (
        "import sys; from memtrain.__main__ import main; main(['--help'])\n"
        f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    seconds: list[float] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        reported = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert reported.endswith("HEAVY []\n"), reported
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    reported = capsys.readouterr().out
    assert not [verb.name for verb in COMMANDS if f"\n  {verb.name} " not in reported]


def test_no_verb_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    reported = capsys.readouterr().out
    assert "Commands:" in reported
    assert "memtrain plan Qwen" in " ".join(reported.split())


@pytest.mark.parametrize("verb", [verb.name for verb in COMMANDS])
def test_every_verb_has_a_help_of_its_own(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: memtrain {verb}")


def test_the_version_is_reported(capsys: pytest.CaptureFixture[str]):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"memtrain {__version__}\n"


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (
            ["chek"],
            "error: 'chek' is not a memtrain command\n   at: the command line\n"
            "  try: did you mean check or schema?\n",
        ),
        (
            ["zzz"],
            "error: 'zzz' is not a memtrain command\n   at: the command line\n  try: the commands are ",
        ),
        (
            ["check"],
            "error: missing argument 'RECIPE'\n   at: memtrain check\n  try: see memtrain check --help\n",
        ),
        (
            ["check", "x", "--foo"],
            "error: no such option: --foo\n   at: memtrain check\n  try: see memtrain check --help\n",
        ),
        (
            ["sft", "x", "--optim.lr", "2e-4"],
            "error: --optim.lr is a key of the recipe, not an option\n   at: the command line\n"
            "  try: write optim.lr=VALUE\n",
        ),
        (["--foo"], "error: no such option: --foo\n   at: memtrain\n  try: see memtrain --help\n"),
    ],
)
def test_wrong_words_are_reported_like_every_other_error(
    words: list[str], reported: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(reported)


def test_a_fault_of_ours_says_so_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(arguments: object) -> int:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("memtrain.cli.app.run", broken)
    assert main(["check"]) == 70
    reported = capsys.readouterr().err
    assert reported.startswith("this is a bug in memtrain")
    assert "ZeroDivisionError: oh" in reported


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("memtrain.cli.app.run", interrupted)
    assert main(["check"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("memtrain che", "check"),
        ("memtrain check smoke/sft-", "smoke/sft-lora"),
        ("memtrain check smoke/sft optim.sched", "optim.schedule="),
        ("memtrain recipes show sft/smol", "sft/smollm3-3b-full"),
        ("memtrain init s", "sft"),
    ],
)
def test_the_shell_completes_verbs_recipes_and_keys(words: str, wanted: str):
    environment = os.environ | {
        "_MEMTRAIN_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    reported = subprocess.run(
        [sys.executable, "-m", "memtrain"], env=environment, capture_output=True, text=True, check=False
    )
    assert wanted in reported.stdout.split("\n"), reported.stderr


def test_a_reader_that_leaves_early_is_no_error():
    reported = subprocess.run(
        f"{sys.executable} -m memtrain schema | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    assert reported.stdout == "{\n"
    assert reported.stderr == ""


@pytest.mark.parametrize("verb", [verb.name for verb in COMMANDS])
def test_every_help_has_examples_that_the_command_takes(verb: str, capsys: pytest.CaptureFixture[str]):
    assert main([verb, "--help"]) == 0
    reported = capsys.readouterr().out
    assert "\n  Examples:\n" in reported
    for line in examples_of(verb):
        assert f"\n    {line}\n" in reported
        name, *words = shlex.split(line, comments=True)[1:]
        command = typer.main.get_command(app).get_command(None, name)  # pyright: ignore
        with command.make_context(name, words) as context:  # Raises where an option or argument is wrong.
            for word in context.params.get("overrides") or ():
                assert word.split("=")[0] in KEYS or word.startswith(("--", "-"))


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("online_dpo", "online-dpo"),
        ("Online-DPO", "online-dpo"),
        ("OnlineDPO", "online-dpo"),
        ("INSPECT_LENGTHS", "inspect-lengths"),
        ("distillation", "distill"),
    ],
)
def test_a_command_is_known_however_it_is_spelled(
    spelling: str, name: str, capsys: pytest.CaptureFixture[str]
):
    assert main([spelling, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: memtrain {name}")
