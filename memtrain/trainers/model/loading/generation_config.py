"""A model's generation configuration as transformers can write it: refused values are repaired and noted."""

from __future__ import annotations

import re
from copy import deepcopy

from torch import nn
from transformers import GenerationConfig

MOST_MENDED = 20
"""Values that are mended before a configuration is given up. Taste: more than one has."""


def storable(model: nn.Module) -> tuple[GenerationConfig | None, list[str]]:
    """The generation configuration of a model, fit to be written, and the changes, in words.

    None where the model has none (one that scores sequences). transformers writes no configuration that has,
    say, a temperature and no `do_sample`, though many published ones do: sampling is then switched on, as
    servers read such a file; any other value that is refused goes back to transformers' default.

    Raises: ValueError when it is refused all the same.
    """
    given = getattr(model, "generation_config", None)
    if given is None:
        return None, []
    made: GenerationConfig = deepcopy(given)
    notes: list[str] = []
    plain = GenerationConfig()
    for _ in range(MOST_MENDED):
        fault = _refusal(made)
        if not fault:
            return made, notes
        name = _named(fault, made)
        if "`do_sample=True`" in fault and made.do_sample is not True:
            made.do_sample = True
            notes.append(f"generation_config.json has {name} and no do_sample; saved with do_sample: true")
        else:
            notes.append(
                f"generation_config.json has {name}: {getattr(made, name)}, which transformers refuses; "
                f"it is saved with {getattr(plain, name)}"
            )
            setattr(made, name, getattr(plain, name))
    raise ValueError(_refusal(made))


def _refusal(config: GenerationConfig) -> str:
    """Reason that transformers would not write the configuration; empty where it would."""
    try:
        config.validate(strict=True)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _named(fault: str, config: GenerationConfig) -> str:
    """The first value that a refusal speaks of. Raises: ValueError when it names none."""
    for name in re.findall(r"`(\w+)", fault):
        if hasattr(config, name):
            return name
    raise ValueError(fault)
