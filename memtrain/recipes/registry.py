"""The methods: what `method:` may say, what each is, and where its trainer lives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Method:
    """One method. `trainer` names its module as text, so that this floor imports nothing above it."""

    name: str
    says: str
    trainer: str


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "sft",
            "Supervised fine-tuning: cross-entropy on the tokens that are to be learnt.",
            "memtrain.trainers.sft",
        ),
    )
}
"""Every method by its name: the verb of the command line, `method:` and the section of its own knobs."""
