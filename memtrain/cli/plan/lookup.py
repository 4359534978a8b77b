"""Inputs of a plan, found without torch: the model's configuration, the data, the devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from memtrain.cli.plan.model_shape import layer_measurer, shape_for
from memtrain.errors import LaunchError, RecipeError
from memtrain.memory.estimate.pricing import PlannerInputs
from memtrain.memory.hardware.cards import named_card
from memtrain.memory.hardware.devices import Hardware, detect
from memtrain.memory.hardware.packages import ELSEWHERE
from memtrain.memory.model_shape.config_file import check_values, read_config_json, untagged
from memtrain.memory.model_shape.families import FAMILIES
from memtrain.memory.model_shape.known_models import known_model, not_trained
from memtrain.memory.model_shape.rope_scaling import scaled
from memtrain.memory.plan.units import gib
from memtrain.memory.rules.assumed_lengths import assumed_counter, assumed_profile
from memtrain.memory.rules.ledger import SourcedRecipe
from memtrain.recipes.edit import with_key
from memtrain.recipes.recipe import HAS_ANSWERS
from memtrain.recipes.registry import METHODS
from memtrain.recipes.sections.model import Model

HUB_TIMEOUT_S = 3.0
"""Longest wait for the hub: its answer is a page of numbers."""


@dataclass(frozen=True, slots=True)
class LookedAt:
    """A model's configuration, and where it comes from where that is to be reported."""

    config: Mapping[str, Any]
    note: str = ""
    is_on_hub_only: bool = False
    """Neither the weights nor the tokenizer are here, and the hub cannot be asked."""
    is_by_name: bool = False
    """The configuration is that of another model, which the name says."""


def look_at_model(model: Model) -> LookedAt:
    """The configuration of the model, from a file, the hub's cache, the hub, or the table of known models,
    with the recipe's scaling of positions.

    Raises: LaunchError when it is nowhere; RecipeError for a scaling that the model cannot have.
    """
    found = _as_it_is(model)
    return replace(found, config=scaled(found.config, model.rope_scaling))


def _as_it_is(model: Model) -> LookedAt:
    from memtrain.trainers.model.loading.tiny import BUILTIN_TINY, tiny_config

    if model.path == BUILTIN_TINY:
        return LookedAt(tiny_config(_tiny_vocabulary()))
    if isinstance(model.config, str):
        return LookedAt(read_config_json(Path(model.config).expanduser(), "model.config"))
    if model.config is not None:
        return LookedAt(_given_config(model, model.config))
    assert model.path is not None, "A recipe has model.path or model.config."
    if model.trust_remote_code:
        from memtrain.trainers.model.loading.own_code import trust_code

        trust_code(model)
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        return LookedAt(read_config_json(folder, "model.path"))
    if model.path.startswith((".", "/", "~")) or model.path.count("/") > 1:
        raise LaunchError(
            f"there is no folder {model.path}", "model.path", "give a hub id (owner/name) or a folder"
        )
    return _on_hub(model.path, model.revision or "main")


def _given_config(model: Model, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A mapping of the recipe. transformers is asked only for model types that memtrain does not know."""
    check_values(config, "model.config")
    if config.get("model_type") in FAMILIES:
        has_vocabulary = "vocab_size" in config or model.tokenizer != "builtin:tiny"
        return config if has_vocabulary else {"vocab_size": _tiny_vocabulary(), **config}
    from memtrain.cli.plan.model_config import own_config

    return cast(Mapping[str, Any], own_config(model))


def _tiny_vocabulary() -> int:
    from memtrain.trainers.data.tokenize.tiny_tokenizer import NUM_TOKENS

    return NUM_TOKENS


def _on_hub(path: str, revision: str) -> LookedAt:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json", revision=revision)
    except HFValidationError:
        raise LaunchError(
            f"'{path}' cannot be the name of a model", "model.path", "give a hub id (owner/name) or a folder"
        ) from None
    if isinstance(cached, str):
        return LookedAt(read_config_json(Path(cached), "model.path"))
    asked, why = _ask_hub(path, revision)
    if asked is not None:
        return LookedAt(asked)
    known = known_model(path)
    if known is None:
        other = not_trained(path)
        raise LaunchError(
            f"{why}, and {path} is not in memtrain's table of shapes{f'; {other}' if other else ''}",
            "model.path",
            "name a model of text, such as the language model inside"
            if other
            else "connect this machine to the hub, give a folder with a config.json, or write the shape into "
            "model.config",
        )
    said = f"{known.name}'s, by its name" if known.is_by_name else "from memtrain's own table"
    note = f"{why[0].upper()}{why[1:]}: the shape of {path} is {said}."
    return LookedAt(known.config, note, is_on_hub_only=True, is_by_name=known.is_by_name)


def _ask_hub(path: str, revision: str) -> tuple[dict[str, Any] | None, str]:
    """(the config.json on the hub or None, why there is none). One request, no retries.

    Raises: LaunchError when the hub says that there is no such model.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    if constants.HF_HUB_OFFLINE:
        return None, "the hub is switched off (HF_HUB_OFFLINE)"
    url = f"{constants.ENDPOINT}/{path}/resolve/{revision}/config.json"
    try:
        answer = get_session().get(url, headers=build_hf_headers(), timeout=HUB_TIMEOUT_S)
    except Exception:  # each version of the hub's client has network errors of its own
        return None, "the hub cannot be reached"
    if answer.status_code == 200:
        return _answered(answer, path), ""
    if answer.status_code in (401, 403):
        return None, f"{path} is gated, or does not exist"
    if answer.status_code == 404:
        raise LaunchError(
            f"the hub has no {path} with a config.json",
            "model.path",
            "check the spelling; a private model needs a token (`hf auth login`)",
        )
    return None, f"the hub answers {answer.status_code}"


def _answered(answer: Any, path: str) -> dict[str, Any]:
    """The config.json of an answer of the hub.

    Raises: LaunchError when it is no model's.
    """
    where = f"config.json of {path} on the hub"
    try:
        given = answer.json(object_hook=untagged)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise LaunchError(
            f"the {where} is not a JSON object", "model.path", "choose another model or revision"
        )
    check_values(cast(dict[str, Any], given), where)
    return cast(dict[str, Any], given)


def look_at_devices(
    gpu: str | None, num_gpus: int | None, budget: int | None, device: str
) -> tuple[Hardware, frozenset[str]]:
    """(the devices to plan for, packages that they are taken to have).

    Raises: RecipeError when the options contradict each other or the recipe.
    """
    asks_for_gpu = gpu is not None or num_gpus is not None
    if asks_for_gpu and device == "cpu":
        raise RecipeError(
            "the recipe has cluster.device: cpu, but the plan is for GPUs",
            "--gpu" if gpu is not None else "--num-gpus",
            "leave cluster.device out of the recipe, or set it to auto (cluster.device=auto)",
        )
    here = detect(cast(Any, device))
    if gpu is None and here.device == "cuda":
        found, presumed = here if num_gpus is None else here.with_devices(num_gpus), frozenset[str]()
    elif gpu is not None:
        found = Hardware.named(gpu, num_gpus or 1)
        card = named_card(here.name) if here.device == "cuda" else None
        presumed = frozenset[str]() if card is not None and card.name == found.name else ELSEWHERE
    elif num_gpus is not None:
        raise RecipeError(
            f"--num-gpus {num_gpus} needs a kind of GPU, but none is visible here",
            where="--num-gpus",
            fix="add --gpu h100, or another kind",
        )
    elif budget is not None and device == "auto":
        found, presumed = Hardware.for_budget(budget), ELSEWHERE
    else:
        found, presumed = here, frozenset[str]()
    if budget is not None and budget > max(found.memory_bytes, found.sold_bytes):
        found = found.with_more_memory(budget)
    return found, presumed


def card_words(hardware: Hardware, gpu: str | None, num_bytes: int | None, device: str, where: str) -> str:
    """Reason of the devices that a plan is for; empty where the command names them.

    `num_bytes`: the budget that the command gives. `where`: the place of cluster.device in the recipe.
    """
    if hardware.own_bytes:
        is_chosen = gpu is None and hardware.sold_bytes > 0
        whose = "no known card has more than" if is_chosen else "that has"
        return (
            f"The plan counts with the {gib(hardware.memory_bytes)} of --budget, at the speed of "
            f"{hardware.name}: {whose} {gib(hardware.own_bytes)}."
        )
    if gpu is not None:
        return ""
    if hardware.sold_bytes and num_bytes is not None:
        same = num_bytes == hardware.sold_bytes
        which = "known card of that size" if same else "smallest known card that has as much"
        return (
            f"The plan for {gib(num_bytes)} is for the {which}, {hardware.name}, of which a "
            f"program can use {gib(hardware.memory_bytes)}; --gpu names another."
        )
    if hardware.device == "cuda":
        return f"The plan is for {hardware.name}, which is in this machine; --gpu plans for another card."
    if device == "cpu":
        return f"The plan is for this machine's CPU, as cluster.device says ({where})."
    return "The plan is for this machine's CPU, where no GPU is visible; --gpu h100 plans for a card."


def budget_words(num_bytes: int | str, hardware: Hardware, where: str) -> str:
    """Sentence on a budget of the recipe that no program gets of the card; empty of any other."""
    if isinstance(num_bytes, str) or hardware.device != "cuda":
        return ""
    if num_bytes <= max(hardware.memory_bytes, hardware.sold_bytes):
        return ""
    return (
        f"memory.budget asks for {gib(num_bytes)} ({where}), and a program gets "
        f"{gib(hardware.memory_bytes)} of {hardware.name}: the plan counts with these."
    )


def facts_without_data(
    asked: SourcedRecipe, looked: LookedAt, hardware: Hardware, presumed: frozenset[str] = frozenset()
) -> PlannerInputs:
    """Facts for data that was not read: every sequence as long as it may be.

    Raises: RecipeError where no length is given.
    """
    from memtrain.cli.plan.model_config import reward_shapes, teacher_shape

    recipe = asked.recipe
    profile = assumed_profile(asked, shares_prompts=True)
    unshared = None
    if recipe.method in HAS_ANSWERS or recipe.online is not None:
        own = assumed_profile(asked, shares_prompts=False)
        unshared = (own, assumed_counter(recipe, own))
    shape = shape_for(looked.config, recipe.model.path or "model.config", METHODS[recipe.method].head)
    return PlannerInputs(
        hardware=hardware,
        shape=shape,
        config=looked.config,
        profile=profile,
        count_steps=assumed_counter(recipe, profile),
        method=recipe.method,
        learns_entropy=recipe.learns_entropy,
        unshared=unshared,
        rewards=reward_shapes(recipe, looked.config, lambda model: look_at_model(model).config),
        taught=recipe.taught,
        teacher=teacher_shape(recipe, lambda model: look_at_model(model).config),
        presumed=presumed,
        is_guessed=True,
        measure_layers=layer_measurer(looked.config, shape),
        at_length=lambda length: facts_without_data(
            SourcedRecipe(with_key(recipe, "length.max_length", length), asked.where),
            looked,
            hardware,
            presumed,
        ),
    )
