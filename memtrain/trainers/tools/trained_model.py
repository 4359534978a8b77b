"""The finished model of a run, and the commands of vLLM, llama.cpp and Ollama for it; no torch."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from memtrain.errors import LaunchError, printable
from memtrain.memory.model_shape.adapter_file import read_adapter_config
from memtrain.memory.model_shape.config_file import (
    MAX_BYTES,
    read_config_json,
    read_json_object,
    refuse_pipes,
)
from memtrain.memory.plan.plan import PLAN_FILE, plan_of_run, run_fix
from memtrain.recipes.reading.adapter_config import ADAPTER_FILE
from memtrain.recipes.sections.model import Model
from memtrain.trainers.run_folder.folder import RunFolder

CONFIG, GENERATION = "config.json", "generation_config.json"
MERGED = "merged"
"""Folder of `memtrain merge` in a run folder."""
BUILTIN = "builtin:"
"""Begin of the names of models that memtrain makes."""
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that `--max-lora-rank` takes. Source: vllm/config/lora.py, vLLM 0.20."""
CONVERTER = "convert_hf_to_gguf.py"
CONVERTERS = (CONVERTER, "llama-convert-hf-to-gguf", "convert-hf-to-gguf")
"""Names of llama.cpp's converter on the PATH: of its tree, and of Python packages made of it."""
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")
"""Types that llama.cpp's converter writes; smaller ones are made of these by llama-quantize."""
CHATML = "<|im_start|>"
CHATML_TEMPLATE = (
    'TEMPLATE """{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n'
    '{{ end }}<|im_start|>assistant\n"""'
)
"""ChatML in the template language of Ollama."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model folder in the Hugging Face format, or an adapter's."""

    run: Path
    folder: Path
    name: str
    config: dict[str, Any]
    """config.json, or adapter_config.json."""
    is_adapter: bool

    @property
    def base(self) -> str:
        """Model that an adapter belongs to."""
        return str(self.config.get("base_model_name_or_path") or "")

    @property
    def is_reward_model(self) -> bool:
        """Whether it scores text, and writes none."""
        kinds = self.config.get("architectures") or []
        return self.config.get("task_type") == "SEQ_CLS" or any("Classification" in kind for kind in kinds)


def run_around(folder: Path) -> Path:
    """The run whose model a folder is (`RUN/final`); any other folder is itself."""
    is_final = folder.absolute().name == "final" and (folder.absolute().parent / PLAN_FILE).is_file()
    return folder.absolute().parent if is_final else folder


def refuse_without_run(folder: Path, what: str) -> None:
    """Raise LaunchError for an adapter that lies without the run that trained it; `what`: needs one."""
    if (folder / ADAPTER_FILE).is_file() and not (folder / PLAN_FILE).is_file():
        raise LaunchError(
            f"{folder} is an adapter without the run that trained it, and {what} a run's",
            str(folder),
            "give the folder of its run; to train it on here, name it in model.adapter.path; PEFT's "
            "merge_and_unload merges one of another program",
        )


def trained_model(run: Path) -> TrainedModel:
    """The finished model of a run folder, or of a model folder itself.

    Raises: LaunchError when there is none, it is not a folder, or its configuration is damaged.
    """
    run = run_around(run)
    if not run.is_dir():
        raise LaunchError(f"there is no folder {run}", str(run), run_fix(run))
    final = RunFolder(run).final
    for folder in (final, run):
        if any((folder / file).exists() for file in (ADAPTER_FILE, CONFIG)):
            refuse_pipes(folder, str(folder))
        for file in (ADAPTER_FILE, CONFIG):
            if (folder / file).is_file():
                read = read_adapter_config if file == ADAPTER_FILE else read_config_json
                config = read(folder / file, str(folder / file))
                return TrainedModel(run, folder, _name_of(run), config, file == ADAPTER_FILE)
    raise LaunchError(
        f"{run} has no finished model",
        str(run),
        "let the run finish, or write the model of a checkpoint: memtrain export",
    )


def _name_of(run: Path) -> str:
    """The name of a folder as other programs and their files take one: a line, and no option."""
    return printable(run.resolve().name, is_line=True).lstrip("-") or "model"


def text_model(run: Path) -> TrainedModel:
    """The finished model of a run that writes text. Raises: LaunchError for a reward model too."""
    model = trained_model(run)
    if model.is_reward_model:
        raise LaunchError(
            f"{model.folder} is a reward model, which writes no text",
            str(run),
            "score answers with it: memtrain score",
        )
    return model


def whole_model(model: TrainedModel, purpose: str) -> Path:
    """Folder of the full model: the run's own, or the folder of `memtrain merge`.

    Raises: LaunchError when an adapter was not merged yet, or was trained on since.
    """
    if not model.is_adapter:
        return model.folder
    merged = model.run / MERGED
    merge = f"memtrain merge {shlex.quote(str(model.run))}, then the same command again"
    if not (merged / CONFIG).is_file():
        raise LaunchError(
            f"{model.folder} is an adapter, and {purpose} needs the full model", str(model.run), merge
        )
    if (merged / CONFIG).stat().st_mtime < (model.folder / ADAPTER_FILE).stat().st_mtime:
        raise LaunchError(
            f"{merged} is older than the adapter in {model.folder}: it was merged before the run went on",
            str(merged),
            f"remove it; {merge}",
        )
    return merged


def recipe_of(trained: TrainedModel) -> Model | None:
    """The model's section of the run's recipe; None of a model folder without a run."""
    is_of_run = (trained.run / PLAN_FILE).is_file()
    return plan_of_run(trained.run, reveals=False).recipe.model if is_of_run else None


def trusting_recipe(trained: TrainedModel) -> Model | None:
    """The model's section of the run's recipe, where it trusts the code that comes with the model."""
    recipe = recipe_of(trained)
    return recipe if recipe is not None and recipe.trust_remote_code else None


def why_not_beside_base(model: TrainedModel) -> str:
    """The kind of adapter that no other program puts on its base by their files alone; empty of any other.

    An embedding that is saved whole has the rows of the base's weights, which other programs cut to those of
    the tokenizer.
    """
    recipe = recipe_of(model)
    if recipe is not None and recipe.rope_scaling is not None:
        return "of a base with scaled positions (model.rope_scaling)"
    if not model.base or model.base.startswith(BUILTIN):
        return "of a base that is neither a folder nor on the hub"
    return "with whole modules beside the factors" if model.config.get("modules_to_save") else ""


def base_revision(model: TrainedModel) -> str | None:
    """The commit, tag or branch of an adapter's base on the hub; None of a folder, or where none is named."""
    recipe = recipe_of(model)
    return None if recipe is None or Path(model.base).is_dir() else recipe.revision


def ends_otherwise(model: TrainedModel) -> bool:
    """Whether an adapter learned an end of turns at which its base does not stop, such as `<|im_end|>`."""
    own = _end_tokens(model.folder, None, (GENERATION,))
    return bool(own - _end_tokens(model.base, base_revision(model), (GENERATION, CONFIG)))


def _end_tokens(place: str | Path, revision: str | None, files: Sequence[str]) -> set[int]:
    """End tokens of the first of the files that names some, in a folder or the hub's cache; else none.

    Raises: LaunchError where a file is damaged.
    """
    for name in files:
        path = Path(place) / name
        if not Path(place).is_dir():
            cached = try_to_load_from_cache(str(place), name, revision=revision)
            path = Path(cached) if isinstance(cached, str) else path
        if not path.is_file():
            continue
        ends = read_json_object(path, str(path)).get("eos_token_id")
        numbers: list[Any] = ends if isinstance(ends, list) else [ends]
        if ends is not None and not all(type(one) is int for one in numbers):
            raise LaunchError(
                f"{path} has eos_token_id: {json.dumps(ends, default=str)[:60]}",
                str(path),
                "it must be the number of a token, or a list of them; take the file as published",
            )
        if ends is not None:
            return set(numbers)
    return set()


def own_tokenizer(model: TrainedModel) -> str | None:
    """Folder of the tokenizer with the chat template that an adapter was trained with, where it is there."""
    return _word(model.folder) if (model.folder / "tokenizer_config.json").is_file() else None


def serve_words(model: TrainedModel, *, port: int = 8000, host: str = "127.0.0.1") -> list[str]:
    """The command that serves the model with vLLM, an adapter beside its base.

    The model's own code is run where the recipe of its run trusts it, at the same commit. The tokenizer and
    its chat template are those of the training.

    Raises: LaunchError for an adapter that vLLM cannot load beside its base.
    """
    words, ends = ["vllm", "serve"], ["--host", host, "--port", str(port)]
    served = ["--served-model-name", model.name]
    is_trusted = trusting_recipe(model) is not None
    if is_trusted:
        ends += ["--trust-remote-code"]
    if not model.is_adapter:
        return [*words, _word(model.folder), *served, *ends]
    config = model.config
    why = "weight-decomposed (DoRA)" if config.get("use_dora") else why_not_beside_base(model)
    rank = next((one for one in VLLM_RANKS if one >= int(config.get("r", 0))), None)
    if why or rank is None:
        kind = why or f"of rank {config.get('r')}"
        whole = whole_model(model, f"vLLM, which takes no adapter {kind},")
        return [*words, _word(whole), *served, *ends]
    if (revision := base_revision(model)) is not None:
        ends += ["--revision", revision, *(("--code-revision", revision) if is_trusted else ())]
    if (tokenizer := own_tokenizer(model)) is not None:
        ends += ["--tokenizer", tokenizer]
    if ends_otherwise(model):
        ends += ["--generation-config", _word(model.folder)]
    lora = f"{model.name}={model.folder}"
    if lora.count("=") > 1 or "," in lora:
        # vLLM reads a name and a path apart at the one sign between them, or else takes JSON.
        lora = json.dumps({"name": model.name, "path": str(model.folder), "base_model_name": model.base})
    return [
        *(*words, model.base, "--enable-lora", "--max-lora-rank", str(rank)),
        *("--lora-modules", lora, *ends),
    ]


def _word(path: Path) -> str:
    """A path that no program takes for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def convert_words(folder: Path, output: Path, kind: str) -> tuple[list[str], bool]:
    """(the command that writes a GGUF file, whether its program is installed here).

    Source: llama.cpp, convert_hf_to_gguf.py.
    """
    found = _converter()
    program = [found] if found else ["python", f"llama.cpp/{CONVERTER}"]
    return [*program, _word(folder), "--outfile", _word(output), "--outtype", kind], found is not None


def converter_is_here() -> bool:
    """Whether llama.cpp's converter is installed."""
    return _converter() is not None


def _converter() -> str | None:
    return next((path for name in CONVERTERS if (path := shutil.which(name))), None)


def get_converter() -> list[str]:
    """The commands that bring llama.cpp's converter."""
    return [
        "git clone --depth 1 https://github.com/ggml-org/llama.cpp",
        "pip install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt",
    ]


def modelfile(folder: Path, gguf: Path, system: str | None) -> str:
    """The Ollama Modelfile for a GGUF file, with the model's own end of turns.

    Ollama reads most chat templates from the GGUF file; ChatML is written out.
    Source: https://github.com/ollama/ollama/blob/main/docs/modelfile.mdx
    """
    lines = [f"FROM ./{gguf.name}"]
    template = _template(folder)
    if CHATML in template:
        lines += [CHATML_TEMPLATE, 'PARAMETER stop "<|im_end|>"']
    if system:
        lines.append('SYSTEM """' + system.replace('"""', "'''") + '"""')
    return "\n".join(lines) + "\n"


def ollama_name(name: str) -> str:
    """A name of a run as Ollama takes one: `My run` as `my-run`."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"


def text_of(file: Path) -> str:
    """The text of a small file of a model. Raises: LaunchError where it cannot be read, or is none."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise LaunchError(
                f"{file} is larger than {MAX_BYTES // 2**20} MiB", str(file), "give its own file"
            )
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error.strerror)
        raise LaunchError(
            f"{file} cannot be read: {reason}", str(file), "copy or download it again"
        ) from None


def _template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return text_of(file)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        return str(read_json_object(settings, str(settings)).get("chat_template") or "")
    return ""
