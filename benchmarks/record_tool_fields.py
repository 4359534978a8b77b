"""Record the keys that other trainers have, with their defaults, for the tests of `memtrain import`.

git clone https://github.com/axolotl-ai-cloud/axolotl && git clone https://github.com/hiyouga/LLaMA-Factory
git clone https://github.com/unslothai/unsloth && git clone https://github.com/volcengine/verl
python benchmarks/record_tool_fields.py FOLDER_OF_THE_CLONES tests/recipes/data

Nothing of them is imported: the fields are read from their sources. LLaMA-Factory's and Unsloth's trainers
take the arguments of transformers and TRL too; those are in trl_fields.json.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

AXOLOTL = {
    "config.py": {"AxolotlInputConfig"},
    "deprecated.py": {"DeprecatedParameters", "RemappedParameters"},
    "integrations.py": None,
    "model.py": {"ModelInputConfig", "ModelOutputConfig", "SpecialTokensConfig"},
    "peft.py": {"LoraConfig", "ReLoRAConfig", "PeftConfig"},
    "training.py": {"HyperparametersConfig", "JaggedLRConfig"},
    "multimodal.py": {"MultiModalConfig"},
}
"""Files of src/axolotl/utils/schemas with the classes whose fields are keys of a file; None: all of them."""
AXOLOTL_NESTED = {"trl": ("trl.py", "TRLConfig"), "vllm": ("vllm.py", "VllmConfig")}
AXOLOTL_PLUGINS = ("liger", "cut_cross_entropy")
LLAMAFACTORY = ("data_args", "finetuning_args", "model_args", "training_args")
UNSLOTH = {
    "from_pretrained": (("loader.py", "FastLanguageModel"), ("loader.py", "FastModel")),
    "get_peft_model": (("llama.py", "FastLlamaModel"), ("vision.py", "FastBaseModel")),
}
VERL = {"ppo": "_generated_ppo_trainer.yaml", "sft": "sft_trainer.yaml", "sft optim": "optim/fsdp.yaml"}


def fields_of(path: Path, classes: set[str] | None) -> Iterator[tuple[str, Any]]:
    """(name, default) of every annotated field of some classes of a file; None where it is no plain value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ClassDef) or (classes is not None and node.name not in classes):
            continue
        for line in node.body:
            target = line.target if isinstance(line, ast.AnnAssign) else None
            if isinstance(line, ast.AnnAssign) and isinstance(target, ast.Name) and target.id[0] != "_":
                yield target.id, default_of(line.value)


def default_of(value: ast.expr | None) -> Any:
    """The default that is written in a field: `x = 1`, `x = Field(default=1)`, `field(default=1)`."""
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def arguments_of(path: Path, owner: str, name: str) -> dict[str, Any]:
    """Arguments of a function of a class, with their defaults."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == name:
                    args = function.args
                    defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
                    return {
                        arg.arg: default_of(value) for arg, value in zip(args.args, defaults, strict=True)
                    }
    raise SystemExit(f"{path}: no {owner}.{name}")


def leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a configuration with their values."""
    for key, value in node.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def axolotl(root: Path) -> dict[str, Any]:
    folder = root / "src/axolotl/utils/schemas"
    found: dict[str, Any] = {}
    for name, classes in AXOLOTL.items():
        found |= dict(fields_of(folder / name, classes))
    for section, (name, owner) in AXOLOTL_NESTED.items():
        found |= {f"{section}.{key}": value for key, value in fields_of(folder / name, {owner})}
    for plugin in AXOLOTL_PLUGINS:
        found |= dict(fields_of(root / "src/axolotl/integrations" / plugin / "args.py", None))
    return found


def llamafactory(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in LLAMAFACTORY:
        found |= dict(fields_of(root / "src/llamafactory/hparams" / f"{name}.py", None))
    return found


def unsloth(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for function, places in UNSLOTH.items():
        for name, owner in places:
            asked = arguments_of(root / "unsloth/models" / name, owner, function)
            found = {f"{function}.{key}": value for key, value in asked.items()} | found
    return {key: value for key, value in found.items() if not key.endswith(".model")}


def verl(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, name in VERL.items():
        above = "sft.optim." if kind == "sft optim" else f"{kind}."
        text = yaml.safe_load((root / "verl/trainer/config" / name).read_text())
        found |= {
            f"{above}{key}": value if isinstance(value, bool | int | float | str | list) else None
            for key, value in leaves(text)
            if "_target_" not in key and not key.startswith("defaults")
        }
    return found


TOOLS = {
    "axolotl": ("axolotl", axolotl),
    "llamafactory": ("LLaMA-Factory", llamafactory),
    "unsloth": ("unsloth", unsloth),
    "verl": ("verl", verl),
}


def main() -> None:
    clones, output = Path(sys.argv[1]), Path(sys.argv[2])
    for name, (folder, read) in TOOLS.items():
        git = ["git", "-C", str(clones / folder), "log", "-1", "--format=%H %cs"]
        commit, date = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split()
        recorded = {"source": f"{folder} at {commit}", "date": date, "fields": read(clones / folder)}
        (output / f"{name}_fields.json").write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
