"""docs/structure.md: the files that a key passes are there, and are few."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_key_passes_ten_files_at_most_and_all_are_there():
    sections = (ROOT / "docs/structure.md").read_text().split("\n## ")[1:]
    assert len(sections) == 4
    for section in sections:
        files = re.findall(r"^\| `(memtrain/[\w/]+\.py)` \|", section, re.MULTILINE)
        assert 3 <= len(files) <= 10, section.partition("\n")[0]
        assert not [name for name in files if not (ROOT / name).is_file()]
