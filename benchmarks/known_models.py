"""Make the table of shapes that are known offline from the public files that its entries name.

    python benchmarks/known_models.py                    # reads the sources anew: needs the network
    python benchmarks/known_models.py --clones FOLDER    # GitHub's from FOLDER/owner+name/repo (bare clones)

An entry of memtrain/memory/model_shape/known_models.json has `names` (lower case, without owner and words of
copies), `source` and `config`. Where `source` is a config.json, or `FILE.py#NAME` a literal of one, `config`
is read from it; `read: "by hand"` marks the others, whose numbers were typed from the source (a table, a
command line); `like` is another name of the table. To add a model, write its names and its source, and run
this. Entries that cannot be reached stay as they are, and are listed.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any, cast

TABLE = Path(__file__).parents[1] / "memtrain" / "memory" / "model_shape" / "known_models.json"
GITHUB = re.compile(r"https://github\.com/([^/]+)/([^/]+)/blob/([0-9a-f]{40})/([^#]+)(?:#(\w+))?")
HUB = re.compile(r"https://huggingface\.co/([^/]+/[^/]+)/blob/main/config\.json")

NO_SHAPE = re.compile(
    r"architectures|auto_map|(torch_)?dtype|transformers_version|.*token_(id|ids|index)|use_cache|_name_or_path"
    r"|initializer_(range|factor)|quantization_config|id2label|label2id|return_dict|output_(scores|hidden_states"
    r"|attentions)|torchscript|use_bfloat16|problem_type|task_specific_params|tokenizer_class|finetuning_task"
    r"|pruned_heads|tf_legacy_loss|prefix|is_encoder_decoder|is_decoder|add_cross_attention|.*_beam.*|.*penalty"
    r"|top_[kp]|typical_p|temperature|do_sample|early_stopping|min_length|max_length|no_repeat_ngram_size"
    r"|encoder_no_.*|bad_words_ids|suppress_tokens|begin_suppress.*|forced_.*|num_return_sequences"
    r"|remove_invalid_values|exponential_decay.*|return_dict_in_generate|cross_attention_hidden_size"
    r"|tie_encoder_decoder|pretraining_tp|unsloth_fixed"
)
"""Keys that say nothing of a model's shape."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clones", type=Path)
    clones = parser.parse_args().clones
    table = json.loads(TABLE.read_text())
    unread: list[str] = []
    for entry in table["models"]:
        if "like" in entry or entry.get("read") == "by hand":
            continue
        try:
            entry["config"] = shape_keys(read(entry["source"], clones))
        except (OSError, subprocess.CalledProcessError) as error:
            unread.append(f"{entry['source']} ({type(error).__name__})")
    write(table)
    print(f"{len(table['models'])} models; not read: {', '.join(unread) or 'none'}")


def read(source: str, clones: Path | None) -> dict[str, Any]:
    """The configuration at an address."""
    if found := GITHUB.fullmatch(source):
        owner, name, commit, path, variable = found.groups()
        text = _of_github(owner, name, commit, path, clones)
        return json.loads(text) if variable is None else literals(text)[variable]
    hub = HUB.fullmatch(source)
    if hub is None or clones is not None:
        raise FileNotFoundError(source)
    with urllib.request.urlopen(f"https://huggingface.co/{hub[1]}/resolve/main/config.json") as answer:
        return json.load(answer)


def _of_github(owner: str, name: str, commit: str, path: str, clones: Path | None) -> str:
    if clones is None:
        address = f"https://raw.githubusercontent.com/{owner}/{name}/{commit}/{path}"
        with urllib.request.urlopen(address) as answer:
            return answer.read().decode()
    command = ["git", f"--git-dir={clones / f'{owner}+{name}' / 'repo'}", "show", f"{commit}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def literals(text: str) -> dict[str, Any]:
    """Mappings that a Python file writes down, or makes of others by copying and updating; nothing is called
    but `copy` and `update` of them."""
    found: dict[str, Any] = {}
    for line in ast.parse(text).body:
        value = line.value if isinstance(line, ast.Assign | ast.Expr) else None
        if value is None:
            continue
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            made = _value(value, found)
            if isinstance(made, dict):
                found[line.targets[0].id] = made
        elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Subscript):
            at = line.targets[0]
            if isinstance(at.value, ast.Name) and at.value.id in found:
                found[at.value.id][_value(at.slice, found)] = _value(value, found)
        elif isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".update"):
            target = _value(cast(ast.Attribute, value.func).value, found)
            if isinstance(target, dict):
                target.update(_value(value.args[0], found))
    return found


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """The value of a literal over names that are known; None of anything else."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return known.get(node.id)
        case ast.List() | ast.Tuple():
            return [_value(item, known) for item in node.elts]
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, known)
        case ast.BinOp(op=ast.Mult()):
            return _value(node.left, known) * _value(node.right, known)
        case ast.BinOp(op=ast.Add()):
            return _value(node.left, known) + _value(node.right, known)
        case ast.Subscript():
            held = _value(node.value, known)
            return held[_value(node.slice, known)] if isinstance(held, dict) else None
        case ast.Call(func=ast.Attribute(value=of, attr="copy")):
            held = _value(of, known)
            return dict(held) if isinstance(held, dict) else None
        case ast.Dict():
            made: dict[str, Any] = {}
            for key, value in zip(node.keys, node.values, strict=True):
                made |= (
                    _value(value, known) or {} if key is None else {_value(key, known): _value(value, known)}
                )
            return made
        case _:
            return None


def shape_keys(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without keys that say nothing of the shape, its parts too."""
    return {
        key: shape_keys(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not NO_SHAPE.fullmatch(key)
    }


def write(table: dict[str, Any]) -> None:
    """The table, a line for each model."""
    lines = ",\n".join(json.dumps(entry) for entry in table["models"])
    TABLE.write_text('{"models": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
