"""Model, tokenizer, data and packages of a recipe, looked at before a run: all faults at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from memtrain.cli.plan.check_paths import missing_paths
from memtrain.cli.plan.check_prompts import metric_words
from memtrain.cli.plan.check_rendering import rendered_words
from memtrain.cli.plan.check_rewards import check_first_row, check_rewards
from memtrain.cli.plan.recipe_lines import at_their_lines
from memtrain.errors import DataError, Fault, LaunchError, MemtrainError, RecipeError
from memtrain.memory.hardware.packages import installed, missing
from memtrain.memory.planner.use_and_never import with_use_and_never
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.formats.detect import FORMS, METHOD_FORMATS, used_columns
from memtrain.recipes.formats.fields import BadRow
from memtrain.recipes.formats.media import refuse_media
from memtrain.recipes.reading.load import LoadedRecipe, load_rest
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.data import HeldOutSource, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from memtrain.trainers.data.store.look_into import Found

FIRST_ROWS = 100
"""Rows of a source that are read. Taste: a wrong column shows in the first ones."""
LATER = "not checked"


@dataclass(frozen=True, slots=True)
class Line:
    """Part of a run that was looked at, and the finding."""

    item: str
    found: str


@dataclass(slots=True)
class _Look:
    """Findings and faults so far."""

    loaded: LoadedRecipe
    lines: list[Line] = field(default_factory=list[Line])
    errors: list[MemtrainError] = field(default_factory=list[MemtrainError])

    def at(self, item: str, look: Callable[[], str]) -> bool:
        """Note the finding of a look, or its faults at their lines; whether there were none."""
        try:
            with at_their_lines(self.loaded):
                found = look()
        except MemtrainError as error:
            self.errors.append(error)
            return False
        if found:
            self.lines.append(Line(item, found))
        return True


def check_rest(recipe: str, overrides: Sequence[str], error: RecipeError) -> RecipeError:
    """The faults of a recipe, and after them those of the parts of its run that none of these is about."""
    rest = load_rest(recipe, overrides)
    if rest is None:
        return error
    loaded, at_fault = rest
    more = missing_paths(loaded, at_fault)
    try:
        check_run(loaded, frozenset(str(key[0]) for key in at_fault))
    except MemtrainError as found:
        more += found.faults
    every = RecipeError(list(dict.fromkeys([*error.faults, *more])))
    for note in getattr(error, "__notes__", ()):
        every.add_note(note)
    return every


def with_the_rest(loaded: LoadedRecipe, error: MemtrainError) -> MemtrainError:
    """The error of a run that could not begin, with the faults that a look at its other parts finds."""
    try:
        check_run(loaded)
    except MemtrainError as found:
        known = {word for one in error.faults for word in (one.what, (one.where, one.fix))}
        more = [one for one in found.faults if not {one.what, (one.where, one.fix)} & known]
        return type(error)([*error.faults, *more])
    return error


def check_run(loaded: LoadedRecipe, left_out: frozenset[str] = frozenset()) -> list[Line]:
    """Findings on the parts of a run, each with its name.

    `left_out`: sections of the recipe that have faults; parts that need them are not looked at.
    Raises: MemtrainError with every fault of every part, each with its line.
    """
    from memtrain.trainers.data.tokenize.tokenizer import tokenizer_of

    recipe = loaded.recipe
    look = _Look(loaded)
    tokenizer = cache(lambda: tokenizer_of(recipe.model))
    if not left_out:
        look.at("strategies", lambda: _nothing(with_use_and_never(SourcedRecipe(recipe, loaded.where))))
    knows_model = "model" not in left_out
    has_model = knows_model and look.at("model", lambda: model_words(recipe))
    # A folder that is missing is one fault, not two.
    looks = has_model or (knows_model and recipe.model.tokenizer is not None)
    has_tokenizer = looks and look.at("tokenizer", lambda: tokenizer_words(recipe, tokenizer))
    data = (("data.train", recipe.data.train), ("data.eval", recipe.data.eval))
    for key, sources in () if left_out & {"data", "method"} else data:
        found: list[Found] = []
        for number, (source, item) in enumerate(zip(sources, _items(key, sources), strict=True)):
            place = f"{key}[{number}]"
            look.at(
                item,
                lambda source=source, place=place, found=found: source_words(recipe, source, place, found),
            )
        if len(found) == len(sources) and found and has_tokenizer:
            _look_at_tokens(look, key, found, tokenizer())
            if not left_out and key == "data.train" and recipe.online is not None:
                look.at(
                    "rewards", lambda found=found: _nothing(check_first_row(loaded, columns_of(found[0])))
                )
            if not left_out and key == ("data.eval" if recipe.data.eval else "data.train"):
                look.at("eval.metrics", lambda found=found: metric_words(recipe, found, tokenizer()))
    if not left_out & {"model", "method", "distill"}:
        look.at("teacher", lambda: teacher_words(recipe, compares=has_tokenizer))
    if "rewards" not in left_out:
        look.at("rewards", lambda: _nothing(check_rewards(loaded)))
    for item, check in PACKAGES:
        look.at(item, lambda check=check: check(recipe))
    if look.errors:
        faults = list(dict.fromkeys(fault for error in look.errors for fault in error.faults))
        raise type(look.errors[0])(faults)
    return look.lines


def _items(key: str, sources: Sequence[Source]) -> list[str]:
    """Names of the sources of a key: of the only one `data.eval`, of several `data.eval[1]`, and of
    evaluation sets with names `data.eval.math`."""
    names = [f"{key}.{one.set}" if isinstance(one, HeldOutSource) and one.set else key for one in sources]
    return [
        name if names.count(name) == 1 else f"{name}[{names[:number].count(name)}]"
        for number, name in enumerate(names)
    ]


def _nothing(_: object) -> str:
    return ""


def model_words(recipe: Recipe) -> str:
    """The model in words.

    Raises: LaunchError when there is none of that name, or its weights cannot be read.
    """
    from memtrain.cli.plan.lookup import look_at_model
    from memtrain.cli.plan.model_shape import shape_for
    from memtrain.recipes.registry import METHODS
    from memtrain.trainers.model.loading.module_shapes import check_model

    model, head = recipe.model, METHODS[recipe.method].head
    looked = look_at_model(model)
    shape = shape_for(looked.config, model.path or "model.config", head)
    check_model(model, looked.config, head)
    is_folder = model.path is not None and Path(model.path).expanduser().is_dir()
    kind = str(looked.config.get("model_type", "model"))
    words = f"{model.path or 'model.config'}: {kind}, {shape.num_parameters / 1e6:,.1f} M parameters"
    if is_folder:
        return f"{words}, weights complete"
    if model.path is None:
        return f"{words}, random weights"
    if model.path.startswith("builtin:"):
        return f"{words}; weights are built in"
    why = looked.note.rstrip(".") or "they are on the hub, or in its cache"
    return f"{words}; weights {LATER}: {why[0].lower()}{why[1:]}"


def tokenizer_words(recipe: Recipe, load: Callable[[], PreTrainedTokenizerFast]) -> str:
    """The tokenizer in words; its absence from here, where only the hub has it.

    Raises: DataError when it cannot be loaded.
    """
    from memtrain.trainers.data.tokenize.chat import template_of

    if recipe.model.tokenizer is None and not is_here(recipe.model.path or ""):
        return f"{LATER}: {recipe.model.path} is not on this machine"
    tokenizer = load()
    template = "with a chat template" if template_of(tokenizer) is not None else "without a chat template"
    return f"{len(tokenizer):,} tokens, {template}"


def teacher_words(recipe: Recipe, *, compares: bool) -> str:
    """The teacher in words, empty for a method without one; `compares`: the student's tokenizer is here.

    Raises: LaunchError when there is no such teacher, or its tokenizer is another; DataError for a file of
    its likeliest tokens that is not of this recipe.
    """
    from memtrain.cli.plan.lookup import look_at_model
    from memtrain.cli.plan.model_shape import shape_for
    from memtrain.trainers.data.tokenize.teacher_vocabulary import refuse_other_tokenizer, teacher_model

    section = recipe.taught
    if section is None or section.kind == "adapter_off":
        return "" if section is None else "the student without its adapter"
    if section.kind == "file":
        if compares:
            refuse_other_tokenizer(recipe)
        return f"{section.top_k_file}: its top {section.top_k} tokens, of the student's tokenizer"
    model = teacher_model(recipe)
    try:
        looked = look_at_model(model)
    except LaunchError as error:
        raise LaunchError([replace(one, where=f"{recipe.method}.teacher") for one in error.faults]) from None
    shape = shape_for(looked.config, str(model.path))
    words = f"{model.path}: {looked.config.get('model_type', 'model')}, {shape.num_parameters / 1e6:,.1f} M"
    if not compares or not is_here(str(model.path)):
        return f"{words} parameters; its tokenizer {LATER}: it is not on this machine"
    refuse_other_tokenizer(recipe)
    return f"{words} parameters, the student's tokenizer"


def is_here(name: str) -> bool:
    """Whether a name is built in, a path (a missing one too), or a model of the hub's cache."""
    if (
        name.startswith(("builtin:", ".", "/", "~"))
        or name.count("/") > 1
        or Path(name).expanduser().is_dir()
    ):
        return True
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def source_words(recipe: Recipe, source: Source, place: str, found: list[Found]) -> str:
    """Format of a source, and how many of its first rows can be used; adds the findings to `found`.

    Raises: DataError when there is no such source, or one of its first rows cannot be used.
    """
    from memtrain.trainers.data.sources.sources import is_on_hub
    from memtrain.trainers.data.store.look_into import also_trained, look_into, trained_too

    if is_on_hub(source):
        return f"{LATER}: {source.source} is a dataset of the hub, which the run downloads"
    one = look_into(source, recipe.data, METHOD_FORMATS[recipe.method], place)
    found.append(one)
    num_good, bad, unused = first_rows(one, "prompt" if recipe.online is not None else "")
    if bad and recipe.data.on_bad_row == "error":
        raise DataError(_once(bad))
    num_rows = num_good + len(bad)
    rows = f"the first {num_rows:,} rows" if num_rows != 1 else "the first row"
    if bad:
        rows = f"{num_good:,} of {rows}"
    skipped = f" ({len(bad):,} bad {'one is' if len(bad) == 1 else 'ones are'} skipped)" if bad else ""
    is_held_out = place.startswith("data.eval")
    both = also_trained(recipe.data, one, METHOD_FORMATS[recipe.method]) if is_held_out else []
    notes = "".join(f"; {note}" for note in (*one.notes, *unused, *([trained_too(both)] if both else [])))
    return f"{source.source}: format {one.reading.form}, {rows} can be used{skipped}{notes}"


def first_rows(found: Found, kind: str) -> tuple[int, list[Fault], list[str]]:
    """(usable rows among the first, faults of the others, words on columns in no text); `kind`: prompt
    for methods that write the answers."""
    from memtrain.trainers.data.tokenize.unrendered import unrendered_words, unused_columns

    form, names = FORMS[found.reading.form], found.reading.names
    bad: list[Fault] = []
    unused: Counter[str] = Counter()
    num_good = 0
    for place, row in found.rows():
        try:
            if isinstance(row, BadRow):
                raise row
            refuse_media(row, used_columns(form.name, names))
            example = found.reading.example(row, kind)
            unused.update(set(unused_columns(row, example, form.name, names, form.name)))
            num_good += 1
        except BadRow as wrong:
            bad.append(wrong.fault(place))
        if num_good + len(bad) == FIRST_ROWS:
            break
    return num_good, bad, list(unrendered_words(unused, num_good))


def _once(bad: Sequence[Fault]) -> list[Fault]:
    """Each fault of rows at the first row that has it, with the number of the others."""
    alike: dict[tuple[str, str], list[Fault]] = {}
    for one in bad:
        alike.setdefault((one.what, one.fix), []).append(one)
    return [
        replace(first, what=f"{first.what} (the same in {len(more):,} more of the first {FIRST_ROWS} rows)")
        if more
        else first
        for first, *more in alike.values()
    ]


def columns_of(found: Found) -> list[str]:
    """The columns of the first row of a source, but for the prompt."""
    first = next((row for _, row in found.rows() if not isinstance(row, BadRow)), {})
    return [str(column) for column in first if column != found.reading.names.prompt]


def _look_at_tokens(
    look: _Look, key: str, found: Sequence[Found], tokenizer: PreTrainedTokenizerFast
) -> None:
    """What the first rows of a key show as tokens: strings without turns, lost fields, empty answers; and of
    rows that all can be rendered, how many keep a loss token within `length:`."""
    from memtrain.trainers.data.packing.first_rows import first_rows_as_tokens, first_rows_kept

    recipe = look.loaded.recipe
    first = cache(lambda: first_rows_as_tokens(recipe, found, tokenizer, FIRST_ROWS))

    def rendering() -> str:
        words, faults = rendered_words(found, tokenizer, first())
        if faults and recipe.data.on_bad_row == "error":
            raise DataError(_once(faults))
        return words

    if look.at(f"{key}, rendering", rendering):
        look.at(f"{key}, loss", lambda: first_rows_kept(recipe, found, tokenizer, first()))


def tracker_words(recipe: Recipe) -> str:
    """The trackers that are asked for. Raises: LaunchError naming each whose package is missing."""
    names = recipe.log.trackers
    fix = "pip install 'memtrain[trackers]', or remove it from log.trackers"
    if absent := [name for name in names if name not in installed(*names)]:
        raise LaunchError(
            [Fault(f"{name} is asked for but not installed", "log.trackers", fix) for name in absent]
        )
    return f"{', '.join(names)}: installed" if names else ""


def benchmark_words(recipe: Recipe) -> str:
    """The benchmarks that are asked for. Raises: LaunchError where one, or the package, is missing."""
    from memtrain.trainers.tools.lm_eval import check_asked

    if recipe.eval.lm_eval is None:
        return ""
    check_asked(recipe.eval.lm_eval)
    return f"{', '.join(recipe.eval.lm_eval.tasks)}: lm-evaluation-harness has them"


def device_words(recipe: Recipe) -> str:
    """The packages that the keys of a recipe ask for on CUDA devices, installed or not checked here.

    Raises: LaunchError naming each that is missing where there is a CUDA device.
    """
    from memtrain.memory.hardware.devices import detect

    wanted = [one for one in DEVICE_PACKAGES if one[2](recipe)]
    if not wanted:
        return ""
    names = ", ".join(dict.fromkeys(package for package, *_ in wanted))
    if detect(recipe.cluster.device).device != "cuda":
        return f"{names}: {LATER}, there is no CUDA device here"
    faults = [
        Fault(f"{key} needs {package}, which {missing(package)}", key, f"pip install 'memtrain[{extra}]'")
        for package, extra, _, key in wanted
        if not installed(package)
    ]
    if faults:
        raise LaunchError(faults)
    return f"{names}: installed"


DEVICE_PACKAGES: tuple[tuple[str, str, Callable[[Recipe], bool], str], ...] = (
    ("bitsandbytes", "quant", lambda recipe: recipe.model.quantize != "none", "model.quantize"),
    ("bitsandbytes", "quant", lambda recipe: recipe.optim.kind.endswith("8bit"), "optim.kind"),
    ("liger_kernel", "liger", lambda recipe: recipe.model.liger == "on", "model.liger"),
    ("deepspeed", "deepspeed", lambda recipe: recipe.cluster.engine.startswith("zero"), "cluster.engine"),
)
"""(package, extra of memtrain, whether the recipe asks for it, the key that asks)."""
PACKAGES: tuple[tuple[str, Callable[[Recipe], str]], ...] = (
    ("trackers", tracker_words),
    ("benchmarks", benchmark_words),
    ("packages", device_words),
)
