"""The LM head with its loss: full, chunked, recomputed, Liger."""
