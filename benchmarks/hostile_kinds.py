"""The kinds of hostile inputs of hostile_inputs.py: each makes one by its seed, tries it, judges the end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from broken_inputs import RECIPE, recipe_or_plan
from hostile_inputs import Act, Attempt, Ended, attempt
from mutants_of_models import NUMBERS, OTHERS, TEMPLATES, make_models, mutate

HERE = Path(tempfile.gettempdir()) / f"memtrain-break-base-{os.getpid()}"


RUNS: dict[str, tuple[str, list[str]]] = {
    "full": ("sft", []),
    "lora": ("sft", ["model.adapter={kind: lora, r: 4}"]),
    "reward": ("reward", []),
}
"""Finished runs: method, words."""


@functools.cache
def base() -> Path:
    """A folder with sound models and rows, made once and removed at the end of the process that made it."""
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(HERE, ignore_errors=True)

    atexit.register(remove)
    make_models(HERE / "models")
    write_rows(HERE / "rows.jsonl")
    (HERE / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    return HERE


@functools.cache
def finished(name: str) -> Path:
    """A finished run, made once."""
    method, words = RUNS[name]
    base()
    command = [method, *recipe(HERE, HERE / "models/llama", method), *words, "--run-dir", name]
    fault = attempt(Attempt("a sound run", command, is_refused=False, limit_s=300), HERE)
    assert not fault, fault
    return HERE / name


def write_rows(path: Path) -> None:
    """Eight conversations of a question and its answer."""
    with path.open("w") as file:
        for i in range(8):
            turns = [("user", f"What is {i} + 1?"), ("assistant", f"{i + 1}")]
            row = {"messages": [{"role": role, "content": text} for role, text in turns]}
            file.write(json.dumps(row) + "\n")


def recipe(folder: Path, model: Path, method: str = "sft", **changes: object) -> list[str]:
    """The words of a recipe that is written into `folder`."""
    rows: object = (
        str(HERE / "rows.jsonl") if method == "sft" else {"source": "builtin:arithmetic", "limit": 8}
    )
    text = RECIPE.replace("method: sft", f"method: {method}")
    for word, value in {"MODEL": str(model), "ROWS": rows, "CACHE": str(folder / "cache")}.items():
        text = text.replace(word, json.dumps(value))
    (folder / f"{method}.yaml").write_text(text)
    return [f"{method}.yaml", *(f"{key.replace('__', '.')}={value}" for key, value in changes.items())]


# --- recipes, overrides, rows: the mutants that there are already


def recipes(seed: int, folder: Path) -> tuple[str, str]:
    """A recipe of broken lines, read; every eighth one planned."""
    with contextlib.chdir(folder):
        how, fault = recipe_or_plan(seed)
    return how, fault if how not in ("hang", "traceback") else f"{how}: {fault}"


def overrides(seed: int, folder: Path) -> tuple[str, str]:
    """Words of the command line behind a sound recipe."""
    from mutants_of_recipes import legal_words, override

    random_ = random.Random(seed)
    base()
    words = [override(random_) for _ in range(random_.randint(1, 3))]
    if random_.random() < 0.5:
        key, values = random_.choice(legal_words())
        words.append(f"{key}={random_.choice(values)}")
    one = Attempt(f"{words}", ["check", *recipe(folder, HERE / "models/llama"), *words])
    return one.said, attempt(one, folder)


def rows(seed: int, folder: Path) -> tuple[str, str]:
    """A data file of hostile values and bytes, tokenized."""
    import mutants_of_data

    found = mutants_of_data.run(seed, 1)
    wrong = [one for one in found if one["kind"] not in mutants_of_data.SOUND]
    return str([one.get("said") for one in found]), str(wrong[0]) if wrong else ""


def parquet(seed: int, folder: Path) -> tuple[str, str]:
    """A Parquet file of types, sizes and footers that nobody asked for."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    random_ = random.Random(seed)
    base()
    turns = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"yes {i}"}] for i in range(6)
    ]
    columns: dict[str, Any] = {"messages": pa.array(turns)}
    way = random_.randrange(9)
    said = f"way {way}"
    if way == 0:
        columns["messages"] = pa.array([["x"]] * 6)
    elif way == 1:
        columns["more"] = pa.array([{"a": {"b": [1, None]}}, None, {"a": None}, None, None, None])
    elif way == 2:
        columns["messages"] = pa.array([json.dumps(one) for one in turns])
    elif way == 3:
        columns["more"] = pa.array([b"\xff\x00"] * 6, pa.binary())
    elif way == 4:
        columns["more"] = pa.array(["x" * 10_000_000] * 6).dictionary_encode()
    elif way == 5:
        columns["messages"] = pa.nulls(6)
    elif way == 6:
        columns = {"text": pa.array(["a" * 2_000_000] * 500)}
    elif way == 7:
        columns = {f"c{i}": pa.array([i] * 6) for i in range(3000)} | columns
    else:
        columns["messages"] = pa.array([turns[0]] * 3 + [None] * 3)
    place = folder / "rows.parquet"
    pq.write_table(pa.table(columns), place, compression="zstd")
    if random_.random() < 0.4:
        raw = bytearray(place.read_bytes())
        at = random_.randrange(max(0, len(raw) - 600), len(raw))
        raw[at] ^= 1 << random_.randrange(8)
        place.write_bytes(raw if random_.random() < 0.7 else raw[:at])
        said += f", byte {at} of {len(raw)}"
    words = recipe(folder, HERE / "models/llama", data__train=place)
    one = Attempt(said, [random_.choice(["sft", "check"]), *words], limit_s=90)
    if one.words[0] == "sft":
        one.words = [*one.words, "--run-dir", "run"]
    return said, attempt(one, folder)


# --- models, tokenizers, templates


def models(seed: int, folder: Path) -> tuple[str, str]:
    """A damaged model folder, trained for a step, checked, planned or shown."""
    random_ = random.Random(seed)
    said = mutate(_models(), folder / "model", seed)
    command = random_.choice(["sft", "sft", "check", "plan", "show-data"])
    words = [command, *recipe(folder, folder / "model")]
    return said, attempt(Attempt(said, words + ["--run-dir", "run"] * (command == "sft")), folder)


def _models() -> list[Path]:
    return sorted((base() / "models").iterdir())


BOMBS: list[dict[str, Any]] = [
    {"type": "Prepend", "prepend": "x" * 5_000_000},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000_000},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
    {"type": "Replace", "pattern": {"Regex": "(?:"}, "content": "b"},
    {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}] * 14,
    },
    {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"}] * 40,
    },
    {"type": "NoSuch"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
]


def tokenizers(seed: int, folder: Path) -> tuple[str, str]:
    """A tokenizer whose file lies: bombs, gaps, doubled and negative ids, keys of other types."""
    random_ = random.Random(seed)
    model = folder / "model"
    shutil.copytree(base() / "models/llama", model)
    file = model / "tokenizer.json"
    given = json.loads(file.read_text())
    way = random_.randrange(9)
    if way == 0:
        given["normalizer"] = random_.choice(BOMBS)
    elif way == 1:
        given["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": "(x+x+)+y"},
            "behavior": "Isolated",
            "invert": False,
        }
    elif way == 2:
        given["model"]["vocab"] = random_.choice(
            [{}, [], {"a": -1}, {"a": 0, "b": 0}, {"a": 2**31}, {"a": 2**63}, "x"]
        )
    elif way == 3:
        given["model"]["merges"] = random_.choice([["a"], [["a", "b", "c"]], ["no such"], 3, None])
    elif way == 4:
        token = {
            "id": random_.choice([0, 10**9, -1, 2**32 + 5]),
            "content": random_.choice(["", "x", "e" * 10**6]),
            "special": True,
        }
        given["added_tokens"] = [
            *given.get("added_tokens", []),
            {**token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
        ]
    elif way == 5:
        given["post_processor"] = random_.choice(
            [
                {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<no>", "type_id": 0}}],
                    "pair": [],
                    "special_tokens": {},
                },
                {"type": "BertProcessing", "sep": ["x", 9**9], "cls": ["y", 3]},
                3,
            ]
        )
    elif way == 6:
        given["decoder"] = random_.choice(
            [{"type": "NoSuch"}, None, {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}]
        )
    elif way == 7:
        given["truncation"] = {
            "max_length": random_.choice([0, 1, 2**62]),
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        }
        given["padding"] = {
            "strategy": {"Fixed": random_.choice([10, 2**20])},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
    else:
        key = random_.choice(list(given))
        given[key] = random_.choice(random_.choice([NUMBERS, OTHERS]))
    file.write_text(json.dumps(given))
    said = f"way {way}"
    command = random_.choice(["sft", "show-data", "check"])
    words = [command, *recipe(folder, model)]
    return said, attempt(Attempt(said, words + ["--run-dir", "run"] * (command == "sft")), folder)


def templates(seed: int, folder: Path) -> tuple[str, str]:
    """A hostile chat template in each command that renders one."""
    random_ = random.Random(seed)
    text = TEMPLATES[seed % len(TEMPLATES)]
    said = f"template {text[:60]!r}"
    command = random_.choice(["show-data", "check", "sft", "chat", "inspect-lengths"])
    if command == "chat":
        run = copy_of("full", folder)
        (run / "final/chat_template.jinja").write_text(text)
        return said, attempt(
            Attempt(said, ["chat", "run", "-p", "hello", "--template", "--max-tokens", "4"]), folder
        )
    model = folder / "model"
    shutil.copytree(base() / "models/llama", model)
    (model / "chat_template.jinja").write_text(text)
    words = [command, *recipe(folder, model)]
    return said, attempt(
        Attempt(f"{command}: {said}", words + ["--run-dir", "run"] * (command == "sft")), folder
    )


# --- damaged models in use


def copy_of(name: str, folder: Path) -> Path:
    """A finished run of its own at `folder/run`."""
    shutil.copytree(finished(name), folder / "run")
    return folder / "run"


def _use(random_: random.Random, *, is_reward: bool = False) -> list[str]:
    """A command that uses a finished model."""
    if is_reward:
        return ["score", "run", str(HERE / "pairs.jsonl"), "-o", "scores.jsonl"]
    return random_.choice(
        [
            ["chat", "run", "-p", "hello", "--max-tokens", "3"],
            ["serve", "run"],
            ["gguf", "run"],
            ["push", "run", "someone/model", "--dry-run"],
            ["lm-eval", "run", "--tasks", "gsm8k"],
            ["merge", "run"],
            ["export", "run", "-o", "exported"],
            ["status", "run"],
        ]
    )


def used(seed: int, folder: Path) -> tuple[str, str]:
    """A damaged final model in the commands that use one."""
    random_ = random.Random(seed)
    is_reward = random_.random() < 0.15
    run = copy_of("reward" if is_reward else "full", folder)
    final = run / "final"
    said = mutate([final], folder / "damaged", seed)
    shutil.rmtree(final)
    (folder / "damaged").rename(final)
    words = _use(random_, is_reward=is_reward)
    return f"{words[0]}: {said}", attempt(Attempt(said, words), folder)


ADAPTER_VALUES: dict[str, list[Any]] = {
    "base_model_name_or_path": [None, 3, "", "no/where", "--host=0.0.0.0", "a,trust_remote_code=True",
        "\x1b[31m", "../..", ["x"], {"a": 1}, "/etc"],
    "r": [0, -1, "8", None, 10**9, 3.5, True, [4], float("nan")],
    "lora_alpha": ["x", None, float("nan"), 1e400, [1]],
    "peft_type": ["NOPE", None, 3, "IA3", ["LORA"]],
    "task_type": ["NOPE", 3, [], "SEQ_CLS"],
    "target_modules": [None, [], "(a+)+$", ["nothing"], 3, {"a": 1}],
    "modules_to_save": ["x", 3, ["nothing"], [3]],
    "use_dora": ["yes", 3],
    "rank_pattern": [{"(a+)+$": 3}, 3, {"x": "y"}],
    "auto_mapping": [{"base_model_class": "x", "parent_library": "os"}],
    "revision": [3, "--x", "a b"],
}  # fmt: skip


def adapters(seed: int, folder: Path) -> tuple[str, str]:
    """A damaged adapter in the commands that use one."""
    random_ = random.Random(seed)
    run = copy_of("lora", folder)
    file = run / "final/adapter_config.json"
    given = json.loads(file.read_text())
    way = random_.random()
    if way < 0.6:
        key = random_.choice(list(ADAPTER_VALUES))
        given[key] = random_.choice(ADAPTER_VALUES[key])
        said = f"{key}={given[key]!r}"
        file.write_text(json.dumps(given))
    elif way < 0.75:
        text = random_.choice(
            ["", "{", "[]", "3", "null", "[" * 100_000, "\ufeff{}", "{}", '{"r": NaN}', "\x00"]
        )
        said = f"adapter_config.json {text[:20]!r}"
        file.write_text(text)
    else:
        shutil.rmtree(folder / "damaged", ignore_errors=True)
        said = mutate([run / "final"], folder / "damaged", seed)
        shutil.rmtree(run / "final")
        (folder / "damaged").rename(run / "final")
    words = _use(random_)
    if random_.random() < 0.3:
        (run / "plan.json").unlink()
    return f"{words[0]}: {said}", attempt(Attempt(said, words), folder)


# --- links, stdout, limits


@contextmanager
def unchanged(*files: Path) -> Iterator[list[str]]:
    """Names of the files that are no more what they were, at the end."""
    before = {file: file.read_bytes() for file in files}
    changed: list[str] = []
    yield changed
    changed += [str(file) for file, was in before.items() if not file.is_file() or file.read_bytes() != was]


LINKED = (
    "final",
    "checkpoints",
    "plan.json",
    "recipe.yaml",
    "metrics.jsonl",
    "vllm",
    "report.html",
    "run.log",
    "cache",
    ".",
)


def links(seed: int, folder: Path) -> tuple[str, str]:
    """Links and foreign files where a run, a merge or an export writes: nobody's file is lost."""
    random_ = random.Random(seed)
    base()
    foreign = folder / "foreign"
    shutil.copytree(HERE / "models/gpt2", foreign)
    (foreign / "notes.txt").write_text("mine")
    run, name = folder / "run", LINKED[seed % len(LINKED)]
    way = random_.choice(["link", "folder", "link to file"])
    run.mkdir()
    place = run / name
    if name == ".":
        run.rmdir()
        run.symlink_to(foreign)
    elif way == "link":
        place.symlink_to(foreign)
    elif way == "link to file":
        place.symlink_to(foreign / "notes.txt")
    else:
        shutil.copytree(foreign, place)
    said = f"{name}: {way}"
    kept = [file for root in (foreign, place) if root.is_dir() for file in root.rglob("*") if file.is_file()]
    with unchanged(*kept) as changed:
        words = recipe(folder, HERE / "models/llama")
        if random_.random() < 0.3:
            words.append("model.adapter={kind: lora, r: 4}")
        fault = attempt(Attempt(said, ["sft", *words, "--run-dir", "run"]), folder)
    return said, fault or (f"lost or changed: {changed[:4]}" if changed else "")


def stdout(seed: int, folder: Path) -> tuple[str, str]:
    """A command whose output nobody takes: it does its work, or says on stderr why it does not."""
    random_ = random.Random(seed)
    base()
    kind = ("closed", "full", "gone")[seed % 3]
    commands: list[list[str]] = [
        ["sft", *recipe(folder, HERE / "models/llama"), "--run-dir", "run"],
        ["plan", *recipe(folder, HERE / "models/llama")],
        ["check", *recipe(folder, HERE / "models/llama")],
        ["show-data", *recipe(folder, HERE / "models/llama")],
        ["status", "run"],
        ["methods"],
        ["schema"],
        ["recipes"],
        ["--help"],
        ["chat", "run", "-p", "hello", "--max-tokens", "2"],
        ["serve", "run"],
        ["doctor"],
    ]
    words = random_.choice(commands)
    if words[0] in ("status", "chat", "serve"):
        copy_of("full", folder)

    def look(ended: Ended) -> str:
        if words[0] == "sft" and not (folder / "run/final/model.safetensors").is_file():
            return f"the run has no model: {ended.text[-600:]}"
        return ""

    said = f"{words[0]}, stdout {kind}"
    codes = (0,) if words[0] == "sft" else (0, 1, 5, 141)
    return said, attempt(Attempt(said, words, stdout=kind, look=look, codes=codes), folder)


READ_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "rows.jsonl",
    "sft.yaml",
    "adapter_config.json",
    "special_tokens_map.json",
)


def limits(seed: int, folder: Path) -> tuple[str, str]:
    """Files that never end, are gigabytes, or wait: FIFOs, devices, sparse files, bombs; and long rows."""
    random_ = random.Random(seed)
    model = folder / "model"
    shutil.copytree(base() / "models/llama", model)
    words = recipe(folder, model, data__train=folder / "rows.jsonl")
    write_rows(folder / "rows.jsonl")
    name = READ_FILES[seed % len(READ_FILES)]
    way = random_.choice(["fifo", "zero", "sparse", "folder", "long", "nested", "socket"])
    place = (folder if name in ("rows.jsonl", "sft.yaml") else model) / name
    if place.exists():
        place.unlink()
    if way == "fifo":
        os.mkfifo(place)
    elif way == "zero":
        place.symlink_to("/dev/zero")
    elif way == "sparse":
        with place.open("wb") as file:
            file.truncate(2**36)
    elif way == "folder":
        place.mkdir()
    elif way == "long":
        text = (
            '{"messages": [{"role": "user", "content": "'
            + "a b " * 3_000_000
            + '"}, {"role": "assistant", "content": "x"}]}'
        )
        place.write_text(text)
    elif way == "nested":
        place.write_text("[" * 3_000_000)
    else:
        import socket

        here = os.getcwd()
        os.chdir(place.parent)
        try:
            socket.socket(socket.AF_UNIX).bind(name)
        finally:
            os.chdir(here)
    command = random_.choice(["sft", "check", "plan", "show-data", "inspect-lengths"])
    said = f"{command}: {name} is {way}"
    return said, attempt(
        Attempt(said, [command, *words, *(["--run-dir", "run"] if command == "sft" else [])]), folder
    )


def surroundings(seed: int, folder: Path) -> tuple[str, str]:
    """Variables of other launchers and hostile values of known ones."""
    random_ = random.Random(seed)
    base()
    given = random_.choice(
        [
            {"WORLD_SIZE": "2"},
            {"WORLD_SIZE": "2", "RANK": "1"},
            {"WORLD_SIZE": "x"},
            {"RANK": "3"},
            {"LOCAL_RANK": "-1"},
            {"MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1"},
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
            {"OMP_NUM_THREADS": "x"},
            {"CUDA_VISIBLE_DEVICES": "9,x"},
            {"COLUMNS": "0"},
            {"COLUMNS": "-5"},
            {"HOME": "/nowhere"},
            {"TMPDIR": "/nowhere"},
            {"HF_HOME": "/dev/null"},
            {"LANG": "C", "PYTHONIOENCODING": "ascii"},
            {"MEMTRAIN_CALIBRATION": "/dev/zero"},
            {"XDG_CACHE_HOME": "/proc/nowhere"},
            {"TERM": "\x1b[2J"},
        ]
    )
    command = random_.choice(["sft", "check", "plan"])
    words = [command, *recipe(folder, HERE / "models/llama")]
    said = f"{command}: {given}"
    one = Attempt(said, words + ["--run-dir", "run"] * (command == "sft"), environment=given)
    return said, attempt(one, folder)


# --- secrets and names


SECRET = "s3cr3t-hf-t0ken-Zq9"


def string_keys() -> list[str]:
    """Keys of a recipe that take any text."""
    from memtrain.recipes.recipe import Recipe

    schema = Recipe.model_json_schema()
    found: list[str] = []

    def walk(part: Any, prefix: str) -> None:
        for name, inside in part.get("properties", {}).items():
            forms = [inside, *inside.get("anyOf", []), *inside.get("allOf", [])]
            for form in forms:
                if form.get("type") == "string" and "enum" not in form:
                    found.append(f"{prefix}{name}")
                if "$ref" in form:
                    walk(schema["$defs"][form["$ref"].rsplit("/", 1)[-1]], f"{prefix}{name}.")

    walk(schema, "")
    more = ["data.train", "cluster.slurm.setup", "cluster.slurm.lines", "rewards.functions", "log.trackers"]
    return sorted({*found, *more})


def secrets(seed: int, folder: Path) -> tuple[str, str]:
    """A stranger's recipe that reads a token of the environment into one of its texts: no file holds it."""
    base()
    random_ = random.Random(seed)
    keys = string_keys()
    key = keys[seed % len(keys)]
    value = random_.choice(["${oc.env:TOKEN}", "x-${oc.env:TOKEN}", "/tmp/x/${oc.env:TOKEN}/y"])
    method = random_.choice(["sft", "grpo"])
    words = recipe(folder, HERE / "models/llama", method)
    text = (folder / f"{method}.yaml").read_text()
    if method == "grpo":
        text += "rewards: {functions: [exact_answer]}\ngenerate: {max_tokens: 4}\ngrpo: {group_size: 2}\n"
    import yaml

    tree = yaml.safe_load(text)
    at = tree
    *above, last = key.split(".")
    for part in above:
        at = at.setdefault(part, {})
        if not isinstance(at, dict):
            return key, ""
    at[last] = [value] if last in ("setup", "lines", "trackers") else value
    (folder / f"{method}.yaml").write_text(yaml.safe_dump(tree))
    command = random_.choice([method, method, "plan", "slurm"])
    extra = {"slurm": ["-o", "job.sbatch"]}.get(
        command, ["--run-dir", "run"] if key != "run_dir" and command != "plan" else []
    )

    def look(ended: Ended) -> str:
        holding = [
            str(file.relative_to(folder))
            for file in folder.rglob("*")
            if SECRET in file.name
            or (file.is_file() and file.name != ".output" and SECRET.encode() in file.read_bytes())
        ]
        outside = list(Path("/tmp/x").rglob(f"*{SECRET}*")) if Path("/tmp/x").exists() else []
        return f"the secret is in {holding[:6]} {outside[:3]}" if holding or outside else ""

    said = f"{command}: {key}: {value}"
    return said, attempt(
        Attempt(said, [command, *words, *extra], environment={"TOKEN": SECRET}, look=look), folder
    )


NAMES = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[click](http://evil)",
    "![x](http://evil/x.png)",
    "a|b",
    "**bold**",
    "`code`",
    "# heading",
    "x](javascript:alert(1))",
    "<!-- hidden",
    "&lt;b&gt;",
    "---",
    "a\u202eb",
)


def cards(seed: int, folder: Path) -> tuple[str, str]:
    """Names that are HTML or Markdown, in the card and the report of a run."""
    base()
    random_ = random.Random(seed)
    name = NAMES[seed % len(NAMES)].replace("/", "\u2215")
    words = recipe(folder, HERE / "models/llama")
    run = folder / name
    data = folder / f"{name}.jsonl"
    shutil.copy(HERE / "rows.jsonl", data)
    text = (folder / "sft.yaml").read_text().replace(str(HERE / "rows.jsonl"), str(data))
    (folder / "sft.yaml").write_text(text)
    words = [*words, f"log.project={json.dumps(name)}"] if random_.random() < 0.5 else words

    def look(ended: Ended) -> str:
        card = run / "final/README.md"
        if not card.is_file():
            return ""
        from markdown_it import MarkdownIt

        made = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
        shown = made.render(card.read_text().split("---", 2)[2])
        wrong = [
            tag
            for tag in ("<script", "<img", 'href="http://evil', 'href="javascript:', "onerror=alert(1)>")
            if tag in shown
        ]
        report = run / "report.html"
        if report.is_file() and ("<script>alert" in report.read_text() or "<img src=x" in report.read_text()):
            wrong.append("in the report")
        if str(folder) in card.read_text():
            wrong.append("a path of this machine")
        return f"the card holds {wrong}" if wrong else ""

    said = f"names {name!r}"
    return said, attempt(Attempt(said, ["sft", *words, "--run-dir", str(run)], look=look), folder)


def pushes(seed: int, folder: Path) -> tuple[str, str]:
    """Links, secrets and foreign files in a folder that is pushed: none of them is on the list."""
    random_ = random.Random(seed)
    run = copy_of(random_.choice(["full", "lora"]), folder)
    final = run / "final"
    (folder / "private").mkdir()
    (folder / "private/key.pem").write_text(SECRET)
    planted = random_.choice(
        [
            ".env",
            ".git/config",
            "id_rsa",
            "notes.txt",
            "wandb/key.txt",
            "link.pem",
            "linked/key.pem",
            "optimizer.pt",
            "__pycache__/x.pyc",
            ".cache/token",
            "secrets.json",
            "rows.jsonl",
        ]
    )
    place = final / planted
    place.parent.mkdir(parents=True, exist_ok=True) if planted != "linked/key.pem" else None
    if planted == "link.pem":
        place.symlink_to(folder / "private/key.pem")
    elif planted == "linked/key.pem":
        place.parent.symlink_to(folder / "private")
    else:
        place.write_text(SECRET)
    is_model = random_.random() < 0.3

    def look(ended: Ended) -> str:
        listed = [
            line
            for line in ended.text.splitlines()
            if planted in line and "not" not in line and "left" not in line.lower()
        ]
        return f"{planted} would be uploaded: {ended.text[-800:]}" if listed else ""

    said = f"{planted} in {'the model folder alone' if is_model else 'the run'}"
    words = ["push", str(final) if is_model else "run", "someone/model", "--dry-run"]
    return said, attempt(Attempt(said, words, look=look), folder)


# --- servers that lie


class Liar(ThreadingHTTPServer):
    """A vLLM server whose honest answers are damaged by a seed."""

    daemon_threads = True

    def __init__(self, random_: random.Random, vocab: int) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.random, self.vocab, self.mark = random_, vocab, "first"
        self.lies_left = 1
        self.said = ""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def honest(self, path: str, asked: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "m", "max_model_len": 4096}]}
        if path == "/v1/completions":
            choices = [
                {
                    "index": at,
                    "token_ids": [self.random.randrange(self.vocab) for _ in range(asked["max_tokens"])],
                    "logprobs": {
                        "token_logprobs": [-self.random.random() * 9 for _ in range(asked["max_tokens"])]
                    },
                    "finish_reason": "length",
                    "stop_reason": None,
                    "prompt_token_ids": asked["prompt"],
                }
                for at in range(asked["n"])
            ]
            return {"choices": choices}
        if path == "/update_weight_version":
            self.mark = asked["new_version"]
        return {"weight_version": self.mark}


def damaged(value: Any, random_: random.Random) -> tuple[Any, str]:
    """The value with one part of it another, and which."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    root = [json.loads(json.dumps(value))]
    walk(root)
    node, key = random_.choice(places)
    was = node[key]
    way = random_.randrange(5)
    if way == 0:
        del node[key]
    elif way == 1 and isinstance(node, list):
        node.insert(key, was)
    elif way == 2 and isinstance(was, int | float):
        node[key] = random_.choice([-was - 1, was + 10**6, was + 0.5, str(was), True, float("nan"), 10**30])
    else:
        node[key] = random_.choice(random_.choice([NUMBERS, OTHERS]))
    return (root[0] if root else None), f"{key!r} was {str(was)[:40]}, way {way}"


class Answers(BaseHTTPRequestHandler):
    server: Liar

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def answer(self, asked: dict[str, Any]) -> None:
        server, path = self.server, self.path.partition("?")[0]
        made = server.honest(path, asked)
        status, data, length = 200, json.dumps(made).encode(), None
        if server.lies_left and server.random.random() < (0.9 if path == "/v1/completions" else 0.15):
            server.lies_left -= 1
            way = server.random.randrange(8)
            if way < 5:
                made, said = damaged(made, server.random)
                data = json.dumps(made).encode()
            elif way == 5:
                said = "cut"
                length, data = len(data), data[: server.random.randrange(len(data) + 1)]
            elif way == 6:
                status = server.random.choice([204, 301, 302, 307, 400, 401, 404, 418, 429, 500, 503])
                said = f"status {status}"
            else:
                data, said = (
                    server.random.choice([b"", b"null", b"[" * 10**5, b"\xff", b"NaN", b"<html>", b"[]"]),
                    "other text",
                )
            server.said = f"{path}: {said}"
        self.send_response(status)
        if status in (301, 302, 307):
            self.send_header("Location", "http://127.0.0.1:9/")
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def servers(seed: int, folder: Path) -> tuple[str, str]:
    """A vLLM server that lies once: the rollout is right, or there is one error."""
    import math

    from memtrain.errors import LaunchError
    from memtrain.trainers.online.generation.protocol import Group, Sampling
    from memtrain.trainers.online.vllm.server_sampler import ServerSampler
    from memtrain.trainers.runtime.ranks import Ranks

    model = _served()
    vocab = model.config.vocab_size
    random_ = random.Random(seed)
    server = Liar(random_, vocab)
    sampler = ServerSampler(
        model=model,
        address=f"http://127.0.0.1:{server.server_port}",
        folder=folder / "weights",
        version=lambda: 0,
        ranks=Ranks(),
        emit=lambda text: None,
        deadline_s=5.0,
        start_deadline_s=0.1,
        restarts=random_.choice([0, 0, 2]),
        fallback=None,
    )
    groups, sampling = [Group((3, 4 + i), 2, seed=i) for i in range(2)], Sampling(max_tokens=4)
    start = time.monotonic()
    try:
        made = sampler.generate(groups, sampling)
    except LaunchError as error:
        text = error.text()
        return server.said, "" if "   at: " in text and "  try: " in text else f"no place or cure: {text}"
    finally:
        server.shutdown()
        server.server_close()
    if time.monotonic() - start > 60:
        return server.said, "hang"
    for sample in (one for group in made for one in group):
        is_right = (
            0 < len(sample.token_ids) <= 4
            and len(sample.logprobs) == len(sample.token_ids)
            and all(type(one) is int and 0 <= one < vocab for one in sample.token_ids)
            and all(math.isfinite(one) and one <= 1e-3 for one in sample.logprobs)
            and sample.finish in ("stop", "string", "length")
        )
        if not is_right:
            return server.said, f"accepted in silence: {sample}"
    counts = [len(group) for group in made]
    return server.said, "" if counts == [2, 2] else f"{counts} completions"


@functools.cache
def _served() -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(config)


# --- processes apart


def namespaces(seed: int, folder: Path) -> tuple[str, str]:
    """A second start of a run that lives, from another process namespace of the host: it is refused."""
    if not _has_unshare():
        return "unshare is not allowed here", ""
    base()
    words = [
        sys.executable,
        "-m",
        "memtrain",
        "sft",
        *recipe(folder, HERE / "models/llama", train__max_steps=100000),
        "--run-dir",
        "run",
    ]
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    with (folder / "first.log").open("w") as log:
        first = subprocess.Popen([*apart, *words], cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            until = time.monotonic() + 120
            while (
                time.monotonic() < until
                and not (folder / "run/metrics.jsonl").exists()
                and first.poll() is None
            ):
                time.sleep(0.2)
            second = subprocess.run(
                [*apart, *words], cwd=folder, capture_output=True, text=True, timeout=240, check=False
            )
            is_first_alive = first.poll() is None
        except subprocess.TimeoutExpired:
            return "second start", "hang: the second start goes on beside the first"
        finally:
            os.killpg(first.pid, 9)
            first.wait()
    if not is_first_alive:
        return "second start", f"the first run ended: {(folder / 'first.log').read_text()[-800:]}"
    is_refused = second.returncode == 5 and "Traceback" not in second.stderr
    return "second start", "" if is_refused else f"code {second.returncode}: {second.stderr[-800:]}"


@functools.cache
def _has_unshare() -> bool:
    tried = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "true"],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


KINDS: dict[str, Act] = {
    "recipes": recipes,
    "overrides": overrides,
    "rows": rows,
    "parquet": parquet,
    "tokenizers": tokenizers,
    "templates": templates,
    "models": models,
    "used": used,
    "adapters": adapters,
    "servers": servers,
    "links": links,
    "namespaces": namespaces,
    "stdout": stdout,
    "limits": limits,
    "surroundings": surroundings,
    "secrets": secrets,
    "cards": cards,
    "pushes": pushes,
}
"""Every kind, by its name."""
