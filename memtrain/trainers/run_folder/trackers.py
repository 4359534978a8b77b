"""Trackers outside the run folder: TensorBoard, W&B, MLflow and trackio, through accelerate's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from accelerate.tracking import (
    GeneralTracker,
    MLflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

from memtrain.errors import Fault, LaunchError
from memtrain.memory.plan.plan import Plan
from memtrain.trainers.protocols.events import EvalEvent, Event, FinalEvent, StepEvent
from memtrain.trainers.run_folder.folder import RunFolder

Make = Callable[[str, str, str], GeneralTracker]
"""A tracker of the project, the name of the run and the folder for its files."""

MAKERS: dict[str, Make] = {
    "tensorboard": lambda project, run, folder: TensorBoardTracker(run, logging_dir=folder),
    "wandb": lambda project, run, folder: WandBTracker(project, name=run, dir=folder),
    "mlflow": lambda project, run, folder: MLflowTracker(project, logging_dir=folder, run_name=run),
    "trackio": lambda project, run, folder: TrackioTracker(project, name=run),
}
"""By the name in `log.trackers`, which is also the name of the package it needs."""


def check_trackers(names: Sequence[str]) -> None:
    """Nothing, where every tracker can be used.

    Raises: LaunchError naming each whose package is missing.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        fix = "pip install 'memtrain[trackers]', or remove it from log.trackers"
        raise LaunchError(
            [Fault(f"{name} is asked for but not installed", "log.trackers", fix) for name in missing]
        )


def open_trackers(plan: Plan, folder: RunFolder) -> Trackers:
    """The trackers of the recipe, started; the main rank only. None of them where none is asked for.

    Raises: LaunchError when one is missing, or refuses to start (no login, no network).
    """
    log = plan.recipe.log
    check_trackers(log.trackers)
    run = folder.path.resolve().name
    trackers: list[GeneralTracker] = []
    for name in log.trackers:
        folder.trackers.mkdir(parents=True, exist_ok=True)
        try:
            tracker = MAKERS[name](log.project, run, str(folder.trackers))
            tracker.start()
            tracker.store_init_configuration(flat_recipe(plan))
        except Exception as error:  # noqa: BLE001 (each package raises errors of its own)
            raise LaunchError(
                f"{name} does not start: {type(error).__name__}: {error}",
                where="log.trackers",
                fix=f"log in to {name}, or configure it, or remove it from log.trackers",
            ) from None
        trackers.append(tracker)
    return Trackers(tuple(trackers))


@dataclass(frozen=True, slots=True)
class Trackers:
    """Started trackers."""

    trackers: tuple[GeneralTracker, ...] = ()

    def emit(self, event: Event) -> None:
        """Report the numbers of an event; kinds without any are left out."""
        values = numbers_of(event)
        for tracker in self.trackers if values else ():
            tracker.log(values, step=event.step)

    def close(self) -> None:
        """Send the remaining values."""
        for tracker in self.trackers:
            tracker.finish()


def numbers_of(event: Event) -> dict[str, float]:
    """Numbers of an event for a tracker, under `train/`, `eval/` and `run/`."""
    if isinstance(event, StepEvent):
        shown = {
            "loss": event.loss,
            "lr": event.lr,
            "grad_norm": event.grad_norm,
            "epoch": event.epoch,
            "tokens_per_s": event.tokens / event.wall_s if event.wall_s else None,
            "peak_bytes": event.peak_bytes,
            **event.extra,
        }
        return {f"train/{name}": value for name, value in shown.items() if value is not None}
    if isinstance(event, EvalEvent):
        return {"eval/loss": event.loss} | {f"eval/{name}": value for name, value in event.extra.items()}
    if isinstance(event, FinalEvent):
        return {"run/seconds": event.seconds}
    return {}


def flat_recipe(plan: Plan) -> dict[str, str | int | float | bool]:
    """The recipe by dotted key, in the plain values that every tracker takes."""
    flat: dict[str, str | int | float | bool] = {}

    def add(prefix: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key, inside in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), inside)
        elif isinstance(value, (str, int, float, bool)):
            flat[prefix] = value
        elif value is not None:
            flat[prefix] = str(value)

    add("", plan.hidden_recipe())
    return flat
