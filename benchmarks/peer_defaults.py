"""Compare the defaults in the tables of other trainers with those of the packages on PyPI.

python benchmarks/peer_defaults.py --get packages     # downloads and unpacks the wheels; installs nothing
python benchmarks/peer_defaults.py packages [trl axolotl ...]

Nothing of them is imported: fields and arguments are read from their sources, by record_tool_fields.py. Told
are defaults that differ from the table's (`wrong`), and those that the tables do not say though memtrain, or
TRL whose key it is, takes another (`unsaid`): there a recipe may train something else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from record_tool_fields import AXOLOTL, LLAMAFACTORY, UNSLOTH, VERL, arguments_of, fields_of, leaves, yaml

from memtrain.recipes.peers.table import Row, Same, table, yaml_word
from memtrain.recipes.trl.writing import default_of

PACKAGES = (
    "trl==1.16.0",
    "transformers",
    "peft",
    "axolotl==0.19.0",
    "llamafactory==0.9.5",
    "unsloth",
    "verl",
)
"""What is downloaded, of the versions in the tables."""

_BASE = (
    ("transformers/training_args.py", "TrainingArguments"),
    ("trl/trainer/base_config.py", "_BaseConfig"),
)
_BESIDE = (
    ("trl/trainer/model_config.py", "ModelConfig"),
    ("trl/scripts/utils.py", "ScriptArguments"),
    ("trl/scripts/utils.py", "DatasetMixtureConfig"),
)
_SFT = ("trl/trainer/sft_config.py", "SFTConfig")
TRL: Mapping[str, tuple[tuple[str, str], ...]] = {
    "sft": (_SFT,),
    "distill": (_SFT, ("trl/experimental/gkd/gkd_config.py", "GKDConfig")),
    "dpo": (("trl/trainer/dpo_config.py", "DPOConfig"),),
    "kto": (("trl/trainer/kto_config.py", "KTOConfig"),),
    "reward": (("trl/trainer/reward_config.py", "RewardConfig"),),
    "grpo": (("trl/trainer/grpo_config.py", "GRPOConfig"),),
    "rloo": (("trl/trainer/rloo_config.py", "RLOOConfig"),),
}
"""Files and classes of TRL's fields by method, the base first."""

CHOSEN = ("auto", "off", "on")
"""Words of memtrain's own defaults that choose between computations of the same numbers."""


def main() -> int:
    """Print what differs; 1 where a table is wrong."""
    folder, *names = [one for one in sys.argv[1:] if one != "--get"]
    root = Path(folder)
    if "--get" in sys.argv:
        get(root)
        return 0
    wrong = 0
    for name, read in READERS.items():
        for method, fields in read(root) if not names or name in names else ():
            for word, key, ours, theirs in compared(name, method, fields):
                wrong += word == "wrong"
                print(f"{word:6} {name:12} {method:8} {key}: {theirs!r} there, {ours!r} here")
    return int(wrong > 0)


def get(root: Path) -> None:
    """Download the wheels and unpack them into a folder."""
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
        subprocess.run([*pip, *PACKAGES], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(root)


def compared(name: str, method: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """(wrong or unsaid, key, the value here, the value there)."""
    for key, row in table(name).rows.items():
        if key not in fields:
            continue
        theirs, said = fields[key], row.default_of(method)
        if said is not None:
            if theirs is not None and yaml_word(said) != yaml_word(theirs):
                yield "wrong", key, said, theirs
        elif theirs is not None and (differs := _taken(row, method, theirs)) is not None:
            yield "unsaid", key, differs, theirs


def _taken(row: Row, method: str, theirs: Any) -> Any:
    """What is trained with where the key is not written, if that is not the tool's default."""
    taken = row.taken(theirs)
    while row.trl:
        row = table("trl").rows[row.trl]
        said = row.default_of(method)
        if said is not None:
            return None if yaml_word(said) == yaml_word(taken) else said
        taken = row.taken(taken)
    if not row.is_carried or taken in (None, Same):
        return None
    section = row.to.format(method=method).partition(".")[0]
    if section in TRL and (section != method or section in ("sft", "distill")):
        return None
    ours = default_of(row.to.format(method=method))
    return None if ours is None or ours in CHOSEN or yaml_word(ours) == yaml_word(taken) else ours


def trl(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(method, fields with their defaults)."""
    for method, classes in TRL.items():
        found: dict[str, Any] = {}
        for file, owner in (*_BASE, *_BESIDE, *classes):
            found |= dict(fields_of(root / file, {owner}))
        yield method, found


def axolotl(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    found: dict[str, Any] = {}
    for file, classes in AXOLOTL.items():
        found |= dict(fields_of(root / "axolotl/utils/schemas" / file, classes))
    yield "sft", found


def llamafactory(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    found = dict(fields_of(root / "transformers/training_args.py", {"TrainingArguments"}))
    for file in LLAMAFACTORY:
        found |= dict(fields_of(root / "llamafactory/hparams" / f"{file}.py", None))
    yield "sft", found


def unsloth(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    found: dict[str, Any] = {}
    for function, places in UNSLOTH.items():
        for file, owner in places:
            asked = arguments_of(root / "unsloth/models" / file, owner, function)
            found = {f"{function}.{key}": value for key, value in asked.items()} | found
    yield "sft", found


def verl(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, method in (("ppo", "grpo"), ("sft", "sft")):
        file = root / "verl/trainer/config" / VERL[kind]
        if file.is_file():
            yield method, dict(leaves(yaml.safe_load(file.read_text())))


READERS = {"trl": trl, "axolotl": axolotl, "llamafactory": llamafactory, "unsloth": unsloth, "verl": verl}

if __name__ == "__main__":
    sys.exit(main())
