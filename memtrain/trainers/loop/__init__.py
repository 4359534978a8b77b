"""The loop: the work of every rank from the first step to the last."""
