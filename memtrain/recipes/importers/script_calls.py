"""What a training script says of its run, as keys: its trainer, and all that the trainer is given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from memtrain.errors import RecipeError
from memtrain.recipes.importers.guess import method_of_trainer, read_method
from memtrain.recipes.importers.python_script import Call, Computed, Script, Several, made_by, read_script
from memtrain.recipes.importers.script_arguments import MISSING, Fields
from memtrain.recipes.importers.script_functions import only_renders
from memtrain.recipes.peers.table import table
from memtrain.recipes.trl.translate import PAIRED

LOAD, ADAPT, DATASET = "from_pretrained", "get_peft_model", "load_dataset"
"""Calls whose arguments are keys of these sections."""

OWN_DEFAULTS = "script.defaults"
"""Key of the names of a script's own arguments that no command gives."""

ROWS, HELD_OUT, CODE, TEMPLATES = "script.rows", "script.held_out", "script.rewards", "script.templates"
"""Keys of what a script does to its rows, the rows that it holds out, its functions that judge completions,
and the chat templates that it gives its tokenizer."""

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
"""Configurations of transformers, for any method."""

OTHER_BITS = (
    "AqlmConfig",
    "AwqConfig",
    "EetqConfig",
    "FineGrainedFP8Config",
    "GPTQConfig",
    "HqqConfig",
    "TorchAoConfig",
)
"""Quantizations that are not bitsandbytes'."""

_ROUNDINGS = ("BitsAndBytesConfig", *OTHER_BITS)
"""Configurations that a model is loaded with, where it is given them."""

OWN_CODE = (
    "callbacks",
    "compute_loss_func",
    "compute_metrics",
    "data_collator",
    "environment_factory",
    "formatting_func",
    "optimizers",
    "preprocess_logits_for_metrics",
    "reward_funcs",
    "rollout_func",
)
"""Arguments of a trainer that are code of the script."""

_OF_TRAINERS = {*table("trl").rows, "max_seq_length"} - {*OWN_CODE}
"""Arguments of a trainer that are keys of its configuration; earlier trainers had many."""

_GIVEN = {
    "args",
    "eval_dataset",
    "model",
    "peft_config",
    "processing_class",
    "quantization_config",
    "ref_model",
    "reward_funcs",
    "reward_model",
    "reward_processing_classes",
    "teacher_model",
    "tokenizer",
    "train_dataset",
}
"""Arguments of a trainer that are read by their own calls, or are rows."""

_PAIRED = ("dpo", "kto")
"""Methods whose trainer's second argument is the reference."""

_STANDBY = re.compile(r"""^[^#\n]*UNSLOTH_VLLM_STANDBY["']?\]?\s*(?:=|,)\s*["']?1""", re.M)
"""The variable that lets Unsloth's vLLM sleep."""

_MODELS = re.compile(r"Model|For(CausalLM|ConditionalGeneration|SequenceClassification)\b")
"""Names of classes whose `from_pretrained` loads a model."""

_SAME_ROWS = {
    "[]",
    "Dataset",
    "DatasetDict",
    "cast",
    "cast_column",
    "concatenate_datasets",
    "enumerate",
    "flatten_indices",
    "list",
    "next",
    "remove_columns",
    "set_format",
    "shuffle",
    "standardize_data_formats",
    "standardize_sharegpt",
    "to_iterable_dataset",
    "train_test_split",
    "tqdm",
    "with_format",
}
"""Calls after which rows say the same to a trainer, those whose work memtrain does among them."""

_ANSWERS_ONLY = ("train_on_responses_only", "DataCollatorForCompletionOnlyLM")
"""Calls that leave all but the assistant's turns out of the loss: Unsloth's, and one of TRL before 0.20."""

MOST_FOLLOWED = 300
"""Calls between a trainer and what its model or its rows begin with. Taste."""


@dataclass(slots=True)
class ScriptConfig:
    """What a script says of its run."""

    keys: dict[str, Any]
    """Arguments as dotted keys."""
    method: str
    is_unsloth: bool
    is_transformers: bool
    """The trainer's configuration is transformers', whose defaults are not TRL's."""
    script: Script
    notes: list[str] = field(default_factory=list[str])
    rewards: tuple[str, ...] = ()
    """Functions of the script that judge completions."""
    line: int = 0
    """Line of the trainer."""


def script_config(
    text: str,
    name: str,
    given: Mapping[str, Any] | None = None,
    method: str | None = None,
    trainer: int | None = None,
) -> ScriptConfig:
    """The run of a script. `given`: what a command gives of the script's own arguments. `method`, `trainer`:
    which of several trainers is meant, by its method or by its place.

    Raises: RecipeError when it is no Python, calls no trainer that is known, or several.
    """
    script = read_script(text, name, given)
    found = _trainer(script, name, method, trainer)
    reading = _Reading(script, found)
    reading.read()
    if _STANDBY.search(text):
        reading.keys[f"{LOAD}.unsloth_vllm_standby"] = True
    defaults = [
        one
        for one, value in script.own.arguments.items()
        if value is not MISSING and one not in (given or {})
    ]
    if defaults:
        reading.keys[OWN_DEFAULTS] = defaults
    notes = reading.notes
    if reading.doubts:
        notes.append(
            "where the script chooses when it runs, its first branch was read: "
            + ", ".join(dict.fromkeys(reading.doubts))
        )
    return ScriptConfig(
        reading.keys,
        found.method,
        any(call.owner.startswith("Fast") for call in script.calls),
        reading.is_transformers,
        script,
        notes,
        tuple(reading.rewards),
        (found.call or found.config or Call("", "")).line,
    )


def script_method(text: str, name: str) -> str | None:
    """The method of a script that its command says all else of; None where it calls no trainer.

    Raises: RecipeError when it is no Python, calls a trainer that is not known, or several.
    """
    script = read_script(text, name)
    if not any(call.name.endswith("Trainer") for call in script.calls):
        return None
    return _trainer(script, name, None, None).method


@dataclass(frozen=True, slots=True)
class _Trainer:
    """The trainer that is read: its call, or a configuration whose trainer is elsewhere."""

    call: Call | None
    config: Call | None
    method: str


def _trainer(script: Script, name: str, method: str | None, place: int | None) -> _Trainer:
    """The one trainer of a script, or the one that is asked for.

    Raises: RecipeError.
    """
    once = {(call.line, call.name): call for call in reversed(script.calls)}
    calls = sorted(once.values(), key=lambda call: call.line)
    found = [(call, _method(call.name, script)) for call in calls]
    known = [(call, one) for call, one in found if one is not None]
    unknown = [call for call in calls if call.name.endswith("Trainer")]
    if not known and not unknown:
        return _config_alone(calls, name, method)
    if not known and method is None:
        names = " and ".join(dict.fromkeys(call.name for call in unknown))
        raise RecipeError(
            f"{name} calls {names}, a trainer that memtrain does not read",
            name,
            "give the method that it trains by with --method (sft, dpo, kto, reward, grpo, rloo or distill), "
            "or name another script",
        )
    known = known or [(call, str(method)) for call in unknown]
    asked = [one for one in known if method in (None, one[1], PAIRED.get(one[1]))]
    if not asked:
        asked = [(call, str(method)) for call, _ in known]
    if place is not None and not 1 <= place <= len(asked):
        raise RecipeError(f"{name} has {len(asked)} trainers", "--trainer", f"give 1 to {len(asked)}")
    if len(asked) > 1 and place is None:
        listed = ", ".join(f"{call.name} in line {call.line}" for call, _ in asked)
        methods = dict.fromkeys(one for _, one in asked)
        by_method = f"--method {' or '.join(methods)}, or " if len(methods) > 1 else ""
        raise RecipeError(
            f"{name} trains more than once: {listed}",
            f"{name}:{asked[1][0].line}",
            f"say which run is meant with {by_method}--trainer 1 to {len(asked)}",
        )
    call, found_method = asked[(place or 1) - 1]
    return _Trainer(call, None, read_method(found_method, name))


def _method(called: str, script: Script) -> str | None:
    """The method of the trainer that a call makes, of a class of the script by what it extends; None for no
    trainer that is known."""
    seen: set[str] = set()
    while called in script.bases and called not in seen:
        seen.add(called)
        above = [base.rpartition(".")[2] for base in script.bases[called]]
        called = next((base for base in above if base.endswith("Trainer") or base in script.bases), called)
    if called == "Trainer":
        return "sft" if _loads_a_policy(script) else None
    return method_of_trainer(called.removesuffix("Trainer")) if called.endswith("Trainer") else None


def _loads_a_policy(script: Script) -> bool:
    """Whether transformers' trainer, which trains anything, trains a model that writes."""
    return any(
        call.name == LOAD
        and re.search(r"CausalLM|FastLanguageModel|FastModel", call.owner)
        and not call.arguments.keys() & {"num_labels", "auto_model"}
        for call in script.calls
    )


def _config_alone(calls: Sequence[Call], name: str, method: str | None) -> _Trainer:
    """A configuration whose trainer is in another file."""
    configs = [(call, one) for call in calls if (one := _method_of_config(call)) is not None]
    general = [call for call in calls if call.name in ARGUMENTS]
    wanted = [one for one in configs if method in (None, one[1], PAIRED.get(one[1]))]
    if len({one for _, one in wanted}) > 1:
        raise RecipeError(
            f"{name} configures several trainers: {', '.join(call.name for call, _ in wanted)}",
            name,
            "say which run is meant with --method",
        )
    if wanted:
        return _Trainer(None, wanted[0][0], read_method(wanted[0][1], name))
    if method is not None and (general or configs):
        return _Trainer(None, general[0] if general else configs[0][0], method)
    raise RecipeError(
        f"{name} calls no trainer" + " (TrainingArguments are of any method)" * bool(general),
        name,
        "name the script that makes the trainer" + ", or give --method" * bool(general),
    )


def _method_of_config(call: Call) -> str | None:
    return method_of_trainer(call.name.removesuffix("Config")) if call.name.endswith("Config") else None


class _Reading:
    """Follows the arguments of a trainer to the calls that made them."""

    def __init__(self, script: Script, trainer: _Trainer) -> None:
        self.script = script
        self.trainer = trainer
        self.keys: dict[str, Any] = {}
        self.notes: list[str] = []
        self.doubts: list[str] = []
        self.rewards: list[str] = []
        self.is_transformers = False

    def read(self) -> None:
        """Set the keys."""
        call = self.trainer.call or Call("", "")
        self.config(call)
        given = {key: value for key, value in call.arguments.items() if value is not None}
        self.keys |= {key: value for key, value in given.items() if key in _OF_TRAINERS}
        self.keys |= {
            f"trainer.{key}": str(value) if isinstance(value, Computed) else value
            for key, value in given.items()
            if key not in _OF_TRAINERS and key not in _GIVEN
        }
        self.model(call.given("model", 0))
        self.rounding(given.get("quantization_config"))
        self.adapter(given.get("peft_config"))
        self.reference(call)
        self.teacher(given.get("teacher_model"))
        self.judges(given)
        self.rows(call)
        self.templates()
        if any(one.name in _ANSWERS_ONLY for one in self.script.calls):
            self.keys["assistant_only_loss"] = True
        for one in self.script.calls:
            if one.name == "train" and one.arguments.get("resume_from_checkpoint") is not None:
                self.keys["resume_from_checkpoint"] = one.arguments["resume_from_checkpoint"]
        self.doubts = [*call.doubts, *self.doubts]
        self.keys = {key: _without_objects(value) for key, value in self.keys.items()}

    def use(self, call: Call) -> Call:
        """Note that a call is one of the run's."""
        self.doubts += call.doubts
        return call

    def named(self, *names: str) -> list[Call]:
        return [call for call in self.script.calls if call.name in names]

    def config(self, call: Call) -> None:
        """The arguments of the trainer's configuration."""
        args = call.given("args", 1 if self.trainer.method not in _PAIRED else None)
        made = self.trainer.config or made_by(args)
        if made is None or not made.name.endswith(("Config", "Arguments")):
            others = [
                one
                for one in self.script.calls
                if one.name in ARGUMENTS or _method_of_config(one) == self.trainer.method
            ]
            made = others[0] if len(others) == 1 else None
        if made is None:
            if isinstance(args, Computed):
                self.notes.append(
                    f"the trainer's configuration ({args}) is not written in the script: its defaults are "
                    "taken; give the command that was run, and its values are read"
                )
            return
        self.is_transformers = made.name in ARGUMENTS
        self.keys |= {key: value for key, value in self.use(made).arguments.items() if value is not None}
        for key in ("peft_config", "model_init_kwargs"):
            if isinstance(self.keys.get(key), Computed):
                self.keys.pop(key)

    def model(self, value: Any) -> None:
        """The model that is trained, with the adapter on it."""
        if isinstance(value, str) and not isinstance(value, Computed):
            self.keys[f"{LOAD}.model_name"] = (
                value  # A trainer of TRL loads a model that it is given by name.
            )
            return
        path = _path(value, _loads) or [one for one in _reached(value) if one.name == ADAPT]
        loads = [one for one in self.script.calls if _loads(one)]
        if not loads:
            for one in self.named(*_ROUNDINGS)[:1]:
                self.rounded(one)
        if not path:
            others = [one for one in loads if not self.is_another(one)]
            path = others[:1]
            if len({(one.line, str(one.owner)) for one in others}) > 1:
                self.notes.append(
                    f"the script loads several models, and what the trainer is given ({value}) is made when "
                    f"it runs: the first is taken, of line {others[0].line}"
                )
            path += [one for one in self.named(ADAPT) if path][:1]
        for one in path:
            if one.name == ADAPT:
                self.adapted(one)
            elif _loads(one):
                self.loaded(one)

    def is_another(self, call: Call) -> bool:
        """Whether a model is loaded as a reward model."""
        return "Classification" in call.owner and self.trainer.method != "reward"

    def loaded(self, call: Call) -> None:
        given = {key: value for key, value in self.use(call).arguments.items() if value is not None}
        given.pop("tokenizer", None)
        if call.positional:
            given.setdefault("model_name", call.positional[0])
        if "pretrained_model_name_or_path" in given:
            given["model_name"] = given.pop("pretrained_model_name_or_path")
        if "torch_dtype" in given:
            given["dtype"] = given.pop("torch_dtype")
        rounding = given.pop("quantization_config", None)
        self.keys |= {f"{LOAD}.{key}": value for key, value in given.items()}
        self.rounding(rounding)
        if "FastVision" in call.owner:
            self.notes.append("FastVisionModel reads pictures too; here its text part is trained, on text")

    def rounding(self, rounding: Any) -> None:
        """The quantization that a model is loaded with."""
        made = made_by(rounding)
        if made is not None and made.name not in _ROUNDINGS:
            made = None
        if made is None and isinstance(rounding, Computed):
            made = next(iter(self.named(*_ROUNDINGS)), None)
        if isinstance(rounding, Mapping):
            made = Call("BitsAndBytesConfig", "", {str(key): one for key, one in cast(Any, rounding).items()})
        if made is not None:
            self.rounded(made)
        elif isinstance(rounding, Computed):
            self.notes.append(
                f"the quantization ({rounding}) is made when the script runs: write model.quantize"
            )
        elif rounding is not None:
            self.keys[f"{LOAD}.quantization_config"] = rounding

    def rounded(self, call: Call) -> None:
        if call.name in OTHER_BITS:
            self.keys[f"{LOAD}.quantization_config"] = call.name
            return
        read = ("load_in_", "bnb_4bit_quant_type")
        self.keys |= {f"{LOAD}.{key}": one for key, one in call.arguments.items() if key.startswith(read)}

    def adapter(self, value: Any) -> None:
        """The adapter that the trainer itself makes."""
        made = made_by(value)
        if made is not None and made.name == "LoraConfig":
            self.adapted(made)
        elif isinstance(value, Computed):
            configs = self.named("LoraConfig")
            if len(configs) == 1:
                self.adapted(configs[0])
            else:
                self.notes.append(f"the adapter ({value}) is made when the script runs: write model.adapter")
        elif self.trainer.call is None:
            for one in self.named("LoraConfig", ADAPT)[:1]:
                self.adapted(one)

    def adapted(self, call: Call) -> None:
        given = dict(self.use(call).arguments)
        config = call.given("peft_config", 1)
        made = made_by(config)
        if call.name == ADAPT and made is not None:
            given = dict(self.use(made).arguments)
        kept = {key: one for key, one in given.items() if key not in ("task_type", "inference_mode", "model")}
        self.keys |= {f"{ADAPT}.{key}": one for key, one in kept.items() if one is not None}
        self.keys[f"{ADAPT}.used"] = True

    def reference(self, call: Call) -> None:
        """A second model that a trainer of pairs is given."""
        value = call.arguments.get("ref_model")
        if value is None and self.trainer.method in _PAIRED and len(call.positional) > 1:
            value = call.positional[1]
        loads = _path(value, _loads)
        if loads:
            path = _name_of(loads[-1])
            same = path in (None, self.keys.get(f"{LOAD}.model_name"))
            self.keys["ref_model"] = "the same" if same else path

    def teacher(self, value: Any) -> None:
        """The teacher's path and arguments."""
        if isinstance(value, str) and not isinstance(value, Computed):
            self.keys["teacher_model_name_or_path"] = value
        loads = _path(value, _loads)
        if not loads:
            return
        more = {key: one for key, one in self.use(loads[-1]).arguments.items() if one is not None}
        for key in ("device_map", "pretrained_model_name_or_path"):
            more.pop(key, None)
        path = _name_of(loads[-1])
        self.keys |= {} if path is None else {"teacher_model_name_or_path": path}
        self.keys |= {"teacher_model_init_kwargs": more} if more else {}

    def judges(self, given: Mapping[str, Any]) -> None:
        """Reward models, and functions of the script."""
        value = given.get("reward_funcs", given.get("reward_model"))
        items = value.items if isinstance(value, Several) else value
        listed = cast(list[Any], items) if isinstance(items, list) else [items]
        for one in listed:
            loads = _path(one, _loads)
            if loads and _name_of(loads[-1]) is not None:
                self.keys["reward_model_name_or_path"] = _name_of(loads[-1])
            elif isinstance(one, Computed):
                self.rewards.append(str(one))
            elif isinstance(one, str):
                key = "reward_model_name_or_path" if "/" in one else "trainer.reward_funcs"
                self.keys[key] = one
        if self.rewards:
            self.keys["trainer.reward_funcs"] = str(value)

    def rows(self, call: Call) -> None:
        """The rows of the training, and those that are held out."""
        value = call.arguments.get("train_dataset")
        calls = _reached(value)
        sources = self.sources(calls)
        if not sources and value is not None:
            others = self.named(DATASET)
            sources = self.sources(others) if len({one.line for one in others}) == 1 else []
            self.keys[ROWS] = [] if sources or calls else [f"made when it runs: {value[:60]}"]
        elif not sources:
            sources = self.sources(self.named(DATASET)[:1])
        if sources:
            self.keys[DATASET] = sources
        self.changes(calls)
        held = _reached(call.arguments.get("eval_dataset"))
        split = next((one for one in held if one.name == "train_test_split"), None)
        size = None if split is None else split.given("test_size", 0)
        if isinstance(size, float):
            self.keys["test_split_size"] = size
        elif held:
            self.keys[HELD_OUT] = [one for one in self.sources(held) if one not in sources] or None

    def sources(self, calls: Sequence[Call]) -> list[dict[str, Any]]:
        """The files and hub datasets that rows begin with."""
        found: list[dict[str, Any]] = []
        for place, call in enumerate(calls):
            if call.name != DATASET:
                continue
            self.use(call)
            source = {"path": call.given("path", 0), "name": call.given("name", 1)}
            source |= {
                key: call.arguments.get(key) for key in ("split", "data_files", "data_dir", "revision")
            }
            item = calls[place - 1].positional[0] if place and calls[place - 1].name == "[]" else None
            if source["split"] is None and isinstance(item, str):
                source["split"] = item
            if call.arguments.get("streaming") is True:
                self.keys["streaming"] = True
            source = {key: one for key, one in source.items() if one is not None}
            if source not in found:
                found.append(source)
        return found

    def changes(self, calls: Sequence[Call]) -> None:
        """What the script does to its rows that a recipe does not."""
        said: list[str] = self.keys.setdefault(ROWS, [])
        for call in reversed(calls):
            if call.name in (*_SAME_ROWS, DATASET, LOAD):
                continue
            function = call.given("function", 0)
            if call.name == "map" and only_renders(self.script, function):
                self.notes.append(
                    f"rows are rendered by the chat template here too, as the script's {function} does"
                )
                self.keys.pop("dataset_text_field", None)
                continue
            values = [str(one) for one in call.positional if not made_by(one)]
            said.append(f"{call.name}({', '.join(values)[:60]})")
        if not said:
            del self.keys[ROWS]

    def templates(self) -> None:
        """Chat templates that the script gives its tokenizer."""
        before = self.trainer.call.line if self.trainer.call is not None else 0
        calls = [one for one in self.named("get_chat_template") if one.line <= before or not before]
        named = ["chatml" if (one := call.given("chat_template", 1)) is None else one for call in calls]
        given = [value for path, value in self.script.set_on.items() if path.endswith(".chat_template")]
        if named or given:
            self.keys[TEMPLATES] = [*named[-1:], *given[-1:]]


def _without_objects(value: Any) -> Any:
    """A value with objects of the script's classes as words."""
    if isinstance(value, Fields):
        return Computed("an object of the script")
    if isinstance(value, Mapping):
        return {str(key): _without_objects(one) for key, one in cast(Mapping[Any, Any], value).items()}
    return [_without_objects(one) for one in cast(list[Any], value)] if isinstance(value, list) else value


def _loads(call: Call) -> bool:
    is_model = _MODELS.search(call.owner) is not None and not re.search(r"Peft|Tokenizer|Config", call.owner)
    return call.name == LOAD and is_model


def _name_of(call: Call) -> Any:
    found = call.given("pretrained_model_name_or_path", 0)
    return call.arguments.get("model_name") if found is None else found


def _inner(value: Any) -> Iterator[Call]:
    """The calls whose results a value holds."""
    call = made_by(value)
    if call is not None:
        yield call
    elif isinstance(value, Several):
        for one in value.items:
            yield from _inner(one)


def _given(call: Call) -> Iterator[Call]:
    """The calls whose results a call is given, the object that it is of first."""
    for value in (call.subject, *call.positional, *call.arguments.values()):
        yield from (one for one in _inner(value) if one.name != "get_chat_template")


def _reached(value: Any) -> list[Call]:
    """Every call that leads to a value, from the last one on."""
    found: list[Call] = []
    waiting = [*_inner(value)]
    while waiting and len(found) < MOST_FOLLOWED:
        call = waiting.pop(0)
        if call not in found:
            found.append(call)
            waiting = [*_given(call), *waiting]
    return found


def _path(value: Any, goal: Any) -> list[Call]:
    """The calls from a value to the first one that is a goal; nothing where none is reached."""
    before: dict[int, Call | None] = {}
    waiting: list[tuple[Call, Call | None]] = [(one, None) for one in _inner(value)]
    while waiting and len(before) < MOST_FOLLOWED:
        call, later = waiting.pop(0)
        if id(call) in before:
            continue
        before[id(call)] = later
        if goal(call):
            path, at = [call], before[id(call)]
            while at is not None:
                path.insert(0, at)
                at = before[id(at)]
            return path
        waiting = [*((one, call) for one in _given(call)), *waiting]
    return []
