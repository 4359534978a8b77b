"""Out of memory: the preflight, the recovery and the post-mortem."""
