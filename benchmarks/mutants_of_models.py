"""Model folders, mutated: broken downloads, impossible configurations, hostile templates. By a seed each.

`make_models` saves small models of three families; `mutate` damages a copy of one in one to three ways, and
says how. Used by the tests (a few hundred) and by benchmarks/broken_inputs.py (as many as asked for).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

NUMBERS: list[Any] = [0, -1, 1, 3, 7, 2**31, 2**63, 10**30, 1e308, -1e-300, 0.5, float("nan"), float("inf")]
OTHERS: list[Any] = [
    None,
    True,
    "",
    "wide",
    "\x1b[31mred",
    "\ud800",
    [],
    {},
    [1, [2]],
    {"a": {"b": 1}},
    ["x"] * 50,
]
NAMES = [
    "llama",
    "qwen3",
    "gpt2",
    "t5",
    "bert",
    "mamba",
    "their_own",
    "LLAMA",
    "qwen3_moe",
    "gemma2",
    "falcon",
]
KEYS: dict[str, list[Any]] = {
    "hidden_act": ["no_such_act", "gelu", "quick_gelu", 3, None],
    "model_type": [*NAMES, 3, None],
    "architectures": [["T5ForConditionalGeneration"], ["BertModel"], "LlamaForCausalLM", [], [3], None],
    "rope_parameters": [
        {"rope_type": "no_such_rope", "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": -4, "rope_theta": 1e4},
        {"rope_type": "llama3", "rope_theta": 1e4},
        {"rope_theta": 0},
        "linear",
    ],
    "rope_scaling": [{"type": "no_such"}, {"rope_type": "dynamic", "factor": "two"}, 3],
    "attn_implementation": ["kernels-community/flash-attn3", "someone/theirs:attend", "eager", "nothing", 3],
    "experts_implementation": ["someone/theirs", "eager"],
    "auto_map": [{"AutoConfig": "code.Theirs", "AutoModelForCausalLM": "code.Model"}, "x", {"AutoConfig": 3}],
    "quantization_config": [{"quant_method": "gptq", "bits": 4}, {"quant_method": "no_such"}, {}, "4bit"],
    "torch_dtype": ["float1", "bfloat16", 3],
    "dtype": ["float1", "int8", 3],
    "layer_types": [["full_attention"], ["no_such"] * 2, "full_attention", 5, ["sliding_attention"] * 2],
    "tie_word_embeddings": ["yes", 1, None],
    "num_key_value_heads": [3, 0, 8],
    "eos_token_id": [10**9, -5, "end", [1, "x"], {}],
    "pad_token_id": [10**9, -5, "pad"],
    "num_labels": [-1, 10**9, "one"],
    "id2label": [{"x": "y"}, 3],
    "is_encoder_decoder": [True, "no"],
    "text_config": [{}, {"model_type": "llama"}, 3, {"attn_implementation": "someone/theirs"}],
    "pruned_heads": [{"0": [0]}, 3],
    "transformers_weights": ["../elsewhere.safetensors", "no.safetensors", 3],
    "use_kernels": [True],
    "kernel_config": [{"RMSNorm": "someone/theirs"}],
    "output_hidden_states": ["x"],
    "use_cache": ["x"],
    "return_dict": [False],
    "chunk_size_feed_forward": [-3],
}
"""Keys of a config.json with what was never meant for them."""

TEMPLATES = [
    "{{ 1 // 0 }}",
    "{{ 1 % 0 }}",
    "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{{ 'a' * 10000000000 }}",
    "{{ 'a'.center(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x ** 9 %}{% endfor %}{{ ns.x }}",
    "{{ messages | list | map('list') | sum(start=[]) | length }}",
    "{% for m in messages %}{{ m.content",
    "{{ no_such_filter | nothing }}",
    "{{ raise_exception('\x1b[31mno\x07') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{{ cycler.__init__.__globals__.os.popen('touch /tmp/owned').read() }}",
    "{{ lipsum.__globals__['os'].environ }}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{% if " * 200 + "x" + " %}" * 200,
    "{% for m in messages %}{{ m['content']['text'] }}{% endfor %}",
    "{{ messages[9].content }}",
    "{{ undefined_thing.attribute }}",
    "",
    "{# nothing #}",
    "\x00\x1b{{ messages[0].content }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% break %}",
    "{{ messages | tojson(indent=100000000) }}",
    "{% set x = messages %}{% for i in range(30) %}{% set x = x + x %}{% endfor %}{{ x }}",
]
"""Chat templates that divide by zero, recurse, loop, make gigabytes, look around, or are none."""

Mutation = Callable[[Path, random.Random], str]


def make_models(folder: Path) -> list[Path]:
    """Three models to begin from: one file, two shards with an index, and one whose head is tied."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from memtrain.trainers.data.tokenize.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("builtin:tiny")
    made: list[Path] = []
    for name, tied, shard in (("llama", False, "1GB"), ("qwen3", False, "60KB"), ("gpt2", True, "1GB")):
        config = AutoConfig.for_model(
            name, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=512, tie_word_embeddings=tied,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
            **({} if name == "gpt2" else {"num_key_value_heads": 2, "head_dim": 8}),
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / name, max_shard_size=shard)
        tokenizer.save_pretrained(folder / name)
        made.append(folder / name)
    return made


def mutate(models: list[Path], place: Path, seed: int) -> str:
    """A damaged copy of one of the models at `place`; how it was damaged."""
    random_ = random.Random(seed)
    if place.exists():
        shutil.rmtree(place)
    base = random_.choice(models)
    shutil.copytree(base, place)
    done = [random_.choice(MUTATIONS)(place, random_) for _ in range(random_.choice([1, 1, 1, 2, 3]))]
    return f"{base.name}: {'; '.join(done)}"


def _pick(place: Path, random_: random.Random, *patterns: str) -> Path | None:
    files = sorted(path for pattern in patterns for path in place.glob(pattern) if path.is_file())
    return random_.choice(files) if files else None


def _value(random_: random.Random) -> Any:
    return random_.choice(random_.choice([NUMBERS, OTHERS]))


def _config_key(place: Path, random_: random.Random) -> str:
    """A key of the config.json gets a value that was never meant for it, or is gone."""
    file = place / "config.json"
    given = _read(file)
    if not isinstance(given, dict):
        return "config.json left as it is"
    key = random_.choice([*given, *KEYS, *KEYS])
    if random_.random() < 0.12:
        given.pop(key, None)
        said = f"config.json without {key}"
    else:
        given[key] = random_.choice(KEYS[key]) if key in KEYS and random_.random() < 0.8 else _value(random_)
        said = f"config.json {key}={given[key]!r}"[:200]
    file.write_text(json.dumps(given))
    return said


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def _cut(place: Path, random_: random.Random) -> str:
    """A file ends too early: an interrupted download."""
    file = _pick(place, random_, "*.safetensors", "*.safetensors", "*.json")
    if file is None:
        return "nothing to cut"
    size = file.stat().st_size
    left = random_.choice([0, 1, 7, 8, 9, 100, size // 2, max(0, size - 1), random_.randrange(size + 1)])
    os.truncate(file, min(left, size))
    return f"{file.name} cut to {min(left, size)} of {size} bytes"


def _bytes(place: Path, random_: random.Random) -> str:
    """Bytes of a file are others: of its header, or anywhere."""
    file = _pick(place, random_, "*.safetensors", "*.json")
    if file is None or not file.stat().st_size:
        return "nothing to damage"
    raw = bytearray(file.read_bytes())
    end = min(len(raw), 3000) if random_.random() < 0.8 else len(raw)
    at = random_.randrange(end)
    raw[at : at + random_.choice([0, 1, 1, 4])] = random_.randbytes(random_.choice([0, 1, 1, 4, 40]))
    file.write_bytes(raw)
    return f"bytes at {at} of {file.name}"


def _header(place: Path, random_: random.Random) -> str:
    """The header of a weight file says something else than its bytes."""
    file = _pick(place, random_, "*.safetensors")
    if file is None or file.stat().st_size < 16:
        return "no header"
    raw = file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    try:
        header = json.loads(raw[8 : 8 + size])
        name = random_.choice([key for key in header if isinstance(header[key], dict) and key[0] != "_"])
    except (ValueError, IndexError, RecursionError, TypeError):
        return "header unread"
    way = random_.randrange(7)
    if way == 0:
        header[name]["shape"] = random_.choice([[], [1], [-1, 32], [2**40], "wide", [3, 5, 7]])
    elif way == 1:
        header[name]["dtype"] = random_.choice(["F16", "I64", "BOOL", "F8_E4M3", "NOPE", 3])
    elif way == 2:
        header[name]["data_offsets"] = random_.choice([[0, 2**50], [-4, 4], [8, 0], [], "x", [0, 4]])
    elif way == 3:
        header[f"{name}.other"] = header.pop(name)
    elif way == 4:
        header["__metadata__"] = random_.choice([None, {"format": "tf"}, {"format": 3}, "x", {}])
    elif way == 5:
        header = random_.choice([[], {}, "x", {"a": 1}, {"a": None}])
    else:
        size = random_.choice([0, 1, 2**40, 2**64 - 1, 10**8 + 1])
        file.write_bytes(struct.pack("<Q", size) + raw[8:])
        return f"header of {file.name} says it has {size} bytes"
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw[8 + struct.unpack("<Q", raw[:8])[0] :])
    return f"header of {file.name}, way {way}, {name}"


def _file(place: Path, random_: random.Random) -> str:
    """A file is missing, a folder, a pointer, a link into nowhere or to itself, or pickled."""
    file = _pick(place, random_, "*.safetensors", "*.json")
    if file is None:
        return "nothing to take"
    file.unlink()
    way = random_.choice(["missing", "folder", "pointer", "dangling", "loop", "pickle", "text", "nested"])
    if way == "folder":
        file.mkdir()
    elif way == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    elif way == "dangling":
        file.symlink_to(place / "nowhere")
    elif way == "loop":
        file.symlink_to(file)
    elif way == "pickle":
        (place / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    elif way == "text":
        file.write_text(
            random_.choice(["", " ", "null", "[]", "3", "{", '"x"', "<html>404</html>", "\ufeff{}"])
        )
    elif way == "nested":
        file.write_text("[" * 100_000)
    return f"{file.name}: {way}"


def _index(place: Path, random_: random.Random) -> str:
    """The index of the shards names other files, or is none."""
    file = place / "model.safetensors.index.json"
    given = _read(file)
    if not isinstance(given, dict) or not isinstance(given.get("weight_map"), dict):
        return _config_key(place, random_)
    placed: dict[str, Any] = given["weight_map"]
    name = random_.choice(list(placed))
    way = random_.randrange(5)
    if way == 0:
        placed[name] = random_.choice(["../elsewhere.safetensors", "/etc/passwd", "no.safetensors", 3, None])
    elif way == 1:
        del placed[name]
    elif way == 2:
        placed["model.no_such.weight"] = placed[name]
    elif way == 3:
        given["weight_map"] = random_.choice([{}, [], None, "x"])
    else:
        files = sorted(set(map(str, placed.values())))
        placed[name] = random_.choice(files)
    file.write_text(json.dumps(given))
    return f"index, way {way}, {name}"


def _template(place: Path, random_: random.Random) -> str:
    """The model comes with a hostile chat template."""
    text = random_.choice(TEMPLATES)
    (place / "chat_template.jinja").write_text(text)
    return f"template {text[:60]!r}"


def _tokenizer(place: Path, random_: random.Random) -> str:
    """Something of the tokenizer's files is not what it should be."""
    file = _pick(place, random_, "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json")
    given = None if file is None else _read(file)
    if file is None or not isinstance(given, dict) or not given:
        return _config_key(place, random_)
    key = random_.choice([*given, "tokenizer_class", "auto_map", "eos_token", "extra_special_tokens"])
    special: dict[str, list[Any]] = {
        "tokenizer_class": ["NoSuchTokenizer", "LlamaTokenizer", "BertTokenizer", 3, None],
        "auto_map": [{"AutoTokenizer": ["code.Theirs", None]}],
        "eos_token": ["<not there>", 3, {"content": "x", "__type": "AddedToken"}, None, "\ud800"],
    }
    given[key] = random_.choice(special[key]) if key in special else _value(random_)
    file.write_text(json.dumps(given))
    return f"{file.name} {key}={given[key]!r}"[:200]


def _generation(place: Path, random_: random.Random) -> str:
    """A generation_config.json that nobody asked for."""
    keys = ["temperature", "top_k", "eos_token_id", "custom_generate", "cache_implementation", "x"]
    given = {random_.choice(keys): _value(random_) for _ in range(3)}
    (place / "generation_config.json").write_text(random_.choice(["", "[", json.dumps(given), "[]", "null"]))
    return f"generation_config.json {given!r}"[:200]


def _adapter(place: Path, random_: random.Random) -> str:
    """The folder says that it is an adapter, in some way."""
    given: Any = random_.choice(
        [
            {"peft_type": "LORA", "base_model_name_or_path": "no/where"},
            {"base_model_name_or_path": 3, "task_type": []},
            {},
            [],
            "x",
            {"base_model_name_or_path": "\x1b[31m"},
        ]
    )
    text = random_.choice([json.dumps(given), json.dumps(given)[:-1], "", "{"])
    (place / "adapter_config.json").write_text(text)
    return f"adapter_config.json {text!r}"


MUTATIONS: list[Mutation] = [
    *[_config_key] * 7,
    *[_cut] * 3,
    *[_bytes] * 3,
    *[_header] * 3,
    _file,
    _file,
    _index,
    _template,
    _template,
    _tokenizer,
    _tokenizer,
    _generation,
    _adapter,
]
