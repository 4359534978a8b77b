"""The manifest of a checkpoint: its run, its place in it, and the checksum of every file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from pydantic import JsonValue, ValidationError

from memtrain.memory.plan.plan import Plan, PreparedData
from memtrain.recipes.sections.base import Section

MANIFEST_FILE = "manifest.json"
FORMAT = 1
DIGEST_BYTES = 16


class OtherVersion(ValueError):
    """A manifest that another version of memtrain has written: not damaged, and not understood."""


class FileEntry(Section):
    """A file of a checkpoint."""

    name: str
    """Path below the checkpoint's folder, with forward slashes."""
    num_bytes: int
    digest: str
    """blake2b of its bytes, as hex."""


class CheckpointFacts(Section):
    """Run of a checkpoint, and its place in the run."""

    step: int
    """Optimizer steps made: which rows come next, and every random draw, is a function of it."""
    eval_loss: float | None
    """Held-out loss at this step, where it was measured; of another metric, what is lower is better."""
    recipe: dict[str, JsonValue]
    settings: dict[str, JsonValue]
    versions: dict[str, str]
    data: str
    """Fingerprint of the training rows."""
    device: str
    """Name of the device, and for a CPU the instructions that torch uses on it."""
    eval_metric: str = ""
    """Metric that `eval_loss` is of; empty for the held-out loss or reward."""
    stopped_early: bool = False
    """The run ended here, because held-out rows showed no gain (`eval.early_stopping`)."""


class Manifest(Section):
    """The last file that is written into a checkpoint."""

    format: int = FORMAT
    facts: CheckpointFacts
    files: tuple[FileEntry, ...]
    digest: str = ""
    """blake2b of the other fields, as JSON."""

    def sealed(self) -> Manifest:
        """The same manifest with its digest."""
        text = self.model_dump_json(exclude={"digest"})
        digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
        return self.model_copy(update={"digest": digest})


def facts_of(
    plan: Plan, *, step: int, eval_loss: float | None = None, stopped_early: bool = False
) -> CheckpointFacts:
    """The facts of a checkpoint of the run that `plan` describes, made on this machine."""
    return CheckpointFacts(
        step=step,
        eval_loss=eval_loss,
        recipe=plan.hidden_recipe(with_digest=True),
        settings=plan.settings.model_dump(mode="json"),
        versions=plan.versions,
        data=data_fingerprint(plan.data),
        device=device_name(plan.settings.device),
        eval_metric=metric_of(plan),
        stopped_early=stopped_early,
    )


def metric_of(plan: Plan) -> str:
    """Metric by which the best checkpoint is chosen; empty for the held-out loss or reward."""
    stopping = plan.recipe.eval.early_stopping
    return (stopping.metric or "") if stopping is not None else ""


def data_fingerprint(data: PreparedData) -> str:
    """Fingerprint of the training rows: the token store (its key is made of the content), less held-out
    rows."""
    train = data.train
    return (
        f"{Path(train.folder).name}: {train.num_rows} rows, {train.num_tokens} tokens, "
        f"{train.num_loss_tokens} learnt, {data.held_out_rows} rows held out"
    )


def device_name(kind: str) -> str:
    """The device of this process: the model of its GPU, or the CPU with the instructions torch uses on it."""
    return (
        torch.cuda.get_device_name() if kind == "cuda" else f"cpu {torch.backends.cpu.get_cpu_capability()}"
    )


def file_entry(folder: Path, file: Path) -> FileEntry:
    """Name, size and checksum of a file below `folder`, read in pieces."""
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()
    return FileEntry(name=file.relative_to(folder).as_posix(), num_bytes=file.stat().st_size, digest=digest)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises: OtherVersion when it is not one of this version; ValueError when there is none, or it is damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(f"no {MANIFEST_FILE}: the checkpoint was never finished")
    try:
        loaded = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"its {MANIFEST_FILE} is damaged") from None
    found = loaded.get("format") if isinstance(loaded, dict) else None
    if found != FORMAT:
        raise OtherVersion(f"its format is {found}; this version of memtrain reads {FORMAT}")
    try:
        manifest = Manifest.model_validate_json(json.dumps(loaded))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise OtherVersion(f"this version of memtrain does not know its {MANIFEST_FILE} ({key})") from None
    if manifest != manifest.sealed():
        raise ValueError(f"its {MANIFEST_FILE} is damaged (the checksum differs)")
    return manifest


def is_of_another_version(folder: Path) -> bool:
    """Whether a checkpoint is of a version that this one does not understand: never removed unasked."""
    try:
        read_manifest(folder)
    except OtherVersion:
        return True
    except ValueError:
        return False
    return False


def fault_of(folder: Path) -> str:
    """Reason that a checkpoint cannot be trusted, in a few words; empty when every file is as it was
    written."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    for entry in manifest.files:
        file = folder / entry.name
        if not file.is_file():
            return f"{entry.name} is missing"
        num_bytes = file.stat().st_size
        if num_bytes != entry.num_bytes:
            return f"{entry.name} has {num_bytes} bytes, not {entry.num_bytes}"
        if file_entry(folder, file).digest != entry.digest:
            return f"{entry.name} is damaged (the checksum differs)"
    return ""
