"""The loop: what every rank does from its first step to its last."""
