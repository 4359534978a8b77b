"""Checkpoints: writing, reading and resuming exactly."""
