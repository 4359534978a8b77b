"""Batches: the micro-batches of every step, by method."""
