"""Links of the manual lead somewhere and say their subject; commands of the tutorials are accepted."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from memtrain.cli.app import app
from memtrain.recipes.reading.field_types import every_key
from memtrain.recipes.recipe import Recipe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"(?<!`)\[(?P<text>[^\]\[]+)\]\((?P<target>[^)\s]+)\)")
REPOSITORY = "https://github.com/memtrain/memtrain/"
KEYS = frozenset(every_key(Recipe))


def text_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names that the headings of a page get, as python-markdown makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text_of(page), re.M):
        plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", plain))
    return found


def broken(page: Path, target: str) -> bool:
    if target.startswith(REPOSITORY):
        target = f"{ROOT}/{re.sub(r'^(blob|tree)/main/', '', target.removeprefix(REPOSITORY))}"
    elif target.startswith(("http://", "https://")):
        return False
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    return not file.exists() or bool(anchor and anchor not in anchors(file))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere_and_says_its_subject(page: Path):
    links = [(link["text"], link["target"]) for link in LINK.finditer(text_of(page))]
    assert [link for link in links if broken(page, link[1])] == []
    of_manual = [] if page.parent == ROOT else links
    assert [text for text, _ in of_manual if re.fullmatch(r"`?[\w./-]+\.(md|py)`?", text)] == []


def test_the_navigation_holds_every_page_once():
    def pages(entries: list[object]) -> list[str]:
        found: list[str] = []
        for entry in entries:
            values = entry.values() if isinstance(entry, dict) else [entry]
            for value in values:
                found += pages(value) if isinstance(value, list) else [str(value)]
        return found

    site = tomllib.loads((ROOT / "zensical.toml").read_text())
    assert sorted(pages(site["project"]["nav"])) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )


def test_the_search_of_the_site_needs_no_network():
    """The offline plugin fetches its shim from a server of others unless the site brings one by that name."""
    site = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    assert site["plugins"]["offline"]["enabled"]
    shims = [one["path"] for one in site["extra"]["polyfills"] if "iframe-worker" in one["path"]]
    assert len(shims) == 1
    assert "window.Worker = " in (DOCS / shims[0]).read_text()


def tutorial_commands() -> list[str]:
    """The command lines of the console blocks, without what they are piped into."""
    found: list[str] = []
    for page in sorted((DOCS / "tutorials").glob("*.md")):
        for body in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S):
            lines = re.findall(r'^\$ (memtrain (?:[^"\n\\]|\\\n|"[^"]*")*)', body, re.M)
            found += [line.replace("\\\n", " ").partition("|")[0] for line in lines]
    return found


def test_every_command_of_the_tutorials_is_accepted():
    commands = tutorial_commands()
    assert len(commands) > 10
    for line in commands:
        name, *words = shlex.split(line)[1:]
        command = typer.main.get_command(app).get_command(None, name)  # pyright: ignore
        with command.make_context(name, words) as context:  # Raises where an option or argument is wrong.
            overrides = context.params.get("overrides") or ()
            assert [word for word in overrides if word.split("=")[0] not in KEYS] == [], line
