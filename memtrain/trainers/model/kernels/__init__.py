"""Norms, rotary positions and gated products of transformers' models in few kernels, to the same numbers."""
