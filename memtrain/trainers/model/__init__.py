"""Models: loading, adapters, attention, heads, checkpointing and offloading."""
