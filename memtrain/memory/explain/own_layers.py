"""Words on the activations of layers of which no formula is known: measured, or known to be more."""

from __future__ import annotations

from memtrain.memory.model_shape.shape import ModelShape

PACKAGES = "flash-linear-attention, mamba-ssm and causal-conv1d"
"""Packages whose kernels transformers takes where they are installed."""


def activations_words(shape: ModelShape) -> str:
    """Source of the activations of such layers, in a sentence or two; empty where a model has none."""
    like_a_llama = "They are counted like those of a Llama of its sizes"
    if not shape.own_layers and shape.unmeasured:
        return f"The activations of its layers are not known: {shape.unmeasured}. {like_a_llama}."
    if not shape.own_layers:
        return "The activations of its layers were measured in passes without data." if shape.record else ""
    layers = f"The activations of its layers ({', '.join(shape.own_layers)})"
    if shape.record is not None:
        return (
            f"{layers} are those of transformers' own code, measured in passes without data; the kernels of "
            f"{PACKAGES}, where they are installed, keep less."
        )
    why = f": {shape.unmeasured}" if shape.unmeasured else ""
    return (
        f"{layers} are not known{why}. {like_a_llama}, and may be many times as much: no number here says "
        "that a run fits."
    )
