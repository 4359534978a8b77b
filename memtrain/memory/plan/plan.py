"""The plan: the whole contract between the command line and the workers, as JSON."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from memtrain.errors import LaunchError
from memtrain.memory.plan.settings import Settings
from memtrain.recipes.reading.environment import EnvironmentText, hidden, read_again, revealed
from memtrain.recipes.recipe import Recipe
from memtrain.recipes.sections.base import Section

PLAN_FILE = "plan.json"

COPY = "checkpoint copy"
"""Owner of copies that are written to disk."""


class Decision(Section):
    """A setting of the run: its value, why, and who decided."""

    setting: str
    """Name of the setting, as in Settings."""
    value: str
    """The value, as shown."""
    reason: str
    """Reason of this value, in one sentence."""
    source: str
    """`recipe.yaml:12`, `override`, `default`, `rule`, or the name of a strategy."""


class Owned(Section):
    """Bytes of one owner."""

    owner: str
    """weights, gradients, optimizer, master copies, activations, recomputation, logits, ..."""
    num_bytes: int


class PhasePeak(Section):
    """Predicted peak of one phase on one device."""

    phase: str
    """load, first step, steady step, evaluation, saving."""
    num_bytes: int
    """Bytes of live tensors at the peak."""
    owners: tuple[Owned, ...]
    """Owners of the bytes; sums to `num_bytes`."""


class Prediction(Section):
    """Expected memory of the run."""

    phases: tuple[PhasePeak, ...]
    method: str
    """Method of the prediction: `arithmetic` or `trace`."""
    budget_bytes: int | None
    """Budget that the prediction is compared with; None where nothing limits it."""
    kind: str = ""
    """Key of runs whose predictions err alike (see history.py)."""
    correction_bytes: int = 0
    """Memory that runs of this kind needed beside their predictions (below zero: less), as measured here."""

    @property
    def corrected_bytes(self) -> int:
        """The highest peak, corrected by earlier runs."""
        return self.peak.num_bytes + self.correction_bytes

    @property
    def peak(self) -> PhasePeak:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.num_bytes)


class SourceShare(Section):
    """Source of a mixture, as an epoch has it."""

    source: str
    """The source, as the recipe names it."""
    num_rows: int
    num_tokens: int
    num_loss_tokens: int


class PreparedSplit(Section):
    """A tokenized split on disk, with its facts."""

    folder: str
    """Folder of the token store."""
    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    """Tokens that are trained on."""
    num_skipped: int
    """Bad rows that were left out (`data.on_bad_row: skip`)."""
    longest_tokens: int
    notes: tuple[str, ...] = ()
    """Parts that were not read, or are not trained on: files, bad rows, fields."""
    trained: str = ""
    """Parts of the rows that are trained on, in words."""
    example: tuple[tuple[str, bool], ...] = ()
    """Text of the first row in runs, and whether each is trained; a long row is cut."""
    sources: tuple[SourceShare, ...] = ()
    """Rows and tokens of each source of a mixture; empty where there is one source."""
    boundary: str = ""
    """What the end of a string prompt does to the tokens, in words; empty where no row has one."""
    is_merged: bool = False
    """Whether a token of some row reaches over the end of its prompt."""

    def trained_words(self) -> str:
        """Parts that are trained on, with their share of the tokens; empty where that was not asked."""
        share = self.num_loss_tokens / max(1, self.num_tokens)
        return f"trained: {self.trained}, {share:.1%} of the tokens" if self.trained else ""

    def source_words(self) -> list[str]:
        """A sentence for each source of a mixture: rows, tokens, loss tokens, and its share of them."""
        tokens = max(1, self.num_tokens)
        return [
            f"{one.source}: {one.num_rows:,} row{'' if one.num_rows == 1 else 's'}, {one.num_tokens:,} tokens"
            f" ({one.num_tokens / tokens:.1%} of the tokens)"
            f"{_trained_share(one) if self.num_loss_tokens else ''}"
            for one in self.sources
        ]


def _trained_share(one: SourceShare) -> str:
    share = one.num_loss_tokens / max(1, one.num_tokens)
    return f", {one.num_loss_tokens:,} loss tokens ({share:.1%} of its own)"


class TurnEnd(Section):
    """The token that the chat template ends the assistant's turns with."""

    token: str
    token_id: int
    eos_token: str | None
    """The tokenizer's end-of-sequence token."""

    def words(self) -> str:
        """The token that ends a completion, in words."""
        if self.token == self.eos_token:
            return f"turns end with {self.token}, the tokenizer's end-of-sequence token"
        return (
            f"turns end with {self.token}, the end-of-sequence token is {self.eos_token}: generation stops "
            "at either, in rollouts and in the saved model (generation_config.json)"
        )


class SamplePrompt(Section):
    """A prompt of `eval.samples`."""

    text: str
    ids: tuple[int, ...]
    """Tokens of the prompt, as the model reads them."""


class PreparedData(Section):
    """The tokenized data of a run."""

    train: PreparedSplit
    eval: PreparedSplit | None
    held_out_rows: int
    """Rows of `train` that are set aside for evaluation (`data.eval_fraction`)."""
    turn_end: TurnEnd | None = None
    """The token that ends a turn, where rows are conversations."""
    has_turns: bool = False
    """Whether rows are conversations whose turns may be trained on apart: not prompts with completions."""
    leaves_out_template: bool = False
    """Whether prompts and answers are strings, and the tokenizer has a chat template that they do not use;
    not where `data.strings_are` says that they are text."""
    strings_of: tuple[str, ...] = ()
    """Sources of a mixture with such strings, as the recipe names them."""
    samples: tuple[SamplePrompt, ...] = ()
    """Prompts of `eval.samples`."""

    def words(self, *, shows_boundaries: bool = False) -> list[str]:
        """Sentences on the trained parts of rows, the ends of turns, and keys without effect.

        `shows_boundaries`: also where no token reaches over the end of a prompt.
        """
        sentences = [f"source {one}" for one in self.train.source_words()]
        if self.eval is not None:
            sentences += [f"held-out source {one}" for one in self.eval.source_words()]
        sentences += [self.train.trained_words(), self.turn_end.words() if self.turn_end is not None else ""]
        if self.leaves_out_template:
            sentences.append(string_words(self.strings_of))
        if self.train.is_merged or shows_boundaries:
            sentences.append(self.train.boundary)
        sentences += [f"data {note}" for note in self.notes]
        return [f"{one[0].upper()}{one[1:]}." for one in sentences if one]

    @property
    def notes(self) -> tuple[str, ...]:
        """Parts of both splits that were not read, or are not trained on."""
        held = self.eval.notes if self.eval is not None else ()
        return (*self.train.notes, *(f"of data.eval: {note}" for note in held))


def string_words(sources: Sequence[str] = ()) -> str:
    """The warning that strings reach a model of a chat template as they stand; `sources`: those of a mixture
    that have them."""
    place = f" of {', '.join(sources)}" if sources else ""
    return (
        f"warning: the rows{place} are strings, which the tokenizer's chat template does not write: the "
        "model sees no turns. If they are turns of a chat, set data.strings_are: turns; data.strings_are: "
        "text says that plain text is meant"
    )


class Plan(Section):
    """A resolved run. The workers read this and decide nothing."""

    version: Literal[2] = 2
    """Of the fields; a worker takes no plan of another."""
    recipe: Recipe
    recipe_path: str
    run_dir: str
    settings: Settings
    decisions: tuple[Decision, ...]
    data: PreparedData
    prediction: Prediction
    plain: Prediction
    """The same run without any memory strategy, for comparison."""
    versions: dict[str, str]
    """Versions of memtrain, torch, transformers and Python that made the plan."""
    host: tuple[Owned, ...] = ()
    """Predicted memory of the host by owner, all processes together, in the phase that needs most of it."""
    environment: tuple[EnvironmentText, ...] = ()
    """Texts of the recipe that came from environment variables."""
    started_in: str = ""
    """Working directory of the command: relative paths of the recipe lie below it."""
    num_trained: int = 0
    """Trained parameters of the model; 0 in plans that were made before they were counted."""
    num_parameters: int = 0
    """All of them, an adapter's included."""

    def parameters_words(self) -> str:
        """Trained parameters, and their share of all; empty where they were not counted."""
        if not self.num_parameters:
            return ""
        share = 100 * self.num_trained / self.num_parameters
        return f"{self.num_trained:,} of {self.num_parameters:,} ({share:.{1 if share >= 1 else 3}f}%)"

    def write(self, folder: Path) -> Path:
        """Write `plan.json` into `folder` and return its path."""
        path = folder / PLAN_FILE
        path.write_text(self._text(), encoding="utf-8")
        return path

    def digest(self) -> str:
        """Digest of the file that `write` makes: processes that are started for this plan take no other."""
        return _digest(self._text().encode())

    def _text(self) -> str:
        values = self.model_dump(mode="json") | {"recipe": self.hidden_recipe()}
        return json.dumps(values, indent=1) + "\n"

    def hidden_recipe(self, *, with_digest: bool = False) -> dict[str, JsonValue]:
        """The recipe as JSON, with no text that came from the environment: in every file this form stands."""
        return hidden(self.recipe.model_dump(mode="json"), self.environment, with_digest=with_digest)


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def run_fix(run: Path) -> str:
    """Way out where a run folder is not there: the nearest runs beside it."""
    runs = [one.parent for one in sorted(run.parent.glob(f"*/{PLAN_FILE}"))]
    near = difflib.get_close_matches(run.name, [one.name for one in runs], n=3, cutoff=0.4)
    found = [one for one in runs if one.name in near] or runs[:3]
    return f"did you mean {' or '.join(map(str, found))}?" if found else "give the folder of a run"


def plan_of_run(run: Path, *, reveals: bool = True) -> Plan:
    """The plan in a run folder, whose model's folders are absolute: the run is used from anywhere.

    Raises: LaunchError as `read_plan`.
    """
    plan = read_plan(run / PLAN_FILE, reveals=reveals)
    model = plan.recipe.model
    places = {
        key: str(Path(plan.started_in) / given)
        for key in ("path", "tokenizer", "config")
        if plan.started_in
        and isinstance(given := getattr(model, key), str)
        and (Path(plan.started_in) / given).exists()
    }
    recipe = plan.recipe.model_copy(update={"model": model.model_copy(update=places)})
    return plan.model_copy(update={"recipe": recipe})


def read_plan(path: Path, digest: str = "", *, reveals: bool = True) -> Plan:
    """The plan in a `plan.json`, which must have this digest where one is given; values from the environment
    are read again, if it `reveals`.

    Raises: LaunchError when there is none, it is another one, or of another version of memtrain, or an
    environment variable of its recipe is not set here.
    """
    if not path.parent.is_dir():
        raise LaunchError(f"there is no folder {path.parent}", str(path.parent), run_fix(path.parent))
    if not path.is_file():
        raise LaunchError(
            "the run folder has no plan", str(path), "run the training command; it writes plan.json"
        )
    raw = path.read_bytes()
    if digest and _digest(raw) != digest:
        raise LaunchError(
            "plan.json is not the plan that this process was started for: another start of the run "
            "replaced it",
            where=str(path),
            fix="run the training command again; one run folder is for one run",
        )
    try:
        plan = Plan.model_validate_json(raw)
    except ValueError as error:
        raise LaunchError(
            f"plan.json does not fit this version of memtrain: {error}",
            where=str(path),
            fix="run the training command again; it makes a new plan",
        ) from None
    if not plan.environment or not reveals:
        return plan
    texts = read_again(plan.environment, str(path))
    recipe = revealed(plan.recipe.model_dump(mode="json"), texts)
    return plan.model_copy(
        update={"recipe": Recipe.model_validate_json(json.dumps(recipe)), "environment": texts}
    )
